"""Ingest of interactions, pretrained vectors and features: from parquet to memory-mapped arrays."""
