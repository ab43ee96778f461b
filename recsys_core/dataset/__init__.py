"""Ingested interactions, embeddings and features, and the batches that are built from them."""
