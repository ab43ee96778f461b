"""The constants of the estimates. Benchmarks have measured most constants; the remaining constants are assumed."""

from functools import cache
from pathlib import Path

from pydantic import Field

from recsys_core.config import Frozen

CONSTANTS_PATH = Path(__file__).with_name("constants.json")


class Constant(Frozen):
    """One number with its origin.

    Attributes:
        measured_at: size of the largest input with which the number was measured, for example the number of events if `unit`
            is "s per event". None if the number does not depend on the size, or is assumed.
    """

    value: float
    unit: str
    source: str = Field(description="benchmark file and keys, or why the number is assumed")
    date: str | None = Field(None, description="day of the measurement; None for an assumption")
    measured_at: float | None = None


class ConstantsFile(Frozen):
    """Content of constants.json."""

    constants: dict[str, Constant]


def _assumed(value: float, unit: str, reason: str) -> Constant:
    return Constant(value=value, unit=unit, source=reason)


ASSUMPTIONS = {
    "spark_cpu_factor": _assumed(10, "CPU time of Spark per CPU time of DuckDB", "a guess: the JVM, the shuffle and its files"),
    "spark_start_s": _assumed(20, "s until the executors have started", "a guess"),
    "spark_core_memory_bytes": _assumed(4e9, "bytes per core of an executor", "a common setting of Spark clusters"),
    "gpu_operation_s": _assumed(1e-14, "s per floating-point operation", "100 TFLOP/s, a tenth of the peak of an H100 in bf16"),
    "gpu_ranked_value_s": _assumed(
        2e-13, "s per dimension of the score of a user-item pair", "10 TFLOP/s with the choice of the top items"
    ),
    "checkpoint_write_byte_s": _assumed(0.5e-9, "s per byte that one host writes", "2 GB/s to the storage"),
    "checkpoint_hash_byte_s": _assumed(0.2e-9, "s per byte, on one host", "sha256 at 5 GB/s"),
    "gpu_hour_dollars": _assumed(2.5, "dollars per hour", "the price in docs/scale.md"),
    "core_hour_dollars": _assumed(0.05, "dollars per hour", "a round price of a rented core with 4 to 8 GB"),
}
"""Constants that no benchmark measures."""


@cache
def packaged_constants() -> dict[str, Constant]:
    """Return the constants of constants.json, which `make bench-plan` writes, and the assumptions, by name."""
    return ConstantsFile.model_validate_json(CONSTANTS_PATH.read_bytes()).constants | ASSUMPTIONS
