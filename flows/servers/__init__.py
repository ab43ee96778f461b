"""Prefect and MLflow servers as subprocesses of a command."""
