"""The torchrun side: loop, optimizers, checkpoints, export."""
