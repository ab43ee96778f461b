"""Stage `evaluate`: the model beside its baselines, over the full catalogue, from exported vectors.

Shapes: E queries, I items, C cold items, D width, P (query, target) pairs.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys_core.data.events import EvaluationSplit, EventStore
from recsys_core.data.jagged import JaggedArray
from recsys_core.errors import InputError, StageError
from recsys_core.evaluation import baselines, metrics
from recsys_core.evaluation.cold import cold_rows, rank_among
from recsys_core.evaluation.config import EvaluationConfig
from recsys_core.evaluation.metrics import TargetRanks
from recsys_core.evaluation.ranking import Ranking, rank_by_order, rank_served
from recsys_core.manifests import (
    Dataset,
    EvaluationManifest,
    ExportManifest,
    InteractionsManifest,
    fingerprint_of,
    produce,
)
from recsys_core.models.spec import ModelSpec

SAMPLE_SEED = 0


@dataclass(frozen=True)
class Questions:
    """The users of one split: their query vectors, what they had before it, and what they took in it.

    known_E: users whom the query vector serves; popular_I: items by falling popularity before the split, for the others.
    """

    query_ED: Tensor
    history: JaggedArray
    targets: JaggedArray
    new_E: NDArray[np.bool_]
    known_E: NDArray[np.bool_]
    popular_I: NDArray[np.int32]


@dataclass
class _Progress:
    """Queries ranked so far, of `total` in the whole stage."""

    total: int
    report: Callable[[int, int], None]
    done: int = 0

    def add(self, queries: int) -> None:
        self.done += queries
        self.report(self.done, self.total)


def evaluate(
    config: EvaluationConfig,
    *,
    export: ExportManifest,
    dataset: Dataset,
    folder: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> EvaluationManifest:
    """Rank the catalogue for the users of both splits as it is served to them, and for the test split with the baselines too.

    on_progress: called with the queries ranked so far, and how many there are in all.

    Metric names are flat: test/recall@20, validation/ndcg@10, baseline/popularity/recall@20, test/slice/cold_items/recall@20,
    test/users. Under <split>/cold/ and baseline/zero_shot/cold/ items without an event before the split are ranked among
    themselves, for the users that took one, at the cut-offs below the number of such items; there is nothing under it where
    no user did. Raises InputError if no test user has a target.
    """
    interactions, embeddings = dataset.interactions, dataset.item_vectors
    if export.items != interactions.items:
        raise StageError(
            f"{export.folder} has {export.items} items, {interactions.folder} has {interactions.items}; export again"
        )

    def build(out: Path) -> dict[str, Any]:
        item_ID = torch.from_numpy(np.load(export.path("item_vectors.npy")))
        store = EventStore.open(interactions)
        found: dict[str, float] = {}
        contenders = {"validation": 1, "test": 1 if embeddings is None else 2}
        ranked = {split: min(n, config.max_users or n) * contenders[split] for split, n in export.queries.items()}
        progress = _Progress(sum(ranked.values()), on_progress)
        if export.queries.get("validation", 0):
            questions = _questions("validation", config=config, store=store, export=export, interactions=interactions)
            ranking = _rank(questions, questions.query_ED, item_ID, config=config, progress=progress)
            if len(ranking.rank_P):
                found |= all_metrics("validation", ranking, config=config)
            cold_C = cold_rows(store, "validation")
            found |= _cold_metrics("validation", questions, questions.query_ED, item_ID, cold_C=cold_C, config=config)

        if not export.queries.get("test", 0):
            raise InputError("no event is in the test split, so nothing can be evaluated; change interactions.split")
        questions = _questions("test", config=config, store=store, export=export, interactions=interactions)
        ranking = _rank(questions, questions.query_ED, item_ID, config=config, progress=progress)
        if not len(ranking.rank_P):
            raise InputError(
                f"all {ranking.seen_targets} test targets were seen before by their users; set evaluation.exclude_seen to false"
            )
        found |= all_metrics("test", ranking, config=config) | _slices(
            "test", ranking, store=store, questions=questions, config=config
        )

        cold_C = cold_rows(store, "test")
        found |= _cold_metrics("test", questions, questions.query_ED, item_ID, cold_C=cold_C, config=config)

        # Among items without an event, popularity has nothing to go by: it has no cold metrics.
        found |= all_metrics("baseline/popularity", _rank_popularity(questions, config=config), config=config)
        if embeddings is not None:
            neighbours = replace(questions, known_E=np.ones_like(questions.known_E))
            vectors = baselines.zero_shot_vectors(
                np.load(embeddings.vectors("item"), mmap_mode="r"),
                vector_row_I=np.load(interactions.path("vector_row.npy")),
                histories=questions.history,
            )
            ranking = _rank(neighbours, *vectors, config=config, progress=progress)
            found |= all_metrics("baseline/zero_shot", ranking, config=config)
            found |= _cold_metrics("baseline/zero_shot", neighbours, *vectors, cold_C=cold_C, config=config)

        np.save(out / "popularity.npy", questions.popular_I)
        (out / "metrics.json").write_text(json.dumps(found, indent=2))
        return {"metrics": found}

    parts = ("evaluation", config, export, interactions, dataset.embeddings)
    return produce(folder, EvaluationManifest, fingerprint=fingerprint_of(*parts), build=build)


def _questions(
    split: EvaluationSplit,
    *,
    config: EvaluationConfig,
    store: EventStore,
    export: ExportManifest,
    interactions: InteractionsManifest,
) -> Questions:
    """The exported queries of a split, or a fixed random sample of them."""
    users = np.load(export.path(f"query_users_{split}.npy"))
    vectors = np.load(export.path(f"query_vectors_{split}.npy"), mmap_mode="r")
    chosen = np.arange(len(users))
    if config.max_users is not None and config.max_users < len(users):
        chosen = np.sort(np.random.default_rng(SAMPLE_SEED).choice(len(users), config.max_users, replace=False))
    users = users[chosen]
    history = store.before(users, split)
    spec = ModelSpec.model_validate_json(export.path("model.json").read_bytes())
    return Questions(
        query_ED=torch.from_numpy(vectors[chosen]),
        history=history,
        targets=store.targets(users, split),
        new_E=store.train_end[users] == store.user_offset[users],
        known_E=spec.knows(history_length_B=history.lengths, user_row_B=users),
        popular_I=baselines.popularity_before(split, store=store, interactions=interactions),
    )


def _cold_metrics(
    prefix: str,
    questions: Questions,
    query_ED: Tensor,
    item_ID: Tensor,
    *,
    cold_C: NDArray[np.int64],
    config: EvaluationConfig,
) -> dict[str, float]:
    """The same for cold items among cold items; empty where no user took one."""
    ranking = rank_among(
        query_ED,
        known_E=questions.known_E,
        item_ID=item_ID,
        order_I=questions.popular_I,
        candidate_rows=cold_C,
        seen=JaggedArray.empty(len(questions.history)),  # a cold item is in no history
        targets=questions.targets,
        k=0,
    )
    if not len(ranking.rank_P):
        return {}
    ranks = TargetRanks.of_pairs(user_P=ranking.query_P, rank_P=ranking.rank_P, candidates_E=ranking.candidates_E)
    found: dict[str, float] = {"users": ranks.users, "items": ranking.items}
    for k in (k for k in config.ks if k < ranking.items):  # all items are among the first k otherwise
        found[f"recall@{k}"] = _mean(metrics.recall(ranks, k=k))
        found[f"ndcg@{k}"] = _mean(metrics.ndcg(ranks, k=k))
        found[f"hit_rate@{k}"] = _mean(metrics.hit_rate(ranks, k=k))
    return {f"{prefix}/cold/{name}": float(value) for name, value in found.items()}


def _rank(questions: Questions, query_ED: Tensor, item_ID: Tensor, *, config: EvaluationConfig, progress: _Progress) -> Ranking:
    return rank_served(
        query_ED,
        known_E=questions.known_E,
        item_ID=item_ID,
        order_I=questions.popular_I,
        seen=_seen(questions, config=config),
        targets=questions.targets,
        k=max(config.ks),
        on_progress=progress.add,
    )


def _rank_popularity(questions: Questions, *, config: EvaluationConfig) -> Ranking:
    seen = _seen(questions, config=config)
    return rank_by_order(questions.popular_I, seen=seen, targets=questions.targets, k=max(config.ks))


def _seen(questions: Questions, *, config: EvaluationConfig) -> JaggedArray:
    return questions.history if config.exclude_seen else JaggedArray.empty(len(questions.history))


def all_metrics(prefix: str, ranking: Ranking, *, config: EvaluationConfig) -> dict[str, float]:
    """All metrics of one ranking, named <prefix>/<metric>; those that are not defined are left out."""
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
