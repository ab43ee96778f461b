"""Pretrained embeddings: from parquet to one matrix per embedding table."""
