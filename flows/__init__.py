"""Prefect flows and the command line."""

import tasks as _tasks  # noqa: F401  sets the environment that prefect reads when it is imported
