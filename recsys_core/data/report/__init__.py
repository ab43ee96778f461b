"""The data report: what tonight's data is like, and whether it may be trained on."""
