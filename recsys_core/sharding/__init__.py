"""Sharding of the embedding tables: config, offline planner, plan file and sharders."""
