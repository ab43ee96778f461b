"""The estimate of one stage, and the constants that it is computed from.

Benchmarks have measured most constants; the remaining constants are assumed.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from recsys_core.config import Frozen

CONSTANTS_PATH = Path(__file__).with_name("constants.json")
Basis = Literal["measured", "extrapolated", "assumed"]


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


def _assumption(value: float, unit: str, reason: str) -> Constant:
    return Constant(value=value, unit=unit, source=reason)


ASSUMPTIONS = {
    "spark_cpu_factor": _assumption(
        10, "CPU time of Spark per CPU time of DuckDB", "a guess: the JVM, the shuffle and its files"
    ),
    "spark_start_s": _assumption(20, "s until the executors have started", "a guess"),
    "spark_core_memory_bytes": _assumption(4e9, "bytes per core of an executor", "a common setting of Spark clusters"),
    "gpu_operation_s": _assumption(
        1e-14, "s per floating-point operation", "100 TFLOP/s, a tenth of the peak of an H100 in bf16"
    ),
    "gpu_ranked_value_s": _assumption(
        2e-13, "s per dimension of the score of a user-item pair", "10 TFLOP/s with the choice of the top items"
    ),
    "checkpoint_write_byte_s": _assumption(0.5e-9, "s per byte that one host writes", "2 GB/s to the storage"),
    "checkpoint_hash_byte_s": _assumption(0.2e-9, "s per byte, on one host", "sha256 at 5 GB/s"),
    "gpu_hour_dollars": _assumption(2.5, "dollars per hour", "the price in docs/scale.md"),
    "core_hour_dollars": _assumption(0.05, "dollars per hour", "a round price of a rented core with 4 to 8 GB"),
}
"""Constants that no benchmark measures."""


@cache
def packaged_constants() -> dict[str, Constant]:
    """Return the constants of constants.json, which `make bench-plan` writes, and the assumptions, by name."""
    return ConstantsFile.model_validate_json(CONSTANTS_PATH.read_bytes()).constants | ASSUMPTIONS


class StageEstimate(Frozen):
    """Time, memory and disk of one stage.

    Attributes:
        where: text that names the machines that execute the stage, e.g. "8 GPUs".
        seconds: duration of the stage.
        memory_bytes: peak memory of one process, without its libraries; None if it was never measured.
        disk_bytes: bytes of the files that the stage leaves on the disks of all hosts; for a training, the peak.
        constants: names of the constants in `seconds`.
        basis: "assumed" if a constant was not measured, otherwise "extrapolated" if a constant was measured at a smaller size.
        factor: largest ratio between the size of this stage and the size at which a constant was measured; at least 1.
    """

    stage: str
    where: str
    seconds: float
    memory_bytes: float | None
    disk_bytes: float
    constants: tuple[str, ...]
    basis: Basis
    factor: float = 1.0

    @property
    def measured_text(self) -> str:
        """Text for the measured size relative to the size of this stage, such as "at 1/1.3"; "no" if a constant is assumed.

        >>> stage = {"stage": "", "where": "", "seconds": 1, "memory_bytes": 0, "disk_bytes": 0, "constants": ()}
        >>> cases = ("measured", 1), ("extrapolated", 1.26), ("extrapolated", 5e3), ("assumed", 5e3)
        >>> [StageEstimate(**stage, basis=basis, factor=factor).measured_text for basis, factor in cases]
        ['at this size', 'at 1/1.3', 'at 1/5,000', 'no']
        """
        if self.basis == "extrapolated":
            return f"at 1/{self.factor:,.{0 if self.factor >= 10 else 1}f}"
        return "no" if self.basis == "assumed" else "at this size"


class Rates:
    """The constants of one estimate. A call multiplies a constant by a size, and records its name and the extrapolation.

    >>> rates = Rates({"event_s": Constant(value=2.0, unit="s per event", source="x", date="2026-11-21", measured_at=10)})
    >>> rates("event_s", 30)
    60.0
    >>> estimate = rates.estimate("ingest", where="one host", seconds=60, memory_bytes=0, disk_bytes=0)
    >>> estimate.basis, estimate.factor, estimate.constants
    ('extrapolated', 3.0, ('event_s',))
    """

    def __init__(self, constants: Mapping[str, Constant]) -> None:
        self._constants = constants
        self._used_constants: dict[str, Constant] = {}
        self._extrapolation_factor = 1.0

    def __call__(self, name: str, size: float = 1.0, *, times: float = 1.0) -> float:
        """Return constant x size x times. A `size` above `measured_at` is recorded as an extrapolation; `times` is not."""
        constant = self._used_constants[name] = self._constants[name]
        if constant.measured_at:
            self.extrapolate(size / constant.measured_at)
        return constant.value * size * times

    def extrapolate(self, factor: float) -> None:
        """Record that the estimate is for `factor` times the measured size."""
        self._extrapolation_factor = max(self._extrapolation_factor, factor)

    def estimate(self, stage: str, **quantities: Any) -> StageEstimate:
        """Return the estimate of a stage whose duration was computed with these rates."""
        basis: Basis = "extrapolated" if self._extrapolation_factor > 1 else "measured"
        if any(constant.date is None for constant in self._used_constants.values()):
            basis = "assumed"
        return StageEstimate(
            stage=stage, constants=tuple(self._used_constants), basis=basis, factor=self._extrapolation_factor, **quantities
        )
