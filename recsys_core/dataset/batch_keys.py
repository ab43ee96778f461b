"""Keys of `Batch.sparse`.

This module does not import torch, because model specs are also read in processes that do not load torch.
"""

UNPOOLED, POOLED, POOLED_WEIGHTED = "unpooled", "pooled", "pooled_weighted"
"""Kinds of lookup.

UNPOOLED: one embedding for each value; used for item rows, item features and user rows. POOLED: one vector for each query, the
pooled embeddings of its values. POOLED_WEIGHTED: like POOLED, with a weight for each value.
"""
