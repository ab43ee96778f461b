"""Keys of `Batch.sparse`, in a module that needs no torch: the model's spec is read where nothing is trained."""

ROWS, QUERY, QUERY_WEIGHTED = "rows", "query", "query_weighted"
"""What is looked up row by row (features of the U items, and the B users), features of the B queries that are pooled, and those
that have weights."""
