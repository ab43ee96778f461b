"""Stage `evaluate`: the model beside its baselines, over the full catalogue, from exported vectors.

Shapes: E queries, I items, C cold items, D width, P (query, target) pairs.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.data.events import EvaluationSplit, EventStore
from recsys_core.data.lists import Lists
from recsys_core.errors import InputError, StageError
from recsys_core.evaluation import baselines, metrics
from recsys_core.evaluation.cold import cold_rows, rank_among
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.exact import Ranking, rank_catalogue
from recsys_core.evaluation.metrics import TargetRanks
from recsys_core.manifests import (
    EmbeddingsManifest,
    EvaluationManifest,
    ExportManifest,
    InteractionsManifest,
    fingerprint_of,
    produce,
)

SAMPLE_SEED = 0


@dataclass(frozen=True)
class Questions:
    """The users of one split: their query vectors, what they had before it, and what they took in it."""

    query_ED: Tensor
    history: Lists
    targets: Lists
    new_E: NDArray[np.bool_]


def evaluate(
    config: EvaluationConfig,
    *,
    export: ExportManifest,
    interactions: InteractionsManifest,
    embeddings: EmbeddingsManifest | None,
    folder: Path,
) -> EvaluationManifest:
    """Ranks the catalogue for the users of both splits, and for the test split with the baselines too.

    Metric names are flat: test/recall@20, validation/ndcg@10, baseline/popularity/recall@20, test/slice/cold_items/recall@20,
    test/users. Under <split>/cold/ and baseline/zero_shot/cold/ items without an event before the split are ranked among
    themselves, for the users that took one; there is nothing under it where none did. Raises InputError if no test user has a
    target.
    """
    if export.items != interactions.items:
        raise StageError(
            f"{export.folder} has {export.items} items, {interactions.folder} has {interactions.items}; export again"
        )

    def build(out: Path) -> dict[str, Any]:
        item_ID = torch.from_numpy(np.load(export.path("item_vectors.npy")))
        store = EventStore.open(interactions)
        found: dict[str, float] = {}
        if export.queries.get("validation", 0):
            questions = _questions(store, "validation", config=config, export=export)
            ranking = _rank(questions, questions.query_ED, item_ID, config=config)
            if len(ranking.rank_P):
                found |= _metrics("validation", ranking, config=config)
            cold_C = cold_rows(store, "validation")
            found |= _cold_metrics("validation", questions, questions.query_ED, item_ID, cold_C=cold_C, config=config)

        if not export.queries.get("test", 0):
            raise InputError("no event is in the test split, so nothing can be evaluated; change interactions.split")
        questions = _questions(store, "test", config=config, export=export)
        ranking = _rank(questions, questions.query_ED, item_ID, config=config)
        if not len(ranking.rank_P):
            raise InputError(
                f"all {ranking.seen_targets} test targets were seen before by their users; set evaluation.exclude_seen to false"
            )
        found |= _metrics("test", ranking, config=config) | _slices(
            "test", ranking, store=store, questions=questions, config=config
        )

        cold_C = cold_rows(store, "test")
        found |= _cold_metrics("test", questions, questions.query_ED, item_ID, cold_C=cold_C, config=config)

        order_I = _popularity(store, interactions)
        for name, vectors in _baseline_vectors(order_I, questions, interactions=interactions, embeddings=embeddings).items():
            found |= _metrics(f"baseline/{name}", _rank(questions, *vectors, config=config), config=config)
            if name != "popularity":  # among items without an event, popularity has nothing to go by
                found |= _cold_metrics(f"baseline/{name}", questions, *vectors, cold_C=cold_C, config=config)

        np.save(out / "popularity.npy", order_I)
        (out / "metrics.json").write_text(json.dumps(found, indent=2))
        return {"metrics": found}

    parts = ("evaluation", config, export, interactions, embeddings)
    return produce(folder, EvaluationManifest, fingerprint=fingerprint_of(*parts), build=build)


def _questions(store: EventStore, split: EvaluationSplit, *, config: EvaluationConfig, export: ExportManifest) -> Questions:
    """The exported queries of a split, or a fixed random sample of them."""
    users = np.load(export.path(f"query_users_{split}.npy"))
    vectors = np.load(export.path(f"query_vectors_{split}.npy"), mmap_mode="r")
    chosen = np.arange(len(users))
    if config.max_users is not None and config.max_users < len(users):
        chosen = np.sort(np.random.default_rng(SAMPLE_SEED).choice(len(users), config.max_users, replace=False))
    users = users[chosen]
    return Questions(
        query_ED=torch.from_numpy(vectors[chosen]),
        history=store.before(users, split),
        targets=store.targets(users, split),
        new_E=store.train_end[users] == store.user_offset[users],
    )


def _popularity(store: EventStore, interactions: InteractionsManifest) -> NDArray[np.int32]:
    """Item rows by falling number of events before the test."""
    ids = pq.read_table(interactions.path("items.parquet"), columns=["id"])["id"].combine_chunks()
    return baselines.popularity_order(store.counts_before("test"), item_ids=ids)


def _baseline_vectors(
    order_I: NDArray[np.int32],
    questions: Questions,
    *,
    interactions: InteractionsManifest,
    embeddings: EmbeddingsManifest | None,
) -> dict[str, tuple[Tensor, Tensor]]:
    vectors = {"popularity": baselines.popularity_vectors(order_I, queries=len(questions.query_ED))}
    if embeddings is not None and "item" in embeddings.tables:
        vectors["zero_shot"] = baselines.zero_shot_vectors(
            np.load(embeddings.vectors("item"), mmap_mode="r"),
            vector_row_I=np.load(interactions.path("vector_row.npy")),
            histories=questions.history,
        )
    return vectors


def _cold_metrics(
    prefix: str,
    questions: Questions,
    query_ED: Tensor,
    item_ID: Tensor,
    *,
    cold_C: NDArray[np.int64],
    config: EvaluationConfig,
) -> dict[str, float]:
    """The same for cold items among cold items; empty where nobody took one."""
    nothing = Lists.empty(len(questions.history))  # a cold item is in no history
    ranking = rank_among(
        query_ED, item_ID=item_ID, candidate_rows=cold_C, seen=nothing, targets=questions.targets, k=max(config.ks)
    )
    if not len(ranking.rank_P):
        return {}
    ranks = TargetRanks.of_pairs(user_P=ranking.query_P, rank_P=ranking.rank_P, candidates_E=ranking.candidates_E)
    found: dict[str, float] = {"users": ranks.users, "items": ranking.items}
    for k in config.ks:
        found[f"recall@{k}"] = _mean(metrics.recall(ranks, k=k))
        found[f"ndcg@{k}"] = _mean(metrics.ndcg(ranks, k=k))
        found[f"hit_rate@{k}"] = _mean(metrics.hit_rate(ranks, k=k))
    return {f"{prefix}/cold/{name}": float(value) for name, value in found.items()}


def _rank(questions: Questions, query_ED: Tensor, item_ID: Tensor, *, config: EvaluationConfig) -> Ranking:
    seen = questions.history if config.exclude_seen else Lists.empty(len(questions.history))
    return rank_catalogue(query_ED, item_ID=item_ID, seen=seen, targets=questions.targets, k=max(config.ks))


def _metrics(prefix: str, ranking: Ranking, *, config: EvaluationConfig) -> dict[str, float]:
    ranks = TargetRanks.of_pairs(user_P=ranking.query_P, rank_P=ranking.rank_P, candidates_E=ranking.candidates_E)
    found: dict[str, float] = {"users": ranks.users, "targets": len(ranks.rank_P), "seen_targets": ranking.seen_targets}
    for k in config.ks:
        found[f"recall@{k}"] = _mean(metrics.recall(ranks, k=k))
        found[f"ndcg@{k}"] = _mean(metrics.ndcg(ranks, k=k))
        found[f"precision@{k}"] = _mean(metrics.precision(ranks, k=k))
        found[f"hit_rate@{k}"] = _mean(metrics.hit_rate(ranks, k=k))
        found[f"coverage@{k}"] = metrics.coverage(ranking.top_EK, k=k, items=ranking.items)
    found["mrr"] = _mean(metrics.reciprocal_rank(ranks))
    found[f"map@{max(config.ks)}"] = _mean(metrics.average_precision(ranks, k=max(config.ks)))
    found["auc"] = _mean(metrics.auc(ranks))
    return {f"{prefix}/{name}": float(value) for name, value in found.items() if not math.isnan(value)}


def _slices(
    prefix: str, ranking: Ranking, *, store: EventStore, questions: Questions, config: EvaluationConfig
) -> dict[str, float]:
    """The same ranks, counted for some of the targets only; other targets of a user stay candidates."""
    cold_P, new_P = store.item_count[ranking.target_row_P] == 0, questions.new_E[ranking.query_P]
    found: dict[str, float] = {}
    for name, mask_P in {"cold_items": cold_P, "warm_items": ~cold_P, "new_users": new_P, "known_users": ~new_P}.items():
        found[f"{prefix}/slice/{name}/targets"] = float(mask_P.sum())
        if not mask_P.any():
            continue
        ranks = TargetRanks.of_pairs(
            user_P=ranking.query_P[mask_P], rank_P=ranking.rank_P[mask_P], candidates_E=ranking.candidates_E
        )
        for k in config.ks:
            found[f"{prefix}/slice/{name}/recall@{k}"] = _mean(metrics.recall(ranks, k=k))
            found[f"{prefix}/slice/{name}/ndcg@{k}"] = _mean(metrics.ndcg(ranks, k=k))
    return found


def _mean(value_U: NDArray[np.float64]) -> float:
    """Over the users for whom the metric is defined."""
    defined_U = value_U[~np.isnan(value_U)]
    return float(defined_U.mean()) if len(defined_U) else math.nan
