"""Delivery: notices of a new champion to other systems."""
