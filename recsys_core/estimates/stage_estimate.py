"""The estimate of one stage, and the constants that it is computed from."""

from collections.abc import Mapping
from typing import Any, Literal

from recsys_core.config import Frozen
from recsys_core.estimates.constants import Constant

Basis = Literal["measured", "extrapolated", "assumed"]


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
        """Text for the size at which the constants were measured, relative to this stage; "no" if a constant was not measured.

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
        """Return constant x size x times. Only a large `size` is an extrapolation; a large `times` is not."""
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
