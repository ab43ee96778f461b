"""Vocabularies with max_rows, in which a more frequent value takes the row of a rarer value."""

import collections
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recsys_core.manifests import FeaturesManifest
from recsys_core.training.warm.starting_model import match_rows_by_value
from tests.recsys_core.ingest.features.test_ingest import (
    ITEMS,
    ingest,
    item_settings,
    rows_of,
    values_and_counts,
    write_small_log,
)
from tests.recsys_core.ingest.parquet_files import write_parquet


def ingest_brands(
    folder: Path, brands: list[Any], *, max_rows: int, previous: FeaturesManifest | None = None
) -> FeaturesManifest:
    """Ingest the item feature `brand`. `brands` has a value for each of the five items."""
    path = write_parquet(folder / "items.parquet", id=ITEMS, brand=pa.array(brands, pa.string()))
    feature = {"name": "brand", "max_rows": max_rows}
    return ingest(folder / "features", write_small_log(folder / "log"), previous=previous, **item_settings(path, feature))


def values_by_row(manifest: FeaturesManifest) -> list[Any]:
    """Return the values of the vocabulary by row; None for row 0."""
    return [value for value, _ in values_and_counts(manifest, "item.brand")]


def test_only_the_most_frequent_values_have_rows(tmp_path: Path) -> None:
    manifest = ingest_brands(tmp_path, ["a", "b", "b", "c", "c"], max_rows=2)
    assert values_and_counts(manifest, "item.brand") == [(None, 1), ("b", 2), ("c", 2)]
    assert rows_of(manifest, "item.brand") == [0, 1, 1, 2, 2]
    feature = manifest.features["item.brand"]
    assert (feature.num_rows, feature.num_out_of_vocabulary, feature.num_new_values, feature.num_evicted_values) == (3, 1, 2, 0)


def test_a_more_frequent_value_takes_the_row_of_the_rarest_value(tmp_path: Path) -> None:
    first_manifest = ingest_brands(tmp_path / "1", ["a", "a", "b", "b", "c"], max_rows=2)
    assert values_by_row(first_manifest) == [None, "a", "b"]
    second_manifest = ingest_brands(tmp_path / "2", ["c", "c", "b", "d", "d"], max_rows=2, previous=first_manifest)
    assert values_and_counts(second_manifest, "item.brand") == [(None, 1), ("c", 2), ("d", 2)], (
        "row 1 changes from a to c, and row 2 from b to d"
    )
    feature = second_manifest.features["item.brand"]
    assert (feature.is_continued, feature.num_new_values, feature.num_evicted_values, feature.num_rows) == (True, 2, 2, 3)
    third_manifest = ingest_brands(tmp_path / "3", ["e", "e", "d", "d", "d"], max_rows=2, previous=second_manifest)
    assert values_and_counts(third_manifest, "item.brand") == [(None, 0), ("e", 2), ("d", 3)], "d keeps its row"


def test_a_new_value_that_is_as_frequent_as_an_old_value_does_not_take_its_row(tmp_path: Path) -> None:
    first_manifest = ingest_brands(tmp_path / "1", ["b", "b", "b", "b", "b"], max_rows=1)
    second_manifest = ingest_brands(tmp_path / "2", ["a", "a", "b", "b", None], max_rows=1, previous=first_manifest)
    assert values_and_counts(second_manifest, "item.brand") == [(None, 3), ("b", 2)], "row 0 counts a, a and null"
    assert second_manifest.features["item.brand"].num_evicted_values == 0


def test_a_warm_start_copies_only_the_rows_of_values_that_both_runs_have(tmp_path: Path) -> None:
    first_manifest = ingest_brands(tmp_path / "1", ["a", "a", "b", "b", "c"], max_rows=2)
    second_manifest = ingest_brands(tmp_path / "2", ["c", "c", "a", "c", "a"], max_rows=2, previous=first_manifest)
    assert values_by_row(second_manifest) == [None, "a", "c"]
    first_run_rows = match_rows_by_value(
        *(pa.chunked_array([pa.array(values_by_row(manifest), pa.string())]) for manifest in (second_manifest, first_manifest))
    )
    assert first_run_rows.tolist() == [0, 1, -1], "the row that c took from b is initialised again"


def test_another_max_rows_starts_a_new_vocabulary(tmp_path: Path) -> None:
    first_manifest = ingest_brands(tmp_path / "1", ["a", "b", "b", "c", "c"], max_rows=3)
    second_manifest = ingest_brands(tmp_path / "2", ["a", "b", "b", "c", "c"], max_rows=1, previous=first_manifest)
    assert values_by_row(second_manifest) == [None, "b"]
    assert not second_manifest.features["item.brand"].is_continued


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    max_rows=st.integers(1, 3),
    brands_by_run=st.lists(st.lists(st.sampled_from("abcdef"), min_size=5, max_size=5), min_size=2, max_size=3),
)
def test_in_each_run_the_most_frequent_values_have_rows_and_keep_them(
    tmp_path_factory: pytest.TempPathFactory, max_rows: int, brands_by_run: list[list[str]]
) -> None:
    folder, previous_manifest, previous_row_by_value = tmp_path_factory.mktemp("runs"), None, {}
    for run_index, brands in enumerate(brands_by_run):
        manifest = ingest_brands(folder / str(run_index), brands, max_rows=max_rows, previous=previous_manifest)
        count_by_brand = collections.Counter(brands)
        values_from_most_frequent = sorted(
            {*count_by_brand, *previous_row_by_value},
            key=lambda value: (-count_by_brand[value], value not in previous_row_by_value, value),
        )
        row_by_value = {value: row for row, value in enumerate(values_by_row(manifest)) if value is not None}
        assert sorted(row_by_value) == sorted(values_from_most_frequent[:max_rows])
        assert sorted(row_by_value.values()) == list(range(1, len(row_by_value) + 1)), "no row is unused"
        assert all(row_by_value[value] == row for value, row in previous_row_by_value.items() if value in row_by_value)
        assert rows_of(manifest, "item.brand") == [row_by_value.get(brand, 0) for brand in brands]
        feature = manifest.features["item.brand"]
        assert feature.num_evicted_values == len(previous_row_by_value.keys() - row_by_value.keys())
        assert feature.num_new_values == len(row_by_value.keys() - previous_row_by_value.keys())
        previous_manifest, previous_row_by_value = manifest, row_by_value
