"""The engine of the ingest is a setting that does not change the result, and the format of the log is one that does."""

from typing import Any

import pytest

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine_settings import DuckdbSettings

LOG = {"paths": "log.parquet", "timestamp_column": "t"}


def test_duckdb_is_the_default_and_the_engine_is_not_part_of_the_fingerprint() -> None:
    default = InteractionsConfig.model_validate(LOG)
    on_spark = InteractionsConfig.model_validate(LOG | {"engine": {"kind": "spark", "master": "yarn"}})
    assert default.engine == DuckdbSettings() and default.engine.installation() is None
    assert default.result_settings() == on_spark.result_settings()
    assert "engine" not in default.result_settings()


def test_the_format_is_part_of_the_fingerprint_unless_it_is_parquet() -> None:
    table = InteractionsConfig.model_validate(LOG | {"paths": "shop.log@v7", "format": "delta", "engine": {"kind": "spark"}})
    assert table.result_settings()["format"] == "delta" and table.source_noun == "tables"
    assert "format" not in InteractionsConfig.model_validate(LOG).result_settings()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "delta", "engine": {"kind": "duckdb"}}, "format is delta, but engine.kind is duckdb"),
        ({"format": "orc", "paths": "./log@v3"}, "./log@v3 names a version, but an ORC table has none; remove @v3"),
        ({"format": "iceberg", "paths": "/lake/log"}, "'/lake/log' is a path, but an Iceberg table has a name in a catalog"),
        ({"format": "delta", "paths": "log where true"}, "'log where true' is not the name of a table in a catalog"),
        ({"format": "delta", "split": {"kind": "files", "test_paths": "a;b"}}, "'a;b' is not the name of a table"),
    ],
)
def test_tables_that_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InteractionsConfig.model_validate(LOG | {"engine": {"kind": "spark"}, "paths": "shop.log"} | settings)
