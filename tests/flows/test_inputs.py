"""What `nightjar validate` says is what the run will say."""

from pathlib import Path

import pyarrow as pa
import pytest

from flows.config import PipelineConfig
from flows.inputs import check_inputs
from tests.recsys_core.data.tables import refusal, write


def test_columns_of_context_features_are_checked_as_the_ingest_checks_them(tmp_path: Path) -> None:
    log = {"user_id": [1, 2], "item_id": [1, 2], "t": [1, 2]}
    paths = [write(tmp_path / "a.parquet", **log, price=[1, 2]), write(tmp_path / "b.parquet", **log, price=[0.5, 2.0])]
    context = [{"name": "price", "kind": "numeric", "buckets": 2}]
    config = PipelineConfig.model_validate(
        {"interactions": {"paths": paths, "timestamp_column": "t"}, "features": {"context": context}}
    )
    with refusal(paths[1], "column 'price' is double, but int64 in "):
        check_inputs(config)


def test_vectors_of_a_feature_that_is_not_declared_are_found_before_the_run(tmp_path: Path) -> None:
    log = write(tmp_path / "log.parquet", user_id=[1, 2], item_id=[1, 2], t=[1, 2])
    items = write(tmp_path / "items.parquet", id=[1, 2], brand=["a", "b"])
    vectors = write(tmp_path / "vectors.parquet", item_id=["a", "b"], v=[[1.0], [2.0]])
    config = {
        "interactions": {"paths": log, "timestamp_column": "t"},
        "features": {"items": {"paths": items, "id_column": "id", "features": [{"name": "brand"}]}},
    }
    check_inputs(
        PipelineConfig.model_validate(config | {"embeddings": {"paths": vectors, "vector_column": "v", "table": "item.brand"}})
    )
    wrong = PipelineConfig.model_validate(
        config | {"embeddings": {"paths": vectors, "vector_column": "v", "table": "item.brandt"}}
    )
    with refusal("'item.brandt'", "item, user, item.brand"):
        check_inputs(wrong)


def test_vectors_of_another_width_than_their_table_are_found_before_the_run(tmp_path: Path) -> None:
    log = write(tmp_path / "log.parquet", user_id=[1, 2], item_id=[1, 2], t=[1, 2])
    wide = pa.FixedSizeListArray.from_arrays(pa.array([1.0] * 24, pa.float32()), 12)
    vectors = write(tmp_path / "vectors.parquet", item_id=[1, 2], v=wide)
    config = {
        "interactions": {"paths": log, "timestamp_column": "t"},
        "embeddings": {"paths": vectors, "vector_column": "v"},
        "model": {"embedding_dim": 8},
    }
    said = refusal(
        "the vectors of table 'item' have 12 numbers, but the table has 8; set tables.item.dim to 12", "pca_dim to 8"
    )
    with said:
        check_inputs(PipelineConfig.model_validate(config))
    check_inputs(PipelineConfig.model_validate(config | {"tables": {"item": {"dim": 12}}}))


@pytest.mark.parametrize(
    ("workspace", "said"),
    [
        ("/dev/null", "/dev/null is no folder"),
        ("/dev/null/x", "is no folder"),
        ("/proc/x", "cannot be written"),
        ("log.parquet", "is no"),
    ],
)
def test_a_workspace_that_cannot_be_written_is_found_before_the_run(tmp_path: Path, workspace: str, said: str) -> None:
    log = write(tmp_path / "log.parquet", user_id=[1, 2], item_id=[1, 2], t=[1, 2])
    config = {"interactions": {"paths": log, "timestamp_column": "t"}, "workspace": tmp_path / workspace}
    with refusal(f"workspace {tmp_path / workspace}: ", said):
        check_inputs(PipelineConfig.model_validate(config))
