"""Benchmark of recommendation quality on public data; see __main__."""
