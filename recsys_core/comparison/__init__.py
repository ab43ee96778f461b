"""Comparison of two rankers on the same users: metrics of each user, and the rules that decide."""
