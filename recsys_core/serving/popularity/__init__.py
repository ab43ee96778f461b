"""The most popular items, which a package recommends when a request has nothing that the model reads."""
