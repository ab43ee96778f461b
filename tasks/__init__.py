"""Prefect tasks: one module per stage, the MLflow registry, and hyperparameter tuning."""

import os

# Prefect and MLflow read these variables when they are imported. The variables turn off usage reports and pickled models, give
# requests to MLflow a shorter deadline (its defaults are 120 s and 7 retries), and keep MLflow from printing its address, which
# may contain a password.
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "nightjar,recsys_core")
os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
