"""The command of the HTTP server: it follows the registry, and supervises the processes that answer requests."""
