"""The fixture that builds the package of a small model."""

from tests.recsys_core.serving.conftest import build_packaged_model as build_packaged_model  # a fixture
