"""Pretrained vectors: from parquet to one matrix per table."""
