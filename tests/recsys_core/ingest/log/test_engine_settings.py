"""The engine of the ingest is a setting that does not change the result."""

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.engine_settings import DuckdbSettings

LOG = {"paths": "log.parquet", "timestamp_column": "t"}


def test_duckdb_is_the_default_and_the_engine_is_not_part_of_the_fingerprint() -> None:
    default = InteractionsConfig.model_validate(LOG)
    on_spark = InteractionsConfig.model_validate(LOG | {"engine": {"kind": "spark", "master": "yarn"}})
    assert default.engine == DuckdbSettings() and default.engine.installation() is None
    assert default.result_settings() == on_spark.result_settings()
    assert "engine" not in default.result_settings()
