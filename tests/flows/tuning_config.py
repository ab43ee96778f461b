"""A config that tunes a small model in seconds."""

RATE = "training.table_optimizer.learning_rate"
CONFIG = """
workspace: .
interactions:
  paths: data/interactions/*.parquet
  timestamp_column: timestamp
  split: {kind: time, test_days: 2, validation_days: 1}
model: {embedding_dim: 16, similarity: dot, temperature: 1.0}
sharding: {cluster: {device: cpu, processes_per_node: 1}}
training: {epochs: 2, batch_size: 64, log_every_steps: 5, table_optimizer: {kind: sgd}}
tuning:
  trials: 3
  startup_trials: 1
  seed: 4  # draws 10, then 1e6, which ends in NaN, then 1e-9, which learns nothing
  ranges: {training.table_optimizer.learning_rate: {choices: [1e-9, 10, 1e6]}}
"""
