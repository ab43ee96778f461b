"""Checks of the inputs before a run: `nightjar validate` reports the errors that the run would raise."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flows.runs.before_run import check_inputs
from flows.settings.pipeline import PipelineConfig
from tests.recsys_core.ingest.parquet_files import raises_input_error, write_parquet

LOG = {"user_id": [1, 2], "item_id": [1, 2], "t": [1, 2]}


def test_a_context_column_with_another_type_in_a_second_file_is_found_before_the_run(tmp_path: Path) -> None:
    paths = [
        write_parquet(tmp_path / "a.parquet", **LOG, price=[1, 2]),
        write_parquet(tmp_path / "b.parquet", **LOG, price=[0.5, 2.0]),
    ]
    context_features = [{"name": "price", "kind": "numeric", "buckets": 2}]
    config = PipelineConfig.model_validate(
        {"interactions": {"paths": paths, "timestamp_column": "t"}, "features": {"context": context_features}}
    )
    with raises_input_error(paths[1], "column 'price' is double, but int64 in "):
        check_inputs(config)


def test_vectors_of_a_feature_that_is_not_declared_are_found_before_the_run(tmp_path: Path) -> None:
    log_path = write_parquet(tmp_path / "log.parquet", **LOG)
    items_path = write_parquet(tmp_path / "items.parquet", id=[1, 2], brand=["a", "b"])
    vectors_path = write_parquet(tmp_path / "vectors.parquet", item_id=["a", "b"], v=[[1.0] * 64, [2.0] * 64])
    config = {
        "interactions": {"paths": log_path, "timestamp_column": "t"},
        "features": {"items": {"paths": items_path, "id_column": "id", "features": [{"name": "brand"}]}},
    }
    check_inputs(
        PipelineConfig.model_validate(
            config | {"embeddings": {"paths": vectors_path, "vector_column": "v", "table": "item.brand"}}
        )
    )
    config_with_unknown_table = PipelineConfig.model_validate(
        config | {"embeddings": {"paths": vectors_path, "vector_column": "v", "table": "item.brandt"}}
    )
    with raises_input_error("'item.brandt'", "item, user, item.brand"):
        check_inputs(config_with_unknown_table)


def test_vectors_of_another_width_than_the_setting_are_found_before_the_run(tmp_path: Path) -> None:
    log_path = write_parquet(tmp_path / "log.parquet", **LOG)
    vector_column = pa.FixedSizeListArray.from_arrays(pa.array([1.0] * 24, pa.float32()), 12)
    vectors_path = write_parquet(tmp_path / "vectors.parquet", item_id=[1, 2], v=vector_column)
    config = {
        "interactions": {"paths": log_path, "timestamp_column": "t"},
        "embeddings": {"paths": vectors_path, "vector_column": "v"},
        "model": {"embedding_dim": 8},
    }
    with raises_input_error(
        "the vectors of table 'item' have 12 numbers, but tables.item.dim is 8; leave it out", "pca_dim to 8"
    ):
        check_inputs(PipelineConfig.model_validate(config | {"tables": {"item": {"dim": 8}}}))
    check_inputs(PipelineConfig.model_validate(config | {"tables": {"item": {"dim": 12}}}))
    check_inputs(PipelineConfig.model_validate(config))


@pytest.mark.parametrize(
    ("workspace", "message"),
    [
        ("/dev/null", "/dev/null is not a folder"),
        ("/dev/null/x", "is not a folder"),
        ("/proc/x", "cannot be written"),
        ("log.parquet", "is not a folder"),
    ],
)
def test_a_workspace_that_cannot_be_written_is_found_before_the_run(tmp_path: Path, workspace: str, message: str) -> None:
    log_path = write_parquet(tmp_path / "log.parquet", **LOG)
    config = {"interactions": {"paths": log_path, "timestamp_column": "t"}, "workspace": tmp_path / workspace}
    with raises_input_error(f"workspace {tmp_path / workspace}: ", message):
        check_inputs(PipelineConfig.model_validate(config))


def check_inputs_of(
    folder: Path, log_columns: dict[str, Any], vector_columns: dict[str, Any] | None = None, **settings: Any
) -> dict[str, str]:
    """Write a log and vectors with these columns, and return the summaries of check_inputs by input."""
    config: dict[str, Any] = {"model": {"embedding_dim": 8}, "workspace": folder / "workspace"} | settings
    log_path = write_parquet(folder / "log.parquet", **log_columns)
    config["interactions"] = {"timestamp_column": "t"} | config.get("interactions", {}) | {"paths": log_path}
    if vector_columns is not None:
        vectors_path = write_parquet(folder / "vectors.parquet", row_group_size=2, **vector_columns)
        config["embeddings"] = {"paths": vectors_path, "vector_column": "v"} | config.get("embeddings", {})
    return check_inputs(PipelineConfig.model_validate(config))


def test_the_width_of_vectors_in_lists_is_read_from_their_first_rows(tmp_path: Path) -> None:
    vectors_of_width_12 = {"item_id": [1, 2], "v": [[1.0] * 12, None]}
    with raises_input_error("the vectors of table 'item' have 12 numbers, but tables.item.dim is 8; leave it out"):
        check_inputs_of(tmp_path, LOG, vectors_of_width_12, tables={"item": {"dim": 8}})
    assert "12 numbers each" in check_inputs_of(tmp_path, LOG, vectors_of_width_12)["embeddings"]
    assert "8 numbers each" in check_inputs_of(tmp_path, LOG, vectors_of_width_12, embeddings={"pca_dim": 8})["embeddings"]
    with raises_input_error("embeddings.pca_dim is 16, but the vectors of ", "have the width 12"):
        check_inputs_of(tmp_path, LOG, vectors_of_width_12, embeddings={"pca_dim": 16}, model={"embedding_dim": 16})


def test_vectors_of_items_that_are_not_in_the_log_are_found_before_the_run(tmp_path: Path) -> None:
    log_columns = LOG | {"item_id": ["a", "b"]}
    vectors_of_width_8 = [[1.0] * 8] * 5
    with raises_input_error("none of the 5 item vectors belongs to one of the log's items", "such as 'a'", "such as 'item-1'"):
        check_inputs_of(tmp_path, log_columns, {"item_id": [f"item-{row}" for row in range(1, 6)], "v": vectors_of_width_8})
    matching_vectors = {"item_id": ["x", "y", "z", "w", "b"], "v": vectors_of_width_8}  # b is not in the first row group
    assert "5 vectors" in check_inputs_of(tmp_path, log_columns, matching_vectors)["embeddings"]


@pytest.mark.parametrize(
    ("times", "unit", "message"),
    [
        (
            [1_700_000_000, 1_700_000_100],
            "ms",
            "is 1970-01-20 in ms, and 2023-11-14 in s; set interactions.timestamp_unit to s",
        ),
        ([1_700_000_000_000] * 2, "s", "in s, and 2023-11-14 in ms; set interactions.timestamp_unit to ms"),
        ([1_700_000_000_000] * 2, "us", "is 1970-01-20 in us, and 2023-11-14 in ms"),
        *(
            (
                pa.array([1_700_000_000] * 2, pa.timestamp("ms", zone)),
                "s",
                "is 1970-01-20 in ms, and 2023-11-14 in s; write the column again",
            )
            for zone in (None, "UTC")
        ),
    ],
)
def test_a_unit_that_puts_the_log_into_1970_or_far_ahead_is_found_before_the_run(
    tmp_path: Path, times: Any, unit: str, message: str
) -> None:
    with raises_input_error("log.parquet: column 't': ", message):
        check_inputs_of(tmp_path, LOG | {"t": times}, interactions={"timestamp_unit": unit})


@pytest.mark.parametrize("times", [[0, 1], [5, 400_000], [1_700_000_000, 1], [None, 3], [-1, 2], pa.array([1, 2], pa.date32())])
def test_times_that_are_plausible_in_their_unit_or_in_no_unit_are_accepted(tmp_path: Path, times: Any) -> None:
    check_inputs_of(tmp_path, LOG | {"t": times})
