"""Checks of an installation: findings, and checks of the machine, the servers and the previous run."""
