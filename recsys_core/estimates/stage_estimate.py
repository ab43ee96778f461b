"""The estimate of one stage, and the constants that it is computed from."""

from collections.abc import Mapping
from typing import Any, Literal

from recsys_core.config import Frozen
from recsys_core.estimates.constants import Constant

Basis = Literal["measured", "extrapolated", "assumed"]


class StageEstimate(Frozen):
    """Time, memory and disk of one stage.

    Attributes:
        where: the machines that execute the stage.
        seconds: duration.
        memory_bytes: peak memory of one process, without its libraries; None if it was never measured.
        disk_bytes: bytes on disk, on all hosts together: what the stage leaves, and for a training its peak.
        constants: names of the constants in `seconds`.
        basis: "assumed" if one of these constants was not measured, "extrapolated" if one was measured at a smaller size.
        factor: largest size of the stage divided by the size at which its constant was measured; at least 1.
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
    def measured(self) -> str:
        """At which size the speed of the stage was measured.

        >>> stage = {"stage": "", "where": "", "seconds": 1, "memory_bytes": 0, "disk_bytes": 0, "constants": ()}
        >>> cases = ("measured", 1), ("extrapolated", 1.26), ("extrapolated", 5e3), ("assumed", 5e3)
        >>> [StageEstimate(**stage, basis=basis, factor=factor).measured for basis, factor in cases]
        ['at this size', 'at 1/1.3', 'at 1/5,000', 'no']
        """
        if self.basis == "extrapolated":
            return f"at 1/{self.factor:,.{0 if self.factor >= 10 else 1}f}"
        return "no" if self.basis == "assumed" else "at this size"


class Rates:
    """The constants, as the factors of one estimate: it records which are used, and at what size.

    >>> rates = Rates({"event_s": Constant(value=2.0, unit="s per event", source="x", date="2026-11-21", measured_at=10)})
    >>> rates("event_s", 30)
    60.0
    >>> estimate = rates.estimate("ingest", where="one host", seconds=60, memory_bytes=0, disk_bytes=0)
    >>> estimate.basis, estimate.factor, estimate.constants
    ('extrapolated', 3.0, ('event_s',))
    """

    def __init__(self, constants: Mapping[str, Constant]) -> None:
        self._constants = constants
        self._used: dict[str, Constant] = {}
        self._factor = 1.0

    def __call__(self, name: str, size: float = 1.0, *, times: float = 1.0) -> float:
        """Return constant x size x times. times: a factor of the result that is no extrapolation."""
        constant = self._used[name] = self._constants[name]
        if constant.measured_at:
            self.extrapolate(size / constant.measured_at)
        return constant.value * size * times

    def extrapolate(self, factor: float) -> None:
        """Record that the estimate is for `factor` times what was measured."""
        self._factor = max(self._factor, factor)

    def estimate(self, stage: str, **quantities: Any) -> StageEstimate:
        """Return the estimate of a stage whose duration was computed with these rates."""
        basis: Basis = "extrapolated" if self._factor > 1 else "measured"
        if any(constant.date is None for constant in self._used.values()):
            basis = "assumed"
        return StageEstimate(stage=stage, constants=tuple(self._used), basis=basis, factor=self._factor, **quantities)
