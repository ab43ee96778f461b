"""FAISS indexes, measured against exact search."""
