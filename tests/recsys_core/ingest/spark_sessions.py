"""The Spark session that all tests of a process share, because the start of a session takes seconds."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The tests have so few data that Spark computes faster without code generation.
SPARK_CONF = {
    "spark.sql.codegen.wholeStage": False,
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.adaptive.enabled": False,
    "spark.sql.shuffle.partitions": 2,
    "spark.default.parallelism": 2,
}
SPARK_SETTINGS = {"kind": "spark", "master": "local[2]", "conf": SPARK_CONF}


def reason_to_skip() -> str:
    """Return why this machine cannot run Spark; an empty string if it can."""
    if find_spec("pyspark") is None or find_spec("sqlglot") is None:
        return "the extra spark is not installed"
    return "" if shutil.which("java") else "there is no Java"


def start_session(folder: Path) -> "SparkSession":
    """Start the session. Every Spark engine of this process uses it and does not stop it."""
    from recsys_core.ingest.log.engine_settings import SparkSettings
    from recsys_core.ingest.log.spark_engine import cluster

    return cluster.start_session(SparkSettings.model_validate(SPARK_SETTINGS), scratch_folder=folder)
