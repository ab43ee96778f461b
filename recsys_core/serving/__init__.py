"""The packaged retriever: INT8 query tower and index."""
