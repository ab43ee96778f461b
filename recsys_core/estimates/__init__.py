"""Estimates of time, memory and disk of a run, from constants that the benchmarks measured."""
