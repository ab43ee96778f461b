"""Settings of the log engines: one class for each kind, which imports its engine on first use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from recsys_core.config import Settings
from recsys_core.errors import redacted
from recsys_core.ingest.log import spark_engine

if TYPE_CHECKING:  # at runtime, these imports would be circular, because an engine imports the config of the log
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from recsys_core.ingest.log.engine import LogEngine
    from recsys_core.parquet.sources import Source

TableFormat = Literal["delta", "iceberg", "orc"]
"""Formats of the log that only Spark reads."""
TABLE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+){0,4}")
_VERSIONED_NAME_PATTERN = re.compile(r"(?P<name>.+)@v(?P<version>[0-9]{1,19})")
_MAX_SPARK_NUMBER = 10**15
SparkValue = (
    Annotated[str, Field(max_length=4_096)]
    | Annotated[int, Field(ge=-_MAX_SPARK_NUMBER, le=_MAX_SPARK_NUMBER)]
    | Annotated[float, Field(ge=-_MAX_SPARK_NUMBER, le=_MAX_SPARK_NUMBER)]
    | bool
)
SparkKey = Annotated[str, Field(max_length=256, pattern=r"^spark\.[A-Za-z0-9._-]+$")]
_SECRET_KEY_PATTERN = re.compile(r"secret|password|passphrase|token|(access|account|private)\.key(\.|$)|\.sas\.", re.IGNORECASE)
"""Spark properties that hold a secret, such as the account key or the shared access signature (SAS) of Azure storage."""
_SETTING_BY_SPARK_KEY = {"spark.master": "interactions.engine.master"}


def split_version(path: str) -> tuple[str, str | None]:
    """Split an entry of `paths` into the path or name of a table, and its version. Without `@v`, the version is None.

    >>> split_version("lake.shop.events@v12"), split_version("/lake/events")
    (('lake.shop.events', '12'), ('/lake/events', None))
    """
    match = _VERSIONED_NAME_PATTERN.fullmatch(path)
    return (match["name"], match["version"]) if match else (path, None)


def is_table_name(path: str) -> bool:
    """Return whether `path` is the name of a table in a catalog. The path of a folder contains a slash."""
    return "/" not in path


class DuckdbSettings(Settings):
    """DuckDB inside the process of the stage: `interactions.memory_limit` and `threads` are its limits."""

    kind: Literal["duckdb"] = Field(
        "duckdb", description="DuckDB on this machine. It writes data beyond its memory limit to disk"
    )

    def engine_class(self) -> type[LogEngine]:
        """Return DuckdbEngine."""
        from recsys_core.ingest.log.duckdb_engine.engine import DuckdbEngine

        return DuckdbEngine

    def installation_text(self) -> str | None:
        """Return None: DuckDB is always installed."""

    def check_master(self, *, timeout_s: float) -> None:
        """Do nothing: DuckDB has no server."""


class SparkSettings(Settings):
    """Apache Spark, on this machine or on a cluster whose executors see the workspace and the log at the same paths."""

    kind: Literal["spark"] = Field("spark", description="Apache Spark 4, with the extra `spark` and Java 17 or newer")
    master: str = Field(
        "local[*]",
        max_length=1_024,
        pattern=r"^(local(\[[0-9*]{1,4}(, ?[0-9]{1,4})?\])?|spark://[^\s,]+(,[^\s,]+)*|yarn|k8s://\S+)$",
        description="Cluster: `local[*]` for all cores of this machine, `spark://host:7077`, `yarn` or `k8s://https://host:443`",
    )
    conf: dict[SparkKey, SparkValue] = Field(
        default_factory=dict,
        max_length=500,
        description="Spark properties, such as `spark.executor.memory`. The config of a run is stored, so write passwords and "
        "keys into `spark-defaults.conf`, in the folder that the environment variable SPARK_CONF_DIR names",
    )
    timeout_s: float = Field(
        120.0,
        gt=0,
        le=86_400,
        description="Longest time in seconds for which the run waits for the master, or for a first executor, before it fails",
    )

    @field_validator("conf")
    @classmethod
    def _check_properties(cls, conf: dict[str, Any]) -> dict[str, Any]:
        for key, value in conf.items():
            if key in _SETTING_BY_SPARK_KEY:
                raise ValueError(f"set {_SETTING_BY_SPARK_KEY[key]} instead of {key}")
            if _SECRET_KEY_PATTERN.search(key) or redacted(str(value)) != str(value):
                raise ValueError(
                    f"{key} looks like a secret, and the config of a run is stored; set it in spark-defaults.conf in "
                    "the folder of the variable SPARK_CONF_DIR"
                )
        return conf

    @property
    def is_local(self) -> bool:
        """Whether the executors are threads of this machine."""
        return self.master.startswith("local")

    def engine_class(self) -> type[LogEngine]:
        """Return SparkEngine. Raise InputError if Spark or Java is not installed."""
        self.installation_text()
        return spark_engine.engine.SparkEngine

    def installation_text(self) -> str | None:
        """Return the versions of Spark and Java, and the master. Raise InputError if Spark or Java is not installed."""
        return f"{spark_engine.installation.check_installation()}, master {self.master}"

    def open_tables(
        self,
        table_format: TableFormat,
        paths_by_setting: Mapping[str, Sequence[str]],
        *,
        columns: Sequence[str],
        allowed_data_root: Path | None,
    ) -> list[tuple[Source, ...]]:
        """Open the tables of each config key in `paths_by_setting`; see `open_tables` of the Spark engine."""
        self.installation_text()
        return spark_engine.tables.open_tables(
            self, table_format, paths_by_setting, columns=columns, allowed_data_root=allowed_data_root
        )

    def check_master(self, *, timeout_s: float) -> None:
        """Raise StageError if the master of a standalone cluster does not answer within `timeout_s`."""
        spark_engine.installation.require_master(self.master, timeout_s=timeout_s)


EngineSettings = Annotated[DuckdbSettings | SparkSettings, Field(discriminator="kind")]
