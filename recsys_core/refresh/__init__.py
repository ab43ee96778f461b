"""Refresh: a package with the items of today and the model of its parent package, without a training."""
