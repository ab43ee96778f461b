"""Settings of the engine and of the log format, and whether they are part of the fingerprint."""

from typing import Any

import pytest

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine_settings import DuckdbSettings

LOG_SETTINGS = {"paths": "log.parquet", "timestamp_column": "t"}


def test_duckdb_is_the_default_and_the_engine_is_not_part_of_the_fingerprint() -> None:
    duckdb_config = InteractionsConfig.model_validate(LOG_SETTINGS)
    spark_config = InteractionsConfig.model_validate(LOG_SETTINGS | {"engine": {"kind": "spark", "master": "yarn"}})
    assert duckdb_config.engine == DuckdbSettings() and duckdb_config.engine.installation_text() is None
    assert duckdb_config.result_settings() == spark_config.result_settings()
    assert "engine" not in duckdb_config.result_settings()


def test_the_format_is_part_of_the_fingerprint_unless_it_is_parquet() -> None:
    table_config = InteractionsConfig.model_validate(
        LOG_SETTINGS | {"paths": "shop.log@v7", "format": "delta", "engine": {"kind": "spark"}}
    )
    assert table_config.result_settings()["format"] == "delta" and table_config.source_noun == "table"
    assert "format" not in InteractionsConfig.model_validate(LOG_SETTINGS).result_settings()


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
def test_a_format_that_does_not_fit_the_engine_or_the_table_name_is_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InteractionsConfig.model_validate(LOG_SETTINGS | {"engine": {"kind": "spark"}, "paths": "shop.log"} | settings)
