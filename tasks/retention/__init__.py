"""Retention: run folders, model versions and flow runs that a new run no longer needs."""
