"""Runs and their folders, records and locks."""
