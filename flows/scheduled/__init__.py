"""Deployments in Prefect: planned runs, the form of a manual run, and automations."""
