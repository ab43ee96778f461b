"""What is wrong with rows of the vectors: collected by kind, then refused or dropped."""

import threading
from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from recsys_core.data.embeddings.config import EmbeddingsConfig
from recsys_core.errors import InputError
from recsys_core.parquet.sources import Source


class Flaw(IntEnum):
    """Why a row gives no vector. A row has one: the first that is found, ids before vectors."""

    NULL_ID = 1
    EMPTY_ID = 2
    ID_OUT_OF_RANGE = 3
    DUPLICATE_ID = 4
    NULL_VECTOR = 5
    WRONG_LENGTH = 6
    NULL_ELEMENT = 7
    NOT_FINITE = 8
    ALL_ZERO = 9


class Findings:
    """The flaws of all rows of one entry. A position counts rows over all of its files; several threads may add."""

    def __init__(self, sources: Sequence[Source], *, setting: str) -> None:
        self._sources, self._setting = sources, setting
        self._lock = threading.Lock()
        self._first: dict[Flaw, tuple[int, str, str]] = {}
        self.rows = sum(source.record.rows for source in sources)
        # Pages of zeros cost no memory until one is written to: a bad row is rare.
        self.flaw_R = np.zeros(self.rows, np.uint8)

    def add(self, flaw: Flaw, position_N: NDArray[np.int64], *, column: str, what: Callable[[int], str]) -> None:
        """Marks the rows at `position_N` (ascending) that have no other flaw; `what` says what is wrong at a position."""
        position_N = position_N[np.isin(self.flaw_R[position_N], (0, flaw))]
        if not len(position_N):
            return
        self.flaw_R[position_N] = flaw
        first = int(position_N[0])
        found = (first, column, what(first))
        with self._lock:
            self._first[flaw] = min(found, self._first.get(flaw, found))

    def take(self, other: "Findings") -> None:
        """Adds the flaws of `other` to rows that have none yet."""
        for flaw, first in other._first.items():
            self.flaw_R[(other.flaw_R == flaw) & (self.flaw_R == 0)] = flaw
            self._first[flaw] = min(first, self._first.get(flaw, first))

    def counts(self) -> dict[Flaw, int]:
        """How many rows have each flaw."""
        return {flaw: int(np.count_nonzero(self.flaw_R == flaw)) for flaw in sorted(self._first)}

    def bad_positions(self) -> NDArray[np.int64]:
        """Positions of all flawed rows, ascending."""
        return np.flatnonzero(self.flaw_R) if self._first else np.empty(0, np.int64)

    def place(self, position: int) -> tuple[str, int]:
        """File and 0-based row in it."""
        for source in self._sources:
            if position < source.record.rows:
                return source.name, position
            position -= source.record.rows
        raise AssertionError("the row lies in none of the files")

    def judge(self, config: EmbeddingsConfig) -> dict[str, int]:
        """Dropped rows by flaw; InputError when none may be dropped, too many are bad, or none is left."""
        counts = self.counts()
        if not counts:
            return {}
        flaw = min(counts, key=lambda kind: self._first[kind])
        bad = sum(counts.values())
        if config.on_bad_rows == "fail":
            rows = "1 such row" if counts[flaw] == 1 else f"{counts[flaw]:,} such rows"
            raise InputError(
                f"{self._told(flaw)}; {rows} of {self.rows:,}; mend them, or set {self._setting}.on_bad_rows to drop"
            )
        kinds = {kind.name.lower(): count for kind, count in counts.items()}
        if bad > config.max_bad_share * self.rows or bad == self.rows:
            listed = ", ".join(f"{name} {count:,}" for name, count in kinds.items())
            raise InputError(
                f"{self._told(flaw)}; {bad:,} of {self.rows:,} rows are bad ({listed}), but {self._setting}.max_bad_share is "
                f"{config.max_bad_share:g}; mend them, or raise it"
                + (" (no row is left, so that will not help)" if bad == self.rows else "")
            )
        return kinds

    def _told(self, flaw: Flaw) -> str:
        position, column, what = self._first[flaw]
        file, row = self.place(position)
        return f"{file}: column {column!r}, row {row}: {what}"
