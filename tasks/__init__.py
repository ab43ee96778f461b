"""Prefect tasks: one adapter per stage (manifests in, one call of recsys_core, manifest out), MLflow and tuning."""

import os

# Before prefect or mlflow is imported anywhere: neither reports usage, no model of ours is ever a pickle, a request to MLflow
# ends sooner (its defaults: 120 s, 7 retries), and MLflow prints no address, which can hold a password.
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "nightjar,recsys_core")
os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
