"""Refresh: a package with the current items and the model of its parent package, without a training."""
