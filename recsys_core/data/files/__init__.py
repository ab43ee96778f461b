"""Parquet as it comes: where it lies, what its footer says, and whether it is sound."""
