"""The index kinds that `auto` tries, and its choice among them."""

import pytest

from recsys_core.errors import InputError
from recsys_core.retrieval.auto import Auto, Candidate, choose_kind
from recsys_core.retrieval.compressed import OpqPq, PqFastScan

FLAT, HNSW = Candidate("flat", 1.0, 3.0, 300), Candidate("hnsw", 0.97, 0.1, 500)
OPQ_PQ = Candidate("opq_pq", 0.8, 0.05, 40)
"""Candidates with recall, latency in milliseconds and size in bytes."""


@pytest.mark.parametrize(
    ("num_items", "expected_kinds"),
    [
        (2, ["flat", "hnsw"]),
        (50_000, ["flat", "hnsw"]),
        (50_001, ["flat", "hnsw", "ivf_flat", "ivf_sq8", "pq_fastscan"]),
        (5_000_001, ["flat", "ivf_flat", "ivf_sq8", "pq_fastscan"]),
    ],
)
def test_the_candidates_depend_on_the_number_of_items(num_items: int, expected_kinds: list[str]) -> None:
    assert [kind.kind for kind in Auto().candidates(num_items=num_items, dim=64)] == expected_kinds


@pytest.mark.parametrize("dim", [1, 7, 48, 50, 64, 96, 768])
def test_every_candidate_can_index_vectors_of_any_width(dim: int) -> None:
    candidates = Auto(max_bytes=10**12).candidates(num_items=100_000, dim=dim)
    assert "pq_fastscan" in {kind.kind for kind in candidates}
    assert [kind.problem(dim) for kind in candidates] == [None] * len(candidates)


def test_with_less_memory_only_more_compressed_kinds_remain() -> None:
    def candidate_by_kind(bytes_per_item: int) -> dict[str, object]:
        kinds = Auto(max_bytes=1_000_000 * bytes_per_item).candidates(num_items=1_000_000, dim=64)
        assert all(kind.min_bytes(num_items=1_000_000, dim=64) <= 1_000_000 * bytes_per_item for kind in kinds)
        return {kind.kind: kind for kind in kinds}

    assert {*candidate_by_kind(600)} == {"flat", "hnsw", "ivf_flat", "ivf_sq8", "pq_fastscan", "opq_pq"}
    assert {*candidate_by_kind(200)} == {"ivf_sq8", "pq_fastscan", "opq_pq"}
    assert candidate_by_kind(200)["pq_fastscan"] == PqFastScan()
    assert candidate_by_kind(60) == {"opq_pq": OpqPq(pq_m=32)}
    assert candidate_by_kind(40) == {"opq_pq": OpqPq(pq_m=16)}
    assert candidate_by_kind(17) == {"opq_pq": OpqPq(pq_m=1)}
    with pytest.raises(InputError, match=r"max_bytes is 16,000,000, but the smallest index of 1,000,000 items of width 64"):
        candidate_by_kind(16)


@pytest.mark.parametrize(
    ("recall_target", "max_bytes", "expected_kind", "reaches_target"),
    [
        (0.95, None, "hnsw", True),
        (0.99, None, "flat", True),
        (0.5, None, "opq_pq", True),
        (0.95, 400, "flat", True),
        (0.95, 100, "opq_pq", False),
    ],
)
def test_the_fastest_kind_that_reaches_the_target_within_the_memory_is_chosen(
    recall_target: float, max_bytes: int | None, expected_kind: str, reaches_target: bool
) -> None:
    choice = choose_kind((FLAT, HNSW, OPQ_PQ), recall_target=recall_target, max_bytes=max_bytes)
    assert (choice.kind, choice.reaches_target) == (expected_kind, reaches_target)
    assert choice.reason.startswith(
        (f"{expected_kind} has the least latency", f"{expected_kind} is the only kind")
        if reaches_target
        else "no kind reaches a recall of 0.95 within"
    )


def test_built_indexes_that_all_exceed_max_bytes_are_rejected() -> None:
    with pytest.raises(InputError, match="max_bytes is 39, but the smallest index that was built, opq_pq, takes 40 bytes"):
        choose_kind((FLAT, HNSW, OPQ_PQ), recall_target=0.9, max_bytes=39)
