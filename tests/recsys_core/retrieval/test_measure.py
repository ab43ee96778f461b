"""The recall of each query, and the choice of the search settings from measured points.

Shapes: B queries, N rows returned by an index, K exact items per query, I items, D width of a vector.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import faiss
import numpy as np
import pytest

from recsys_core.manifests import SearchPoint
from recsys_core.retrieval.compressed import PqFastScan
from recsys_core.retrieval.index import build_index
from recsys_core.retrieval.ivf import IvfFlat
from recsys_core.retrieval.kinds import Flat
from recsys_core.retrieval.measure import MeasuredQueries, faiss_threads, recall_per_query, tune


@pytest.mark.parametrize("max_gathered_values", [1, 1 << 20])
def test_the_recall_of_each_query_is_its_overlap_with_the_exact_results(
    max_gathered_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recsys_core.retrieval.measure.MAX_GATHERED_VALUES", max_gathered_values)
    random = np.random.default_rng(0)
    item_vector_ID, query_BD = (random.normal(size=(num_vectors, 5)).astype(np.float32) for num_vectors in (90, 30))
    exact_row_BK = np.argsort(-query_BD @ item_vector_ID.T, axis=1)[:, :10]
    row_BN = np.array([random.choice(np.arange(-1, 30), size=12, replace=False) for _ in query_BD])
    recall_B = recall_per_query(row_BN, exact_row_BK=exact_row_BK, query_BD=query_BD, item_vector_ID=item_vector_ID)
    assert recall_B.tolist() == [
        len({*rows} & {*exact_rows}) / 10 for rows, exact_rows in zip(row_BN, exact_row_BK, strict=True)
    ]


@dataclass
class ScriptedQueries:
    """Queries that return a fixed recall and latency for each setting, instead of a measurement.

    Attributes:
        point_by_setting: (recall, milliseconds per query) by (nprobe, rescore).
        measured_settings: the settings of all calls of `measure`, in order.
    """

    point_by_setting: dict[tuple[int, int], tuple[float, float]]
    measured_settings: list[tuple[int, int]] = field(default_factory=list)
    exact_row_BK: np.ndarray = field(default_factory=lambda: np.zeros((1, 10), np.int64))

    def measure(self, index: Any, kind: Any) -> SearchPoint:
        setting = (kind.nprobe, getattr(kind, "rescore", 0))
        self.measured_settings.append(setting)
        recall, ms_per_query = self.point_by_setting[setting]
        return SearchPoint(parameters=kind.model_dump(exclude={"kind"}), recall=recall, ms_per_query=ms_per_query)


def test_the_fastest_setting_of_all_rescore_series_is_chosen() -> None:
    # The settings with one rescore value are a series. A series ends at the target, or when it is slower than the best earlier
    # series.
    point_by_setting = {(1, 2): (0.5, 1.0), (2, 2): (0.7, 2.0), (3, 2): (0.96, 3.0)}
    point_by_setting |= {(1, 4): (0.6, 1.5), (2, 4): (0.95, 2.5)}
    point_by_setting |= {(1, 8): (0.8, 2.6)}
    point_by_setting |= {(1, 16): (0.9, 2.7)}
    queries = ScriptedQueries(point_by_setting)
    chosen_kind, measured_points = tune(PqFastScan(nlist=4, pq_m=2), None, queries, recall_target=0.95)  # type: ignore[arg-type]
    assert (chosen_kind.nprobe, chosen_kind.rescore) == (2, 4)  # type: ignore[union-attr]
    assert queries.measured_settings == [*point_by_setting]
    assert [point.recall for point in measured_points] == [recall for recall, _ in point_by_setting.values()]


def test_a_series_below_the_target_ends_when_its_recall_stops_growing() -> None:
    recalls = [0.0, 0.0, 0.0, 0.4, 0.8, 0.8004, 0.8003]
    nprobes = [1, 2, 3, 4, 6, 8, 12]
    point_by_setting = {(nprobe, 0): (recall, float(nprobe)) for nprobe, recall in zip(nprobes, recalls, strict=True)}
    queries = ScriptedQueries(point_by_setting)
    chosen_kind, measured_points = tune(IvfFlat(nlist=1_000), None, queries, recall_target=0.95)  # type: ignore[arg-type]
    assert chosen_kind == IvfFlat(nlist=1_000, nprobe=8)
    assert [point.recall for point in measured_points] == recalls


def test_an_index_is_measured_by_its_fastest_search_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    item_vector_ID = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    index = build_index(Flat(), item_vector_ID)
    queries = MeasuredQueries.with_exact_results(item_vector_ID[:5], exact_index=index, item_vector_ID=item_vector_ID, depth=3)
    clock_times = iter([0.0, 0.1, 1.0, 1.05, 2.0, 2.4])  # three searches of 0.1, 0.05 and 0.4 s
    num_threads_by_reading = []

    def read_clock() -> float:
        num_threads_by_reading.append(faiss.omp_get_max_threads())
        return next(clock_times)

    monkeypatch.setattr(time, "perf_counter", read_clock)
    with faiss_threads(2):
        point = queries.measure(index, Flat())
        assert faiss.omp_get_max_threads() == 2
    assert point.recall == 1 and point.ms_per_query == pytest.approx(1000 * 0.05 / 5)
    assert num_threads_by_reading == [1] * 6


def test_an_index_with_fixed_search_settings_is_not_measured() -> None:
    queries = ScriptedQueries({})
    kind = IvfFlat(nlist=4, nprobe=2)
    assert tune(kind, None, queries, recall_target=0.95) == (kind, ())  # type: ignore[arg-type]
