"""The start of Spark's JVM."""

import os
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="the extra spark is not installed")

from recsys_core.ingest.log.spark_engine.cluster import _logging_errors_only


def test_a_jvm_that_starts_logs_errors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARK_CONF_DIR", "SPARK_SUBMIT_OPTS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError), _logging_errors_only(tmp_path):
        option = os.environ["SPARK_SUBMIT_OPTS"]
        raise RuntimeError
    assert option == f"-Dlog4j2.configurationFile={(tmp_path / 'log4j2.properties').as_uri()}"
    assert "rootLogger.level = error" in (tmp_path / "log4j2.properties").read_text()
    assert "SPARK_SUBMIT_OPTS" not in os.environ


@pytest.mark.parametrize("name", ["SPARK_CONF_DIR", "SPARK_SUBMIT_OPTS"])
def test_a_variable_of_spark_keeps_its_logging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "/conf")
    before = dict(os.environ)
    with _logging_errors_only(tmp_path):
        assert dict(os.environ) == before
    assert not list(tmp_path.iterdir())
