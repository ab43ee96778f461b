"""Checks that the Spark engine's libraries and Java are installed, and that the master answers. No library is imported."""

import os
import re
import shutil
import socket
import subprocess
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from recsys_core.errors import InputError, StageError, first_line

LIBRARIES = ("pyspark", "py4j", "sqlglot")
MIN_JAVA_VERSION = 17
_JAVA_TIMEOUT_S, _CONNECT_TIMEOUT_S, _RETRY_PAUSE_S = 30.0, 3.0, 0.5


def check_installation() -> str:
    """Return the versions of Spark and Java. Raise InputError if a library or Java is missing or too old."""
    if missing_libraries := [library for library in LIBRARIES if find_spec(library) is None]:
        raise InputError(
            f"interactions.engine: kind spark needs {', '.join(missing_libraries)}, which is not installed; install nightjar "
            'with the extra spark, e.g. pip install ".[spark]", or set kind to duckdb'
        )
    spark_version = metadata.version("pyspark")
    if int(spark_version.split(".")[0]) != 4:
        raise InputError(
            f"interactions.engine: pyspark {spark_version} is installed, but nightjar needs version 4; install pyspark 4"
        )
    return f"Spark {spark_version}, Java {_java_version()}"


def _java_version() -> str:
    """Return the version of Java. Raise InputError if Java is missing or too old."""
    java_home = os.environ.get("JAVA_HOME")
    java_path = str(Path(java_home, "bin", "java")) if java_home else "java"
    fix = f"install OpenJDK {MIN_JAVA_VERSION}, or set JAVA_HOME to its folder"
    if shutil.which(java_path) is None:
        raise InputError(f"interactions.engine: kind spark needs Java, but there is no program {java_path}; {fix}")
    command = [java_path, "-version"]
    try:
        java_process = subprocess.run(command, capture_output=True, text=True, timeout=_JAVA_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:  # such as a program for another processor, or a disk that hangs
        raise InputError(f"interactions.engine: {java_path} -version fails ({first_line(error)}); {fix}") from error
    version_match = re.search(r'version "([^"]+)"', java_process.stderr)
    if java_process.returncode or version_match is None:
        raise InputError(f"interactions.engine: {java_path} -version fails with status {java_process.returncode}; {fix}")
    major_version_match = re.match(r"(?:1\.)?(\d+)", version_match[1])
    if major_version_match is None or int(major_version_match[1]) < MIN_JAVA_VERSION:
        raise InputError(
            f"interactions.engine: {java_path} is version {version_match[1]}, but Spark needs Java {MIN_JAVA_VERSION}; {fix}"
        )
    return version_match[1]


def require_master(master: str, *, timeout_s: float) -> None:
    """Raise StageError if no master in `master`, for example spark://a:7077,b:7077, accepts a connection within `timeout_s`.

    Only standalone masters are checked.
    """
    if not master.startswith("spark://"):
        return
    deadline_s, problem = time.monotonic() + timeout_s, ""
    while True:
        for address in master.removeprefix("spark://").split(","):
            host, _, port = address.rpartition(":")
            try:
                connect_timeout_s = min(_CONNECT_TIMEOUT_S, timeout_s)
                socket.create_connection((host.strip("[]"), int(port)), timeout=connect_timeout_s).close()
                return
            except (OSError, ValueError) as error:
                problem = f"{address}: {first_line(error)}"
        if time.monotonic() >= deadline_s:
            raise StageError(
                f"interactions.engine: no Spark master answers at {master} within {timeout_s:g} s ({problem}); start it, or "
                "correct interactions.engine.master"
            )
        time.sleep(min(_RETRY_PAUSE_S, timeout_s))
