"""Spark sessions for one stage: their start, checks of the cluster, a watch over its executors, and messages of errors."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from recsys_core.disk import is_disk_full
from recsys_core.errors import InputError, StageError, first_line, printable
from recsys_core.ingest.log.engine_settings import SparkSettings
from recsys_core.ingest.log.spark_engine.installation import require_master

SPARK_ERRORS = (Py4JError, PySparkException)
_POLL_INTERVAL_S, _JVM_TIMEOUT_S = 0.5, 30.0
_DEFAULT_CONF = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
_LOG4J_CONFIG = """rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""
"""Configuration of Log4j for errors only.

The logger of PySpark's gateway needs a level of its own. Without one, PySpark sets the default level to WARN and logs a
message.
"""
_LOG_CONFIG_VARIABLES = {"SPARK_CONF_DIR", "SPARK_SUBMIT_OPTS"}
_LOOPBACK_CONF = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
_VERSION_MISMATCH_MARKERS = ("InvalidClassException", "serialVersionUID", "NoSuchMethodError", "UnsupportedClassVersionError")
"""Texts in the errors of executors whose version of Spark or Java differs from the driver."""


@contextmanager
def open_spark(settings: SparkSettings, *, scratch_folder: Path, must_be_shared: bool = True) -> Iterator[SparkSession]:
    """Yield the active Spark session of the process and leave it open, or yield a new session and stop it at the end.

    Args:
        scratch_folder: folder for temporary files. A local session spills to it; the executors of a cluster write into it.
        must_be_shared: whether every executor has to see `scratch_folder`.

    Raises:
        StageError: the master does not answer, no executor starts within timeout_s, or all executors are lost for timeout_s.
        InputError: the executors do not see `scratch_folder`, or have another version of Spark.
    """
    active_session = SparkSession.getActiveSession()
    spark = active_session or start_session(settings, scratch_folder=scratch_folder)
    watch = _ExecutorWatch(spark.sparkContext, settings)
    try:
        with _explain_errors(settings, watch), watch:
            if not _is_local(spark):
                _require_same_version(spark, settings)
                if must_be_shared:
                    _require_shared_folder(spark, settings, scratch_folder)
            yield spark
    finally:
        if active_session is None:
            stop_session(spark)


def _is_local(spark: SparkSession) -> bool:
    return str(spark.sparkContext.master).startswith("local")


def start_session(settings: SparkSettings, *, scratch_folder: Path) -> SparkSession:
    """Start a session. In local mode, it spills to `scratch_folder`; the executors of a cluster have their own folders."""
    require_master(settings.master, timeout_s=settings.timeout_s)
    conf = dict(_DEFAULT_CONF)
    scratch_folder.mkdir(parents=True, exist_ok=True)
    if settings.is_local:
        conf |= _LOOPBACK_CONF | {"spark.local.dir": str(scratch_folder.absolute())}
    conf |= {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in settings.conf.items()}
    builder = SparkSession.builder.master(settings.master).appName("nightjar ingest")
    for key, value in conf.items():
        builder = builder.config(key, value)
    interrupt_handler = signal.getsignal(signal.SIGINT)
    try:
        with _logging_errors_only(scratch_folder):
            return builder.getOrCreate()
    except Exception as error:  # an error of the JVM or of py4j, or an assertion about a stopped context
        message = spark_message(error)  # read before the JVM ends, because the JVM has the text of the error
        _stop_gateway()
        fix = "check that the master runs and has the same version, and check interactions.engine.conf"
        if "JAVA_GATEWAY_EXITED" in message and "spark.jars.packages" in conf:
            fix = (
                f"check that spark.jars.packages ({conf['spark.jars.packages']}) exists, and that this host reaches a Maven "
                "repository, or copy the jars to this host and set spark.jars"
            )
        raise StageError(
            f"interactions.engine: Spark {pyspark.__version__} does not start with master {settings.master}: {message}; {fix}"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt_handler)  # pyspark replaces it


@contextmanager
def _logging_errors_only(folder: Path) -> Iterator[None]:
    """Limit the log of a JVM that starts inside the block to errors, unless an environment variable of Spark configures it.

    Without the limit, the JVM would write warnings about its start between the log lines of the stages.
    """
    if _LOG_CONFIG_VARIABLES & os.environ.keys():
        yield
        return
    config_path = folder / "log4j2.properties"
    config_path.write_text(_LOG4J_CONFIG)
    os.environ["SPARK_SUBMIT_OPTS"] = f"-Dlog4j2.configurationFile={config_path.absolute().as_uri()}"
    try:
        yield
    finally:
        del os.environ["SPARK_SUBMIT_OPTS"]


def stop_session(spark: SparkSession) -> None:
    """Stop a session and its JVM."""
    with suppress(*SPARK_ERRORS, OSError):
        spark.stop()
    _stop_gateway()


def _stop_gateway() -> None:
    """End the JVM, which pyspark would keep until this process ends. The JVM would take memory from the training."""
    gateway = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = None
    if gateway is not None:
        with suppress(Exception):  # the JVM may have ended
            gateway.shutdown()
        jvm_process = gateway.proc
        jvm_process.stdin.close()  # the JVM ends when its stdin is closed
        try:
            jvm_process.wait(_JVM_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            jvm_process.kill()
            jvm_process.wait()


class _ExecutorWatch:
    """A thread that cancels all jobs if there is no executor for timeout_s. Spark itself would wait for an executor forever."""

    def __init__(self, context: SparkContext, settings: SparkSettings) -> None:
        self._context, self._settings = context, settings
        self._is_local = str(context.master).startswith("local")
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._cancel_jobs_without_executor, daemon=True)
        self.has_lost_all_executors = False

    def __enter__(self) -> None:
        if not self._is_local:
            self._wait_for_first_executor()
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        if not self._is_local:
            self._thread.join()

    def _wait_for_first_executor(self) -> None:
        """Wait for the first executor; raise StageError if none starts within timeout_s."""
        deadline_s = time.monotonic() + self._settings.timeout_s
        while self._num_executors() == 0:
            if time.monotonic() > deadline_s:
                raise StageError(
                    f"interactions.engine: no executor of {self._settings.master} started within "
                    f"{self._settings.timeout_s:g} s; check "
                    "that workers are alive, that they have enough free cores and memory for spark.executor.cores and "
                    "spark.executor.memory, and that they reach this host (spark.driver.host)"
                )
            time.sleep(_POLL_INTERVAL_S)

    def _num_executors(self) -> int:
        return int(self._context._jsc.sc().getExecutorMemoryStatus().size()) - 1  # the status also lists the driver

    def _cancel_jobs_without_executor(self) -> None:
        executor_seen_s = time.monotonic()
        while not self._stop_event.wait(_POLL_INTERVAL_S):
            with suppress(*SPARK_ERRORS, OSError):  # if the JVM has ended, the thread of the stage reports it
                if self._num_executors() > 0:
                    executor_seen_s = time.monotonic()
                elif time.monotonic() - executor_seen_s > self._settings.timeout_s:
                    self.has_lost_all_executors = True
                    self._context.cancelAllJobs()


@contextmanager
def _explain_errors(settings: SparkSettings, watch: _ExecutorWatch) -> Iterator[None]:
    """Replace an error of Spark by a StageError whose message has one line."""
    try:
        yield
    except (*SPARK_ERRORS, OSError) as error:
        if not isinstance(error, SPARK_ERRORS) and not isinstance(error, ConnectionError):
            raise
        if _is_disk_full_error(error):
            raise
        if watch.has_lost_all_executors:
            raise StageError(
                f"interactions.engine: all executors of {settings.master} are lost, and none came back within "
                f"{settings.timeout_s:g} s; check the workers and their memory (spark.executor.memory), and run again"
            ) from error
        raise StageError(
            f"interactions.engine: Spark fails: {spark_message(error)}; run again, or set kind to duckdb"
        ) from error


def _require_same_version(spark: SparkSession, settings: SparkSettings) -> None:
    """Raise InputError if an executor has another version of Spark than this process."""
    num_tasks = 2 * spark.sparkContext.defaultParallelism
    # The executors evaluate `reflect`. The driver would evaluate version().
    version_sql = "reflect('org.apache.spark.package', 'SPARK_VERSION')"
    try:
        task_rows = spark.range(0, num_tasks, 1, num_tasks)
        version_table = task_rows.selectExpr(f"{version_sql} AS version").distinct().toArrow()
        executor_versions = set(version_table.column("version").to_pylist())
    except SPARK_ERRORS as error:
        if not any(marker in str(error) for marker in _VERSION_MISMATCH_MARKERS):
            raise
        executor_versions = {f"another version ({spark_message(error)})"}
    if executor_versions != {pyspark.__version__}:
        raise InputError(
            f"interactions.engine: pyspark on this host is {pyspark.__version__}, but executors of {settings.master} have "
            f"{', '.join(sorted(executor_versions))}; install the same version of pyspark here, or of Spark there"
        )


def _require_shared_folder(spark: SparkSession, settings: SparkSettings, folder: Path) -> None:
    """Raise InputError unless this host and all executors see the files that executors write into `folder`."""
    probe_folder, num_tasks = folder.absolute() / "probe", 2 * spark.sparkContext.defaultParallelism
    problem = ""
    try:
        spark.range(0, num_tasks, 1, num_tasks).write.parquet(f"file://{probe_folder}")
        num_rows = sum(pq.read_metadata(path).num_rows for path in probe_folder.glob("part-*.parquet"))
        if num_rows != num_tasks:
            problem = f"this host sees {num_rows} of {num_tasks} rows that the executors wrote"
        else:
            spark.read.schema("id BIGINT").parquet(f"file://{probe_folder}").selectExpr("max(id)").toArrow()
    except (*SPARK_ERRORS, OSError) as error:
        if _is_disk_full_error(error):
            raise
        problem = spark_message(error)
    if problem:
        raise InputError(
            f"interactions.engine: the executors of {settings.master} do not share the folder {folder} with this host: "
            f"{problem}; put workspace on storage that is mounted at the same path on all hosts, with the right to write"
        )


def _is_disk_full_error(error: BaseException) -> bool:
    try:
        return is_disk_full(error)
    except (*SPARK_ERRORS, OSError):  # the JVM, which has the text of the error, has ended
        return False


def reject_unreadable_file(error: BaseException) -> None:
    """Raise InputError if `error` is about a file of a table that Spark cannot read."""
    file_match = re.search(r"FAILED_READ_FILE.* reading file (\S+?)\.?\s", str(error))
    if file_match is not None:
        raise InputError(
            f"{printable(file_match[1])}: Spark cannot read it: {spark_message(error)}; check the file, and that the executors "
            "see it"
        ) from error


def spark_message(error: BaseException) -> str:
    """Return the line of a Spark error that names its cause, without the stack trace of the JVM."""
    try:
        text = str(error)
    except (*SPARK_ERRORS, OSError):  # the JVM, which has the text of the error, has ended
        return f"{type(error).__name__}, and its Java process has ended"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    cause = causes[-1] if causes else (lines[1] if len(lines) > 1 and lines[0].startswith("An error occurred") else "")
    message = cause.removeprefix(": ") or (lines[0] if lines else first_line(error))
    return printable(message, max_characters=300)
