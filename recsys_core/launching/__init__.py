"""Launching of distributed processes: torchrun on one host, or on many through TorchX, with monitoring and failure reports."""
