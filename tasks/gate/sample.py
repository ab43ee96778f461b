"""Sample of test users, on which registered versions are validated and measured. All compared versions get the same sample.

Shapes: U users of the sample, T targets, L entries of a list per user, B users with a target, I items.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.dataset.layout import CONTEXT_FILE, context_paths, shard_files, vocabulary_file
from recsys_core.errors import StageError
from recsys_core.evaluation.config import FeatureSlice
from recsys_core.evaluation.metrics import TargetPositions, UserMetrics
from recsys_core.evaluation.slices import guarded_slices, item_slices, user_slices
from recsys_core.manifests import FeaturesManifest, InteractionsManifest
from recsys_core.seeds import SMOKE_TEST_USERS_SEED
from recsys_core.serving.description import ITEM_COLUMN, QUERY_COLUMNS, PackageDescription
from tasks.gate.user_features import user_feature_columns

K = 20
"""Number of items that a version recommends to each user: the largest cut-off of a `ServedMetric`."""

MIN_CPU_S = 1.0
"""Smallest total CPU time that is compared between versions. A smaller time varies by more than a tenth."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class UserSample:
    """A sample of test users with their histories. A (user, item) pair is one integer: `user_index * num_items + item_row`.

    Attributes:
        histories_file: parquet file with one row per user: `user_id`, `history` (the ids of the items that the user had before
            the test period), and the columns of `context`.
        context: context columns of each user's first test event, with the key context.<column>. A column whose name has no
            other meaning in a request also has the key <column>.
        user_row_U: row of each user, ascending.
        item_ids: ids of the catalogue by item row.
        history: item rows of each user before the test period, oldest first.
        num_seen_U: number of distinct items in each user's history.
        seen_pair_L: the pairs of each user with the items in the user's history, ascending.
        target_pair_T: the pairs of each user with the user's test items that are not in the history, ascending.
        target_mask_by_slice: [T] whether each target belongs to a slice of the users or items, by slice name.
        min_users_by_slice: smallest number of users for which a feature slice is compared; None: `gate.min_users`.
        features: features of the log, for versions whose package stores no users; None if there are none.
    """

    histories_file: Path
    context: Mapping[str, pa.Array]
    user_row_U: IntArray
    item_ids: pa.Array
    history: JaggedArray
    num_seen_U: IntArray
    seen_pair_L: IntArray
    target_pair_T: IntArray
    target_mask_by_slice: Mapping[str, npt.NDArray[np.bool_]]
    min_users_by_slice: Mapping[str, int | None]
    features: FeaturesManifest | None = None

    @property
    def num_users(self) -> int:
        """Number of users in the sample."""
        return len(self.num_seen_U)

    @property
    def num_items(self) -> int:
        """Number of items in the catalogue."""
        return len(self.item_ids)

    def feature_columns(self, package: PackageDescription) -> dict[str, pa.Array]:
        """Return the request columns with the context, and with the features of users if the package stores no users."""
        return {**self.context, **user_feature_columns(package, self.features, user_row_U=self.user_row_U)}


def prepare_sample(
    interactions: InteractionsManifest,
    *,
    max_users: int,
    folder: Path,
    features: FeaturesManifest | None = None,
    feature_slices: Sequence[FeatureSlice] = (),
) -> UserSample:
    """Draw up to `max_users` users with test events, with a fixed seed, and write their histories to `folder`.

    Args:
        features: features of the log; None if there are none.
        feature_slices: slices by the values of `features`, in addition to the slices by popularity and training events.

    Raises:
        InputError: a feature of `feature_slices` is not among the features.
        StageError: all test items of all users are in their histories, so no metric can be computed.
    """
    event_store = EventStore.open(interactions)
    user_row_U = np.sort(
        np.random.default_rng(SMOKE_TEST_USERS_SEED).permutation(event_store.users_with_targets("test"))[:max_users]
    )
    history, targets = event_store.items_before(user_row_U, "test"), event_store.targets(user_row_U, "test")
    item_ids = pq.read_table(interactions.path(vocabulary_file("item")), columns=["id"])["id"].combine_chunks()
    user_ids = pq.read_table(interactions.path(vocabulary_file("user")), columns=["id"])["id"].take(pa.array(user_row_U))
    history_ids = pa.ListArray.from_arrays(history.offset, item_ids.take(pa.array(history.values_L)))
    folder.mkdir()
    histories_file = folder / "cases.parquet"
    context = _context_columns(interactions, event_index_U=event_store.first_event_index(user_row_U, "test"))
    pq.write_table(pa.table({"user_id": user_ids, "history": history_ids, **context}), histories_file)
    seen_items = history.distinct(bound=len(item_ids))
    new_targets = targets.distinct(bound=len(item_ids)).difference(seen_items, bound=len(item_ids))
    if not len(new_targets.values_L):
        raise StageError(
            f"none of {len(user_row_U):,} test users has a test item that is not in the user's history, so no version can be "
            "measured; choose another test period in interactions.split"
        )
    target_mask_by_slice = item_slices(event_store.train_count_I, item_T=new_targets.values_L)
    target_mask_by_slice |= user_slices(event_store.train_count_U[user_row_U], user_T=new_targets.list_index_L)
    feature_masks, min_users_by_slice = guarded_slices(
        feature_slices,
        features,
        store=event_store,
        user_row_U=user_row_U,
        user_T=new_targets.list_index_L,
        item_T=new_targets.values_L,
    )
    return UserSample(
        histories_file=histories_file,
        context=context,
        user_row_U=user_row_U,
        item_ids=item_ids,
        history=history,
        num_seen_U=seen_items.lengths,
        seen_pair_L=seen_items.pair_keys(bound=len(item_ids)),
        target_pair_T=new_targets.pair_keys(bound=len(item_ids)),
        target_mask_by_slice=target_mask_by_slice | feature_masks,
        min_users_by_slice=min_users_by_slice,
        features=features,
    )


def _context_columns(interactions: InteractionsManifest, *, event_index_U: IntArray) -> dict[str, pa.Array]:
    """Return the context columns of the log at the events `event_index_U`.

    `UserSample` describes the keys. The signature of a version determines which of these keys the version reads.
    """
    if shard_files(CONTEXT_FILE, num_shards=interactions.num_shards)[0] not in interactions.files:  # no context columns
        return {}
    table = pa.concat_tables(pq.read_table(path) for path in context_paths(interactions)).take(pa.array(event_index_U))
    context = {}
    for column in table.column_names:
        values = table[column].combine_chunks()
        if pa.types.is_floating(values.type):
            # The ingest reads NaN as a missing value, but a request with NaN is invalid.
            values = pc.if_else(pc.is_nan(values), None, values)
        context[f"context.{column}"] = values
        if column not in (*QUERY_COLUMNS, ITEM_COLUMN):
            context[column] = values
    return context


class ServedMetrics(NamedTuple):
    """Metrics of the recommendations of one version.

    Attributes:
        user_metrics: metrics over all targets.
        user_metrics_by_slice: metrics over the targets of each slice.
        coverage: share of the catalogue that is recommended to at least one user.
        cpu_ms_per_user: CPU time of the answers per user; NaN if the total for all users is below MIN_CPU_S.
        num_bytes: size of the model's files.
        num_recommended: number of recommendations for all users together.
        num_unknown: number of recommendations whose item is not in the catalogue. The metrics ignore them.
    """

    user_metrics: UserMetrics
    user_metrics_by_slice: Mapping[str, UserMetrics]
    coverage: float
    cpu_ms_per_user: float
    num_bytes: int
    num_recommended: int = 0
    num_unknown: int = 0


class Answers(NamedTuple):
    """Recommendations of one version for the users of the sample.

    Attributes:
        item_ids: one list of item ids per user, the best item first.
        cpu_s: CPU time of the process for these recommendations, in seconds.
        num_bytes: size of the model's files.
    """

    item_ids: pa.ListArray
    cpu_s: float
    num_bytes: int


def answer_problems(answers: Answers, *, sample: UserSample, rejects_unknown_items: bool = True) -> list[str]:
    """Return one text per problem, with its count: wrong number of items, unknown items, seen items, repeated items.

    Args:
        rejects_unknown_items: whether an item that is not in the catalogue is a problem.
    """
    recommendations = _parse_answers(answers.item_ids, sample)
    expected_num_items_U = np.minimum(K, sample.num_items - sample.num_seen_U)
    is_known_L = recommendations.item_row_L >= 0
    recommended_pair_L = recommendations.user_L[is_known_L] * sample.num_items + recommendations.item_row_L[is_known_L]
    count_by_problem = {
        f"users whose number of items is not min({K}, number of unseen items)": int(
            np.sum(recommendations.num_items_U != expected_num_items_U)
        ),
        "items that are not in the catalogue": int(np.sum(~is_known_L)) if rejects_unknown_items else 0,
        "items that the user had before": int(np.isin(recommended_pair_L, sample.seen_pair_L).sum()),
        "items that are recommended twice to one user": len(recommended_pair_L) - len(np.unique(recommended_pair_L)),
    }
    return [f"{count:,} {problem} (of {sample.num_users:,} users)" for problem, count in count_by_problem.items() if count]


def measure_answers(answers: Answers, *, sample: UserSample) -> ServedMetrics:
    """Return the metrics of the users with a target that is not in the user's history.

    The metrics are defined as in the exact evaluation. A target that is not recommended has the last position. A version of
    an earlier run may recommend items that are not in this catalogue; these items are left out of the lists.
    """
    recommendations = _parse_answers(answers.item_ids, sample)
    num_items, is_known_L = sample.num_items, recommendations.item_row_L >= 0
    user_L, item_row_L = recommendations.user_L[is_known_L], recommendations.item_row_L[is_known_L]
    pair_L, num_known_U = user_L * num_items + item_row_L, np.bincount(user_L, minlength=sample.num_users)
    position_L = np.arange(len(pair_L)) - np.repeat(np.cumsum(num_known_U) - num_known_U, num_known_U)
    _, hit_target_index, hit_answer_index = np.intersect1d(sample.target_pair_T, pair_L, return_indices=True)
    target_position_T = np.full(len(sample.target_pair_T), num_items)
    target_position_T[hit_target_index] = position_L[hit_answer_index]

    def metrics_of(mask_T: npt.NDArray[np.bool_]) -> UserMetrics:
        target_positions = TargetPositions.from_pairs(
            user_T=sample.target_pair_T[mask_T] // num_items,
            position_T=target_position_T[mask_T],
            num_candidates_B=num_items - sample.num_seen_U,
        )
        return UserMetrics.of(target_positions, user_row_B=sample.user_row_U)

    return ServedMetrics(
        user_metrics=metrics_of(np.ones(len(target_position_T), np.bool_)),
        user_metrics_by_slice={name: metrics_of(mask_T) for name, mask_T in sample.target_mask_by_slice.items()},
        coverage=len(np.unique(item_row_L)) / num_items,
        cpu_ms_per_user=1_000 * answers.cpu_s / sample.num_users if answers.cpu_s >= MIN_CPU_S else math.nan,
        num_bytes=answers.num_bytes,
        num_recommended=len(is_known_L),
        num_unknown=int(np.sum(~is_known_L)),
    )


class _Recommendations(NamedTuple):
    """The recommended items of all users, concatenated.

    Attributes:
        user_L: index of the user in the sample.
        item_row_L: item row; -1 for an item that is not in the catalogue.
        num_items_U: number of recommended items of each user.
    """

    user_L: IntArray
    item_row_L: IntArray
    num_items_U: IntArray


def _parse_answers(item_ids: pa.ListArray, sample: UserSample) -> _Recommendations:
    num_items_U = pc.list_value_length(item_ids).to_numpy(zero_copy_only=False).astype(np.int64)
    item_rows = pc.fill_null(pc.index_in(item_ids.flatten(), value_set=sample.item_ids), -1)
    item_row_L = item_rows.to_numpy(zero_copy_only=False).astype(np.int64)
    return _Recommendations(np.repeat(np.arange(sample.num_users), num_items_U), item_row_L, num_items_U)
