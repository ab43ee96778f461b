"""Imports on first use, and without garbage collection."""

import gc

import pytest

import recsys_core
from recsys_core.imports import fast_imports


def test_an_unknown_attribute_of_the_package_is_an_error_with_the_names_that_it_has() -> None:
    with pytest.raises(AttributeError, match=r"'recsys_core' has no attribute 'Index'; it has .*Retriever"):
        recsys_core.Index  # noqa: B018


def test_collections_are_off_during_imports_and_on_after_an_error() -> None:
    with pytest.raises(ImportError), fast_imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() > 0
