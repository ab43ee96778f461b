"""Modules that the fork server of tests.gloo imports once for all ranks."""

from recsys_core.imports import fast_imports

with fast_imports():
    import duckdb  # noqa: F401
    import pytest  # noqa: F401
    import torchrec  # noqa: F401

    import recsys_core.training.export.export
    import recsys_core.training.loop  # noqa: F401
