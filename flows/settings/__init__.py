"""The settings of a pipeline: config models, config files, and the starter config of `nightjar init`."""
