"""The model package (query tower, index, items and users), and the retriever that answers requests with it."""
