"""Runs from the outside: their results, history, pages and metrics, and what happens before and after a run."""
