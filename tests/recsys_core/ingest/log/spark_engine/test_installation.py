"""Checks of the Spark installation: libraries, the version of Java, and whether the master answers."""

import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from recsys_core.errors import StageError
from recsys_core.ingest.log.engine_settings import SparkSettings
from recsys_core.ingest.log.spark_engine import installation
from recsys_core.ingest.log.spark_engine.installation import check_installation
from tests.recsys_core.ingest.interaction_logs import ingest
from tests.recsys_core.ingest.parquet_files import assert_rejects, raises_input_error, write_parquet

VALID_COLUMNS = {"user_id": [1, 1, 1, 2], "item_id": [5, 6, 7, 5], "t": [1, 2, 3, 4]}


@pytest.fixture
def all_libraries_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all libraries appear installed. Their version is 4.0.1."""
    monkeypatch.setattr(installation, "find_spec", lambda name: name)
    monkeypatch.setattr(metadata, "version", lambda name: "4.0.1")


def install_fake_java(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set JAVA_HOME to a folder whose program `java` executes the shell script. Return the path of the program."""
    program_path = folder / "java" / "bin" / "java"
    program_path.parent.mkdir(parents=True)
    program_path.write_text(f"#!/bin/sh\n{script}\n")
    program_path.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(folder / "java"))
    return program_path


def test_a_missing_library_is_named_with_its_extra_and_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda name: None if name == "pyspark" else name)
    path = write_parquet(tmp_path / "a.parquet", **VALID_COLUMNS)
    assert_rejects(
        lambda folder: ingest(folder, path, split={"kind": "time"}, engine={"kind": "spark"}), tmp_path,
        "interactions.engine: kind spark needs pyspark, which is not installed", 'pip install ".[spark]"',
    )  # fmt: skip


@pytest.mark.usefixtures("all_libraries_installed")
def test_the_error_names_a_missing_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    with raises_input_error(
        f"needs Java, but there is no program {tmp_path}/nowhere/bin/java; install OpenJDK 17, or set JAVA_HOME"
    ):
        check_installation()


@pytest.mark.usefixtures("all_libraries_installed")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'openjdk version \"11.0.2\" 2019-01-15' >&2", "is version 11.0.2, but Spark needs Java 17"),
        ("echo 'java version \"1.8.0_412\"' >&2", "is version 1.8.0_412, but Spark needs Java 17"),
        ("exit 3", "-version fails with status 3; install OpenJDK 17"),
    ],
)
def test_the_error_names_an_old_or_broken_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    java_path = install_fake_java(tmp_path, script, monkeypatch)
    with raises_input_error(str(java_path), message):
        check_installation()


@pytest.mark.usefixtures("all_libraries_installed")
def test_the_error_names_a_java_that_does_not_start_or_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java_path = install_fake_java(tmp_path, "exec sleep 60", monkeypatch)
    monkeypatch.setattr(installation, "_JAVA_TIMEOUT_S", 0.2)
    with raises_input_error(f"{java_path} -version fails (", "timed out after 0.2 seconds", "install OpenJDK 17"):
        check_installation()
    java_path.write_bytes(b"\x7fELF of another processor")
    with raises_input_error(f"{java_path} -version fails (", "Exec format error", "install OpenJDK 17"):
        check_installation()


def test_another_major_version_of_pyspark_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda name: name)
    monkeypatch.setattr(metadata, "version", lambda name: "3.5.9")
    with raises_input_error("pyspark 3.5.9 is installed, but nightjar needs version 4"):
        check_installation()


@pytest.mark.usefixtures("all_libraries_installed")
def test_the_installation_text_names_the_versions_and_the_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_java(tmp_path, "echo 'openjdk version \"21.0.3\" 2024-04-16' >&2", monkeypatch)
    assert SparkSettings(kind="spark", master="yarn").installation_text() == "Spark 4.0.1, Java 21.0.3, master yarn"


def test_a_master_that_does_not_answer_is_an_error_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        master = f"spark://127.0.0.1:{port}"
        SparkSettings(kind="spark", master=master).check_master(timeout_s=0.2)  # a port that accepts connections is no error
    with pytest.raises(
        StageError, match=rf"no Spark master answers at {master} within 0.2 s \(127.0.0.1:{port}: .*\); start it"
    ):
        SparkSettings(kind="spark", master=master).check_master(timeout_s=0.2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"master": "mesos://host:5050"}, "should match pattern"),
        ({"conf": {"spark.master": "yarn"}}, "set interactions.engine.master instead of spark.master"),
        ({"conf": {"spark.hadoop.fs.s3a.secret.key": "x"}}, "looks like a secret, and the config of a run is stored"),
        ({"conf": {"hadoop.tmp.dir": "x"}}, "should match pattern"),
    ],
)
def test_invalid_masters_and_spark_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparkSettings.model_validate({"kind": "spark"} | settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spark.hadoop.fs.azure.account.key.shop.dfs.core.windows.net", "x"),
        ("spark.hadoop.fs.azure.sas.container.shop.blob.core.windows.net", "x"),
        ("spark.hadoop.google.cloud.auth.service.account.private.key", "x"),
        ("spark.ssl.keyPassword", "x"),
        ("spark.driver.extraJavaOptions", "-Dproxy=http://ada:pw@proxy:3128"),
    ],
)
def test_secrets_in_spark_properties_are_rejected(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{key} looks like a secret"):
        SparkSettings(conf={key: value})


def test_spark_properties_without_a_secret_are_accepted() -> None:
    conf: dict[str, Any] = {
        "spark.hadoop.fs.azure.account.keyprovider.shop.dfs.core.windows.net": "org.example.KeyProvider",
        "spark.hadoop.fs.s3a.endpoint": "https://storage.example:9000",
        "spark.executor.cores": 4,
    }
    assert SparkSettings(conf=conf).conf == conf
