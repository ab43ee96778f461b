"""Launching of distributed processes: one agent per host, torchrun, monitoring and failure reports."""
