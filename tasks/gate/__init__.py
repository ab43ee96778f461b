"""The champion gate: tests of a new version, and the decision about its promotion."""
