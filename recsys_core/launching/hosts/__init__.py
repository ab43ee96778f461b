"""Many hosts: agents submitted through TorchX, their checks, their network and the lease of the launching process."""
