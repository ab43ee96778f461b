"""The choice of an index kind for a catalogue: the candidates by catalogue size and memory, and the decision between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import Field

from recsys_core.config import Settings
from recsys_core.errors import InputError
from recsys_core.retrieval.compressed import IvfSq8, OpqPq, PqFastScan
from recsys_core.retrieval.ivf import IvfFlat
from recsys_core.retrieval.kinds import AnyIndexKind, Flat, Hnsw
from recsys_core.units import MIB

MAX_SMALL_ITEMS = 50_000
"""Up to this number of items, an exact search takes less than a millisecond, and k-means has too few items to pay off."""
MAX_HNSW_ITEMS = 5_000_000
"""With more items, the graph takes hours to build."""

MAX_BYTES = 1 << 50
"""Largest value of max_bytes, a PiB."""


class Auto(Settings):
    """The kind with the least latency of those that reach index.recall_target."""

    kind: Literal["auto"] = Field(
        "auto",
        description="the fastest kind that reaches `index.recall_target` within `max_bytes`. The kinds that suit the number of "
        "items are built and measured on validation queries (docs/serving.md lists them)",
    )
    max_bytes: int | None = Field(
        None, ge=1, le=MAX_BYTES, description="largest size of the index in memory, in bytes. Default: no limit"
    )

    def candidates(self, *, num_items: int, dim: int) -> tuple[AnyIndexKind, ...]:
        """Return the kinds that may fit into max_bytes. opq_pq is the most compressed kind: it needs a limit to be chosen.

        >>> [kind.kind for kind in Auto().candidates(num_items=2_000, dim=64)]
        ['flat', 'hnsw']
        >>> [kind.kind for kind in Auto(max_bytes=200_000_000).candidates(num_items=1_000_000, dim=64)]
        ['ivf_sq8', 'pq_fastscan', 'opq_pq']

        Raises:
            InputError: no kind fits.
        """
        kinds = [*_kinds_for(num_items)]
        if self.max_bytes is None:
            return tuple(kinds)
        compressed = [OpqPq(pq_m=size) for size in range(dim // 2 or 1, 0, -1) if dim % size == 0]
        kinds += [kind for kind in compressed if kind.min_bytes(num_items=num_items, dim=dim) <= self.max_bytes][:1]
        fitting = tuple(kind for kind in kinds if kind.min_bytes(num_items=num_items, dim=dim) <= self.max_bytes)
        if not fitting:
            smallest_bytes = compressed[-1].min_bytes(num_items=num_items, dim=dim)
            raise InputError(
                f"index.served.max_bytes is {self.max_bytes:,}, but the smallest index of {num_items:,} items of width {dim} "
                f"takes {smallest_bytes:,} bytes; raise max_bytes, or remove it"
            )
        return fitting

    def left_out(self, *, num_items: int, dim: int) -> tuple[str, ...]:
        """Return the kinds that would be candidates without max_bytes.

        >>> Auto(max_bytes=200_000_000).left_out(num_items=1_000_000, dim=64)
        ('flat', 'hnsw', 'ivf_flat')
        """
        candidates = {kind.kind for kind in self.candidates(num_items=num_items, dim=dim)}
        return tuple(kind.kind for kind in _kinds_for(num_items) if kind.kind not in candidates)


def _kinds_for(num_items: int) -> tuple[AnyIndexKind, ...]:
    """Return the kinds that suit the size of the catalogue, without a limit of the memory."""
    small: tuple[AnyIndexKind, ...] = (Flat(), Hnsw()) if num_items <= MAX_HNSW_ITEMS else (Flat(),)
    return small if num_items <= MAX_SMALL_ITEMS else (*small, IvfFlat(), IvfSq8(), PqFastScan())


@dataclass(frozen=True)
class Candidate:
    """An index that was built, with recall and latency on the tuning queries.

    Attributes:
        bytes: size of its file.
    """

    kind: str
    recall: float
    ms_per_query: float
    bytes: int


class Choice(NamedTuple):
    """The chosen kind, the reason as a sentence, and whether the kind reaches the target."""

    kind: str
    reason: str
    reaches_target: bool


def choose(
    candidates: Sequence[Candidate], *, recall_target: float, max_bytes: int | None, left_out: Sequence[str] = ()
) -> Choice:
    """Return the kind with the least latency of those that reach the target within max_bytes.

    If no candidate reaches the target, return the one with the highest recall.

    Args:
        left_out: kinds that were not built because of max_bytes. The reason names them.

    >>> flat, hnsw = Candidate("flat", 1.0, 0.9, 3 * MIB), Candidate("hnsw", 0.97, 0.1, 5 * MIB)
    >>> choose((flat, hnsw), recall_target=0.95, max_bytes=None).reason
    'hnsw has the least latency (0.100 ms per query) of the 2 kinds that reach a recall of 0.95 on validation queries'
    >>> print(choose((flat, hnsw), recall_target=0.95, max_bytes=4 * MIB).reason)
    flat is the only kind that reaches a recall of 0.95 on validation queries within max_bytes (4.0 MiB; too large: hnsw)

    Raises:
        InputError: every candidate takes more than max_bytes.
    """
    fitting = [candidate for candidate in candidates if max_bytes is None or candidate.bytes <= max_bytes]
    too_large = sorted({*left_out, *(candidate.kind for candidate in candidates if candidate not in fitting)})
    too_large_text = f"; too large: {', '.join(too_large)}" if too_large else ""
    memory = "" if max_bytes is None else f" within max_bytes ({max_bytes / MIB:,.1f} MiB{too_large_text})"
    if not fitting:
        smallest = min(candidates, key=lambda candidate: candidate.bytes)
        raise InputError(
            f"index.served.max_bytes is {max_bytes:,}, but the smallest index that was built, {smallest.kind}, takes "
            f"{smallest.bytes:,} bytes; raise max_bytes, or remove it"
        )
    reaching = [candidate for candidate in fitting if candidate.recall >= recall_target]
    if reaching:
        chosen = min(reaching, key=lambda candidate: candidate.ms_per_query)
        target = f"a recall of {recall_target:g} on validation queries{memory}"
        reason = (
            f"{chosen.kind} is the only kind that reaches {target}"
            if len(reaching) == 1
            else f"{chosen.kind} has the least latency ({chosen.ms_per_query:.3f} ms per query) of the {len(reaching)} kinds "
            f"that reach {target}"
        )
        return Choice(chosen.kind, reason, reaches_target=True)
    chosen = max(fitting, key=lambda candidate: candidate.recall)
    reason = f"no kind reaches a recall of {recall_target:g}{memory}; {chosen.kind} has the highest, {chosen.recall:.4f}"
    return Choice(chosen.kind, reason, reaches_target=False)
