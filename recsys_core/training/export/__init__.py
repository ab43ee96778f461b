"""Export: vectors, tables and layers of the trained model, written by all ranks."""
