"""Attributes of the package that are imported on first use, and imports without garbage collection."""

import gc

import pytest

import recsys_core
from recsys_core.imports import fast_imports


def test_the_error_of_an_unknown_attribute_lists_the_attributes_of_the_package() -> None:
    with pytest.raises(AttributeError, match=r"'recsys_core' has no attribute 'Index'; it has .*Retriever"):
        recsys_core.Index  # noqa: B018


def test_garbage_collection_is_off_during_imports_and_on_after_an_error() -> None:
    with pytest.raises(ImportError), fast_imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() > 0
