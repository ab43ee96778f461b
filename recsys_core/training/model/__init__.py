"""The model on the ranks: sharded tables and layers, their optimizers, and the average of the weights."""
