"""Benchmark of recommendation quality on public data. `__main__` describes it."""
