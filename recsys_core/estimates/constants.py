"""The constants of the estimates, each with its unit, its source and the largest size at which it was measured."""

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from recsys_core.config import Frozen

CONSTANTS_PATH = Path(__file__).with_name("constants.json")
Basis = Literal["measured", "extrapolated", "assumed"]
BASES: tuple[Basis, ...] = ("measured", "extrapolated", "assumed")
"""From the most to the least reliable."""


class Constant(Frozen):
    """One number with its origin.

    Attributes:
        measured_at: largest size at which the number was measured, in the unit after "per" in `unit`. None: the number does not
            depend on the size, or it is assumed.
    """

    value: float
    unit: str
    source: str = Field(description="benchmark file and keys, or why the number is assumed")
    date: str | None = Field(None, description="day of the measurement; None for an assumption")
    measured_at: float | None = None

    def basis(self, size: float | None = None) -> Basis:
        """Return whether the constant was measured at a size of at least `size`.

        >>> speed = Constant(value=1.0, unit="s per event", source="ingest.json", date="2026-11-21", measured_at=100)
        >>> [speed.basis(size) for size in (None, 100, 101)]
        ['measured', 'measured', 'extrapolated']
        >>> Constant(value=2.5, unit="dollars per hour", source="a price list").basis()
        'assumed'
        """
        if self.date is None:
            return "assumed"
        is_larger = size is not None and self.measured_at is not None and size > self.measured_at
        return "extrapolated" if is_larger else "measured"


@cache
def packaged_constants() -> dict[str, Constant]:
    """Return the constants of constants.json, by name. `python -m benchmarks.plan --constants` writes the file."""
    return ConstantsFile.model_validate_json(CONSTANTS_PATH.read_bytes()).constants


class ConstantsFile(Frozen):
    """Content of constants.json."""

    constants: dict[str, Constant]


def worst_basis(*bases: Basis) -> Basis:
    """Return the least reliable basis.

    >>> worst_basis("measured", "assumed", "extrapolated")
    'assumed'
    """
    return max(bases, key=BASES.index, default="measured")
