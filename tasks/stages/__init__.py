"""The stages of a run, one Prefect task each."""
