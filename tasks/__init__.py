"""Tasks of the flows: the stages of a run, the MLflow registry, the delivery of a new champion, and hyperparameter tuning."""

import os

ENVIRONMENT = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "nightjar,recsys_core",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_CLIENT_MAX_RETRIES": "6",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Environment variables that Prefect and MLflow read when they are imported.

The variables turn off usage reports and pickled models, and send the log of nightjar to Prefect. A request to Prefect is
retried for two minutes (2 + 4 + ... + 64 s), twice as long as by default. A request to MLflow has a shorter deadline and fewer
retries than by default (120 s and 7). MLflow prints neither progress bars nor its address, which may contain a password.
"""

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
