"""Models in closed form, computed from the log alone: their matrices, and item vectors made of them."""
