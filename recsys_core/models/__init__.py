"""The two towers and their losses."""
