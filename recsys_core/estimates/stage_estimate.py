"""The estimate of one stage, and the constants that it is computed from."""

from collections.abc import Mapping

from recsys_core.config import Frozen
from recsys_core.estimates.constants import Basis, Constant, worst_basis


class StageEstimate(Frozen):
    """Time, memory and disk of one stage.

    Attributes:
        where: the machines that execute the stage.
        seconds: duration.
        memory_bytes: peak memory of one process, without its libraries; None if it was never measured.
        disk_bytes: bytes on disk, on all hosts together: what the stage leaves, and for a training its peak.
        constants: names of the constants that decide `seconds`, the most important one first.
        basis: the least reliable basis of these constants.
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
    def basis_text(self) -> str:
        """The basis, with the factor of the extrapolation.

        >>> stage = StageEstimate(
        ...     stage="train", where="", seconds=1, memory_bytes=0, disk_bytes=0, constants=(), basis="extrapolated", factor=5e3
        ... )
        >>> [stage.model_copy(update={"factor": factor}).basis_text for factor in (5e3, 1.26, 1.0)]
        ['extrapolated x 5,000', 'extrapolated x 1.3', 'extrapolated']
        """
        return self.basis if self.factor <= 1 else f"{self.basis} x {self.factor:,.{0 if self.factor >= 10 else 1}f}"


class Rates:
    """The constants, as the factors of one estimate: it records which are used, and at what size.

    >>> rates = Rates({"event_s": Constant(value=2.0, unit="s per event", source="x", date="2026-11-21", measured_at=10)})
    >>> rates("event_s", 30), rates.basis, rates.factor, rates.names
    (60.0, 'extrapolated', 3.0, ('event_s',))
    """

    def __init__(self, constants: Mapping[str, Constant]) -> None:
        self._constants = constants
        self.names: tuple[str, ...] = ()
        self.basis: Basis = "measured"
        self.factor = 1.0

    def __call__(self, name: str, size: float = 1.0, *, times: float = 1.0) -> float:
        """Return constant x size x times. times: a factor of the result at which the constant's basis does not change."""
        if name not in self.names:
            self.names = (*self.names, name)
        self.at(name, size)
        return self._constants[name].value * size * times

    def at(self, name: str, size: float) -> None:
        """Record that the constant is used for a size, without multiplying them."""
        constant = self._constants[name]
        self.basis = worst_basis(self.basis, constant.basis(size))
        if constant.measured_at:
            self.factor = max(self.factor, size / constant.measured_at)

    def extrapolate(self) -> None:
        """Mark the estimate as extrapolated, because it uses a constant for something else than was measured."""
        self.basis = worst_basis(self.basis, "extrapolated")
