"""How good the models are on public data, by config alone. See __main__."""
