"""The fixture that builds the package of a small model."""

from tests.recsys_core.serving.conftest import build as build  # a fixture
