"""The job of a training or an export: its description, its attempts, and the process group of its ranks."""
