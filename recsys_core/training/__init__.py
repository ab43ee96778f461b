"""Training of the sharded model: loop, optimizers, checkpoints, warm start, export."""
