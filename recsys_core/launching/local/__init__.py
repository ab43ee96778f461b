"""The ranks of one host: torchrun, rendezvous, stack dumps."""
