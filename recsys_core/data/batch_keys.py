"""Keys of `Batch.sparse`. The module does not import torch, because model specs are also read where torch is not loaded."""

UNPOOLED, POOLED, POOLED_WEIGHTED = "unpooled", "pooled", "pooled_weighted"
"""UNPOOLED: features of items, and users; one embedding per value. POOLED: features of queries; one vector per query.
POOLED_WEIGHTED: features of queries with weights."""
