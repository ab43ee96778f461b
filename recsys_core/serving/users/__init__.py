"""The data of the users in a model package."""
