"""Embedding tables: config, optimizers, initial values, and the pooled lookup."""
