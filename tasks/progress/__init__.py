"""Progress of a run in the log and in the Prefect UI."""
