"""Losses: config, functions, negative sampling, and the training objective."""
