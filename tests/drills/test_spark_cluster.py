"""Ingest on a Spark cluster of real processes: a lost worker changes nothing, and a broken cluster is a one-line error."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from benchmarks.engines import differences, ingest, write_log
from recsys_core.errors import InputError, StageError
from tests.drills.spark_cluster import SparkCluster, spark_cluster
from tests.recsys_core.ingest.spark_sessions import reason_to_skip

pytestmark = [pytest.mark.drill, pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())]
NUM_EVENTS = 400_000


@pytest.fixture(scope="module")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "log"
    write_log(folder, num_events=NUM_EVENTS)
    return folder


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SparkCluster]:
    with spark_cluster(tmp_path / "cluster") as cluster:
        yield cluster


class DelayedKill(threading.Thread):
    """Calls `kill` as soon as the ingest has written a file that matches `pattern`."""

    def __init__(self, folder: Path, pattern: str, kill: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._folder, self._pattern, self._kill = folder, pattern, kill
        self.has_killed = False

    def run(self) -> None:
        while not any(self._folder.glob(self._pattern)):
            time.sleep(0.02)
        self._kill()
        self.has_killed = True


def test_a_worker_that_is_killed_in_the_middle_does_not_change_the_store(
    cluster: SparkCluster, log_folder: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        cluster.start_worker()
    delayed_kill = DelayedKill(tmp_path, "spark.tmp/spill/remaining-*/_temporary", lambda: cluster.kill_worker(0))
    delayed_kill.start()
    spark_store = ingest(log_folder, tmp_path / "spark", engine=cluster.settings)
    assert delayed_kill.has_killed
    assert cluster.workers[1].poll() is None
    duckdb_store = ingest(log_folder, tmp_path / "duckdb", engine={"kind": "duckdb"})
    assert differences(duckdb_store, spark_store) == []


def test_spark_reads_an_orc_table_with_the_result_of_duckdb_for_the_parquet_log(cluster: SparkCluster, tmp_path: Path) -> None:
    write_log(tmp_path / "log", num_events=NUM_EVENTS // 10)
    for path in (tmp_path / "log").iterdir():
        log_table = pq.read_table(path)
        time_s = log_table.column("time").cast(pa.timestamp("s", "UTC")).cast(pa.int64())
        log_table = log_table.set_column(2, "time", time_s).set_column(6, "slot", log_table.column("slot").cast(pa.int16()))
        pq.write_table(log_table, path)
        (tmp_path / "orc").mkdir(exist_ok=True)
        orc.write_table(log_table, tmp_path / "orc" / f"{path.stem}.orc")
    cluster.start_worker()
    spark_store = ingest(tmp_path / "orc", tmp_path / "spark", engine=cluster.settings, format="orc")
    duckdb_store = ingest(tmp_path / "log", tmp_path / "duckdb", engine={"kind": "duckdb"})
    assert differences(duckdb_store, spark_store) == ["fingerprint", "lineage", "num_files_read", "sources", "parts"]


def assert_ingest_fails(error: type[Exception], message: str, cluster: SparkCluster, log_folder: Path, folder: Path) -> None:
    """Assert that the ingest into `folder` raises an error of one line and leaves no file."""
    with pytest.raises(error, match=message) as error_info:
        ingest(log_folder, folder, engine=cluster.settings)
    assert "\n" not in str(error_info.value)
    assert [path for path in folder.parent.iterdir() if path.name.startswith(folder.name)] == []


def test_the_stage_ends_if_no_executor_is_left(cluster: SparkCluster, log_folder: Path, tmp_path: Path) -> None:
    cluster.start_worker()
    DelayedKill(tmp_path, "stage.tmp/parts/*.parquet/_temporary", lambda: cluster.kill_worker(0)).start()
    assert_ingest_fails(
        StageError,
        "all executors of spark://.* are lost, and none came back within 90 s",
        cluster,
        log_folder,
        tmp_path / "stage",
    )


def test_a_cluster_without_workers_is_an_error_after_the_timeout(
    cluster: SparkCluster, log_folder: Path, tmp_path: Path
) -> None:
    cluster.timeout_s = 5
    assert_ingest_fails(StageError, "no executor of spark://.* started within 5 s", cluster, log_folder, tmp_path / "stage")


def test_the_error_names_a_workspace_that_the_executors_do_not_see(
    cluster: SparkCluster, log_folder: Path, tmp_path: Path
) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    cluster.start_worker(prefix=["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {workspace} && exec "$@"', "sh"])
    message = f"the executors of spark://.* do not share the folder {workspace}/stage.tmp/spill with this host"
    assert_ingest_fails(InputError, message, cluster, log_folder, workspace / "stage")


def test_the_error_names_a_log_that_the_executors_do_not_see(cluster: SparkCluster, log_folder: Path, tmp_path: Path) -> None:
    cluster.start_worker(prefix=["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {log_folder} && exec "$@"', "sh"])
    assert_ingest_fails(
        InputError,
        f"{log_folder}/.*: the executors do not see this file, but this host does",
        cluster,
        log_folder,
        tmp_path / "stage",
    )


def test_the_error_names_executors_of_another_version(cluster: SparkCluster, log_folder: Path, tmp_path: Path) -> None:
    conf_folder = tmp_path / "conf"
    conf_folder.mkdir()
    # Executors read their version from this file: on their class path, the configuration folder precedes Spark's own files.
    lines = ["version=4.0.99", "user=", "revision=", "branch=", "date=", "url=", "docroot="]
    (conf_folder / "spark-version-info.properties").write_text("\n".join(lines))
    cluster.start_worker(environment={"SPARK_CONF_DIR": str(conf_folder)})
    assert_ingest_fails(
        InputError, "but executors of spark://.* have 4.0.99; install the same version", cluster, log_folder, tmp_path / "stage"
    )
