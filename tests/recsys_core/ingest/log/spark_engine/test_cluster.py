"""The start of Spark's Java process: its logging, and a connector that cannot be downloaded."""

import os
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the extra spark is not installed")

from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from recsys_core.errors import StageError
from recsys_core.ingest.log.engine_settings import SparkSettings
from recsys_core.ingest.log.spark_engine.cluster import _logging_errors_only, start_session


def test_spark_logs_errors_only_while_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable_name in ("SPARK_CONF_DIR", "SPARK_SUBMIT_OPTS"):
        monkeypatch.delenv(variable_name, raising=False)
    with pytest.raises(RuntimeError), _logging_errors_only(tmp_path):
        submit_options = os.environ["SPARK_SUBMIT_OPTS"]
        raise RuntimeError
    assert submit_options == f"-Dlog4j2.configurationFile={(tmp_path / 'log4j2.properties').as_uri()}"
    assert "rootLogger.level = error" in (tmp_path / "log4j2.properties").read_text()
    assert "SPARK_SUBMIT_OPTS" not in os.environ


@pytest.mark.parametrize("variable_name", ["SPARK_CONF_DIR", "SPARK_SUBMIT_OPTS"])
def test_the_logging_stays_unchanged_if_the_user_has_set_a_spark_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable_name: str
) -> None:
    monkeypatch.setenv(variable_name, "/conf")
    environment = dict(os.environ)
    with _logging_errors_only(tmp_path):
        assert dict(os.environ) == environment
    assert not list(tmp_path.iterdir())


def test_the_error_names_a_connector_that_cannot_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exit_early(_: SparkSession.Builder) -> SparkSession:
        raise PySparkRuntimeError(errorClass="JAVA_GATEWAY_EXITED", messageParameters={})

    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", exit_early)
    monkeypatch.setattr("recsys_core.ingest.log.spark_engine.cluster._stop_gateway", lambda: None)
    settings = SparkSettings.model_validate({"kind": "spark", "conf": {"spark.jars.packages": "a:b:1"}})
    with pytest.raises(
        StageError, match=r"check that spark.jars.packages \(a:b:1\) exists, and that this host reaches a Maven"
    ):
        start_session(settings, scratch_folder=tmp_path)
