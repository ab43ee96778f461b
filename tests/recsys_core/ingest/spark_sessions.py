"""The Spark session of a test process: small, on this machine, and shared by all tests because its start takes seconds."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Compiled code pays off only for data that are larger than those of a test.
CONF = {
    "spark.sql.codegen.wholeStage": False,
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.adaptive.enabled": False,
    "spark.sql.shuffle.partitions": 2,
    "spark.default.parallelism": 2,
}
SPARK = {"kind": "spark", "master": "local[2]", "conf": CONF}


def reason_to_skip() -> str:
    """Return why this machine cannot execute Spark; an empty text if it can."""
    if find_spec("pyspark") is None or find_spec("sqlglot") is None:
        return "the extra spark is not installed"
    return "" if shutil.which("java") else "there is no Java"


def start(folder: Path) -> "SparkSession":
    """Start the session. An engine uses the active session of its process, and leaves it open."""
    from recsys_core.ingest.log.engine_settings import SparkSettings
    from recsys_core.ingest.log.spark_engine.cluster import start_session

    return start_session(SparkSettings.model_validate(SPARK), local_folder=folder)
