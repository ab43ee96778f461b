"""The log ingest on Apache Spark. The modules in `__all__` are imported on first use."""

from typing import TYPE_CHECKING

from recsys_core.imports import lazy_modules

if TYPE_CHECKING:
    from recsys_core.ingest.log.spark_engine import engine, installation, tables

__all__ = ["engine", "installation", "tables"]
__getattr__ = lazy_modules(__name__, __all__)
