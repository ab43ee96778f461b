"""Exact metrics over the full catalogue."""
