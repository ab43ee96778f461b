"""Retention: removal of old run folders and model versions, and the disk budget."""
