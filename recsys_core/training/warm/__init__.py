"""Warm start: the training continues from the model of an earlier run."""
