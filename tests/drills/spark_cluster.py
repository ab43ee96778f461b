"""A standalone Spark cluster of processes on loopback: a master and workers, each of which starts one executor."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

START_TIMEOUT_S = 120.0


class SparkCluster:
    """A master process and worker processes."""

    timeout_s = 90.0
    """Value of interactions.engine.timeout_s. An executor starts in less time, even on a busy machine."""

    def __init__(self, folder: Path) -> None:
        import pyspark

        self._folder, self._spark_home = folder, Path(pyspark.__file__).parent
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = server.getsockname()[1]
        self.url = f"spark://127.0.0.1:{self._port}"
        self.workers: list[subprocess.Popen[bytes]] = []
        self._master = self._start("master", "org.apache.spark.deploy.master.Master", ["--port", str(self._port)])
        self._wait_for_port()

    @property
    def settings(self) -> dict[str, Any]:
        """Value of interactions.engine for an ingest on this cluster."""
        conf = {
            "spark.executor.memory": "600m",
            "spark.executor.cores": 1,
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
            "spark.executor.extraJavaOptions": "-XX:+UseSerialGC",
            "spark.sql.shuffle.partitions": 4,
            "spark.shuffle.io.retryWait": "1s",
        }
        return {"kind": "spark", "master": self.url, "conf": conf, "timeout_s": self.timeout_s}

    def start_worker(self, *, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
        """Start a worker with one core. `prefix` is a command that executes the command line after it."""
        name = f"worker-{len(self.workers)}"
        arguments = ["--cores", "1", "--memory", "700m", "--work-dir", str(self._folder / name), self.url]
        main_class = "org.apache.spark.deploy.worker.Worker"
        self.workers.append(self._start(name, main_class, arguments, prefix=prefix, environment=environment))

    def kill_worker(self, index: int) -> None:
        """Kill a worker and its executor at once, as if their host was lost."""
        process = psutil.Process(self.workers[index].pid)
        for victim in [process, *process.children(recursive=True)]:
            victim.kill()
        self.workers[index].wait()

    def stop(self) -> None:
        """End all processes."""
        for process in [*self.workers, self._master]:
            if process.poll() is None:
                children = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                for child in children:
                    child.kill()
            process.wait()

    def _start(
        self,
        name: str,
        main_class: str,
        arguments: Sequence[str],
        *,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        spark_environment = {"SPARK_HOME": str(self._spark_home), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_SCALA_VERSION": "2.13"}
        java = ["java", "-Xmx256m", "-XX:+UseSerialGC", "-cp", f"{self._spark_home}/jars/*", main_class]
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [*prefix, *java, "--host", "127.0.0.1", "--webui-port", "0", *arguments],
                env=os.environ | spark_environment | (environment or {}),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait_for_port(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return
            except OSError:
                assert self._master.poll() is None and time.monotonic() < deadline, (self._folder / "master.log").read_text()
                time.sleep(0.2)


@contextmanager
def spark_cluster(folder: Path) -> Iterator[SparkCluster]:
    """Start a master, whose logs are in `folder`. At the end, kill all processes of the cluster."""
    folder.mkdir()
    cluster = SparkCluster(folder)
    try:
        yield cluster
    finally:
        cluster.stop()
