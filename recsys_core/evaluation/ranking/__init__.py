"""Exact ranking of the full catalogue with bounded memory."""
