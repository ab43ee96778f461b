"""The query tower as files for other runtimes."""
