"""What `nightjar validate` says is what the run will say."""

from pathlib import Path

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
