"""Choice of the index kind for a catalogue: the candidates by catalogue size and memory, and the decision between them."""

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
"""Up to this number of items, an exact search takes less than a millisecond, and k-means does not pay off."""
MAX_HNSW_ITEMS = 5_000_000
"""With more items, the graph takes hours to build."""

MAX_BYTES = 1 << 50
"""Largest valid value of `Auto.max_bytes`: 1 PiB."""


class Auto(Settings):
    """Settings of `auto`, which chooses the fastest of the index kinds that reach index.recall_target."""

    kind: Literal["auto"] = Field(
        "auto",
        description="the fastest kind that reaches `index.recall_target` within `max_bytes`. The kinds that suit the number of "
        "items are built and measured on validation queries (docs/serving.md lists them)",
    )
    max_bytes: int | None = Field(
        None, ge=1, le=MAX_BYTES, description="largest size of the index in memory, in bytes. Default: no limit"
    )

    def candidates(self, *, num_items: int, dim: int) -> tuple[AnyIndexKind, ...]:
        """Return the kinds that may fit into max_bytes.

        opq_pq, the most compressed kind, is a candidate only if max_bytes is set.

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
        opq_kinds = [OpqPq(pq_m=pq_m) for pq_m in range(dim // 2 or 1, 0, -1) if dim % pq_m == 0]
        kinds += [kind for kind in opq_kinds if kind.min_bytes(num_items=num_items, dim=dim) <= self.max_bytes][:1]
        fitting_kinds = tuple(kind for kind in kinds if kind.min_bytes(num_items=num_items, dim=dim) <= self.max_bytes)
        if not fitting_kinds:
            smallest_bytes = opq_kinds[-1].min_bytes(num_items=num_items, dim=dim)
            raise InputError(
                f"index.served.max_bytes is {self.max_bytes:,}, but the smallest index of {num_items:,} items of width {dim} "
                f"takes {smallest_bytes:,} bytes; raise max_bytes, or remove it"
            )
        return fitting_kinds

    def too_large_kinds(self, *, num_items: int, dim: int) -> tuple[str, ...]:
        """Return the kinds that suit the number of items, but do not fit into max_bytes.

        >>> Auto(max_bytes=200_000_000).too_large_kinds(num_items=1_000_000, dim=64)
        ('flat', 'hnsw', 'ivf_flat')
        """
        candidate_kinds = {kind.kind for kind in self.candidates(num_items=num_items, dim=dim)}
        return tuple(kind.kind for kind in _kinds_for(num_items) if kind.kind not in candidate_kinds)


def _kinds_for(num_items: int) -> tuple[AnyIndexKind, ...]:
    """Return the kinds that suit the number of items if memory is not limited."""
    kinds: tuple[AnyIndexKind, ...] = (Flat(), Hnsw()) if num_items <= MAX_HNSW_ITEMS else (Flat(),)
    return kinds if num_items <= MAX_SMALL_ITEMS else (*kinds, IvfFlat(), IvfSq8(), PqFastScan())


@dataclass(frozen=True)
class Candidate:
    """A built index, with its recall and latency on the tuning queries and the size of its files."""

    kind: str
    recall: float
    ms_per_query: float
    num_bytes: int


class Choice(NamedTuple):
    """The chosen kind, the reason as a sentence, and whether the kind reaches the target."""

    kind: str
    reason: str
    reaches_target: bool


def choose_kind(
    candidates: Sequence[Candidate], *, recall_target: float, max_bytes: int | None, too_large_kinds: Sequence[str] = ()
) -> Choice:
    """Return the kind of the fastest candidate that reaches the target within max_bytes.

    If no candidate reaches the target, return the kind of the candidate with the highest recall.

    Args:
        too_large_kinds: kinds that were not built because of max_bytes. The reason names them.

    >>> flat, hnsw = Candidate("flat", 1.0, 0.9, 3 * MIB), Candidate("hnsw", 0.97, 0.1, 5 * MIB)
    >>> choose_kind((flat, hnsw), recall_target=0.95, max_bytes=None).reason
    'hnsw has the least latency (0.100 ms per query) of the 2 kinds that reach a recall of 0.95 on validation queries'
    >>> print(choose_kind((flat, hnsw), recall_target=0.95, max_bytes=4 * MIB).reason)
    flat is the only kind that reaches a recall of 0.95 on validation queries within max_bytes (4.0 MiB; too large: hnsw)

    Raises:
        InputError: every candidate takes more than max_bytes.
    """
    fitting_candidates = [candidate for candidate in candidates if max_bytes is None or candidate.num_bytes <= max_bytes]
    all_too_large_kinds = sorted(
        {*too_large_kinds, *(candidate.kind for candidate in candidates if candidate not in fitting_candidates)}
    )
    too_large_text = f"; too large: {', '.join(all_too_large_kinds)}" if all_too_large_kinds else ""
    limit_text = "" if max_bytes is None else f" within max_bytes ({max_bytes / MIB:,.1f} MiB{too_large_text})"
    if not fitting_candidates:
        smallest_candidate = min(candidates, key=lambda candidate: candidate.num_bytes)
        raise InputError(
            f"index.served.max_bytes is {max_bytes:,}, but the smallest index that was built, {smallest_candidate.kind}, takes "
            f"{smallest_candidate.num_bytes:,} bytes; raise max_bytes, or remove it"
        )
    reaching_candidates = [candidate for candidate in fitting_candidates if candidate.recall >= recall_target]
    if reaching_candidates:
        chosen_candidate = min(reaching_candidates, key=lambda candidate: candidate.ms_per_query)
        target_text = f"a recall of {recall_target:g} on validation queries{limit_text}"
        reason = (
            f"{chosen_candidate.kind} is the only kind that reaches {target_text}"
            if len(reaching_candidates) == 1
            else f"{chosen_candidate.kind} has the least latency ({chosen_candidate.ms_per_query:.3f} ms per query) of the "
            f"{len(reaching_candidates)} kinds that reach {target_text}"
        )
        return Choice(chosen_candidate.kind, reason, reaches_target=True)
    chosen_candidate = max(fitting_candidates, key=lambda candidate: candidate.recall)
    reason = (
        f"no kind reaches a recall of {recall_target:g}{limit_text}; {chosen_candidate.kind} has the highest, "
        f"{chosen_candidate.recall:.4f}"
    )
    return Choice(chosen_candidate.kind, reason, reaches_target=False)
