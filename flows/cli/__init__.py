"""The `nightjar` command line."""
