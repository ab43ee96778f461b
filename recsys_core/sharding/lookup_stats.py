"""Expected lookups per batch, computed from the ingested data. The planner uses them to estimate time and cache misses.

Shapes: I items, U users, R rows of a table.
"""

import numpy as np
from numpy.typing import NDArray

from recsys_core.config import Frozen
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.dataset.jagged import chunk_slices
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.loss.objective import negative_share
from recsys_core.models.spec import ModelSpec

Floats = NDArray[np.float64]
NUM_CURVE_POINTS = 100
CHUNK_ROWS = 1 << 22


class LookupStats(Frozen):
    """Expected lookups of one rank in one batch.

    values_per_query: by table, the number of values that a rank looks up, divided by the number of queries in its batch. Each
        distinct item of a batch is looked up once, as a candidate, negative or history item. For a list feature, the values of
        all its lists are counted.
    hot_row_curve: by table, the share of the lookups that go to the most frequent 1 %, 2 %, ... 100 % of the rows. A
        cache for that share of the rows cannot have a higher hit rate. Only tables with known row frequencies have a curve.
    """

    values_per_query: dict[str, float]
    hot_row_curve: dict[str, tuple[float, ...]]


def measure_lookups(
    model: ModelSpec,
    *,
    batch_size: int,
    world_size: int,
    loss: LossConfig,
    store: EventStore,
    features: FeatureStore | None = None,
) -> LookupStats:
    """Return the mean lookups over the batches of an epoch. batch_size: queries per rank and step.

    The calculation assumes that positives, negatives and history items are drawn independently, and that history items and
    known negatives are as frequent as positives. With negatives `all`, a rank also looks up its share of the items that have a
    training event.
    """
    num_train_events_U = store.train_count_U
    probability_I = lookup_probability(
        store.train_count_I,
        num_draws=batch_size * (1 + mean_history_length(num_train_events_U, model=model, is_ordered=store.is_ordered))
        + num_known_negatives(store, batch_size=batch_size, max_items=loss.explicit_negatives),
        num_negatives=loss.num_sampled_negatives,
        alpha=loss.negative_sampling_alpha,
    )
    if loss.negatives == "all":
        probability_I += (store.train_count_I > 0) * (1 - probability_I) / world_size
    num_items_per_batch = max(1.0, float(probability_I.sum()))
    feature_by_key = features.feature_by_key if features is not None else {}
    values_per_query: dict[str, float] = {}
    for table_name, table in model.tables.items():
        offset = feature_by_key[table_name].offset if table_name in feature_by_key else None  # None if there are no lists
        if table.side == "item":
            num_values_per_batch = num_items_per_batch if offset is None else _weighted_total_length(offset, probability_I)
            values_per_query[table_name] = num_values_per_batch / batch_size
        elif offset is None:
            values_per_query[table_name] = 1.0
        elif table_name.startswith("user."):
            values_per_query[table_name] = _weighted_total_length(offset, num_train_events_U) / max(1, store.num_train_events)
        else:  # a list feature of the context has one list per event
            values_per_query[table_name] = float(offset[-1]) / max(1, len(offset) - 1)
    curve_by_table = {
        table_name: hot_row_curve(probability_I) for table_name, table in model.tables.items() if table.feature == "item"
    }
    if "user" in model.tables:
        curve_by_table["user"] = hot_row_curve(num_train_events_U.astype(np.float64))
    # The plan's fingerprint contains these numbers. They are rounded, because machines differ in the last digits.
    return LookupStats(
        values_per_query={
            table_name: float(f"{num_values_per_query:.6g}") for table_name, num_values_per_query in values_per_query.items()
        },
        hot_row_curve=curve_by_table,
    )


def mean_history_length(num_train_events_U: NDArray[np.int64], *, model: ModelSpec, is_ordered: bool) -> float:
    """Return the mean number of history items of a training event. num_train_events_U: number of training events of each user.

    >>> from recsys_core.models.config import TwoTowerConfig
    >>> from recsys_core.models.history_config import MeanHistory
    >>> model = ModelSpec.sized(TwoTowerConfig(history=MeanHistory(length=2)), num_users=1, num_items=9)
    >>> mean_history_length(np.array([4]), model=model, is_ordered=True)  # the mean of 0, 1, 2, 2
    1.25
    >>> mean_history_length(np.array([4]), model=model, is_ordered=False)
    2.0
    """
    num_events_U, max_history = num_train_events_U.astype(np.float64), model.history_length
    if is_ordered:
        # The first max_history events of a user have histories of 0, 1, 2, ... items. All later histories are full.
        num_short_histories_U = np.minimum(num_events_U, max_history)
        num_full_histories_U = num_events_U - num_short_histories_U
        total_length_U = num_short_histories_U * (num_short_histories_U - 1) / 2 + num_full_histories_U * max_history
    else:
        num_other_events_U = num_events_U if model.config.history.include_target else np.maximum(num_events_U - 1, 0)
        total_length_U = num_events_U * np.minimum(num_other_events_U, max_history)
    return float(total_length_U.sum() / max(1.0, num_events_U.sum()))


def num_known_negatives(store: EventStore, *, batch_size: int, max_items: int) -> float:
    """Return the expected number of known negatives in a batch, as if all events of a user had the same known negatives.

    max_items: largest number of known negatives of an event.
    """
    if not max_items or store.known_negatives is None:
        return 0.0
    with np.errstate(divide="ignore"):  # log1p(-1) is -inf for the only user of a log
        in_batch_probability_U = -np.expm1(batch_size * np.log1p(-store.train_count_U / max(1, store.num_train_events)))
    return float(np.minimum(store.known_negatives.num_train_negatives_U, max_items) @ in_batch_probability_U)


def lookup_probability(count_I: NDArray[np.int64], *, num_draws: float, num_negatives: int, alpha: float) -> Floats:
    """Return the probability that a batch looks up each item, [I].

    The sum of the probabilities is the expected number of distinct items.

    Args:
        count_I: training events of each item.
        num_draws: number of positives and history items of the batch. They are drawn in proportion to count_I.
        num_negatives: number of sampled negatives of the batch.
        alpha: exponent of the sampling distribution of negatives, see `negative_share`.

    >>> lookup_probability(np.array([1, 1]), num_draws=1, num_negatives=0, alpha=0.0).tolist()
    [0.5, 0.5]
    >>> probability_I = lookup_probability(np.array([1, 1, 1, 1]), num_draws=4, num_negatives=0, alpha=0.0)
    >>> round(float(probability_I.sum()), 4)  # 4 (1 - (3/4)^4)
    2.7344
    """
    probability_I = np.empty(len(count_I))
    num_events = max(1, int(count_I.sum()))
    negative_share_I = negative_share(count_I, alpha) if num_negatives else None
    for chunk in chunk_slices(len(count_I), length=CHUNK_ROWS):
        # For an item with all events, log1p(-1) is -inf: the probability that the batch misses the item is 0.
        with np.errstate(divide="ignore"):
            log_miss_probability_I = num_draws * np.log1p(-count_I[chunk] / num_events)
            if negative_share_I is not None:
                log_miss_probability_I += num_negatives * np.log1p(-np.minimum(negative_share_I[chunk], 1.0))
        probability_I[chunk] = -np.expm1(log_miss_probability_I)
    return probability_I


def hot_row_curve(weight_R: Floats) -> tuple[float, ...]:
    """Return the share of the lookups that go to the most frequent 1 %, 2 %, ... 100 % of the rows.

    weight_R: how often each row is looked up, in any unit.

    >>> shares = hot_row_curve(np.array([6.0, 0, 3, 1]))
    >>> [round(shares[percent - 1], 2) for percent in (1, 25, 50, 100)]
    [0.02, 0.6, 0.9, 1.0]
    """
    total_weight = float(weight_R.sum())
    if total_weight == 0:
        return tuple((1 + point) / NUM_CURVE_POINTS for point in range(NUM_CURVE_POINTS))
    cumulative_shares = np.concatenate([[0.0], np.cumsum(np.sort(weight_R)[::-1])]) / total_weight
    num_hot_rows = np.arange(1, NUM_CURVE_POINTS + 1) * len(weight_R) / NUM_CURVE_POINTS
    num_full_rows = np.minimum(num_hot_rows.astype(np.int64), len(weight_R) - 1)
    partial_row_shares = cumulative_shares[num_full_rows + 1] - cumulative_shares[num_full_rows]
    shares: Floats = cumulative_shares[num_full_rows] + (num_hot_rows - num_full_rows) * partial_row_shares
    return tuple(round(min(1.0, share), 6) for share in shares.tolist())


def _weighted_total_length(offset: NDArray[np.int64], weight: NDArray[np.int64] | Floats) -> float:
    """Return the sum of all list lengths, each multiplied by the weight of its list."""
    return sum(
        float(np.dot(np.diff(offset[chunk.start : chunk.stop + 1]), weight[chunk]))
        for chunk in chunk_slices(len(weight), length=CHUNK_ROWS)
    )


def num_distinct_items(num_items: int, *, num_draws: float, num_negatives: int, exponent: float) -> float:
    """Return the expected number of distinct items in a batch, for a future log with an item popularity by Zipf's law.

    The batch has `num_draws` draws from Zipf's law with `exponent`, and `num_negatives` uniform draws. The probabilities of the
    1,000 most popular items are added up one by one. The probabilities of the other items are integrated over 4,000 intervals
    of the popularity rank, so a catalogue of 10^9 items needs no array of that size.

    >>> num_distinct_items(1, num_draws=5, num_negatives=0, exponent=1.0)
    1.0
    >>> round(num_distinct_items(2, num_draws=2, num_negatives=0, exponent=0.0), 6)  # 2 (1 - (1/2)^2)
    1.5
    """
    head_popularity_ranks = np.arange(1, min(num_items, 1000) + 1, dtype=np.float64)
    interval_bounds = np.geomspace(1000.5, num_items + 0.5, 4001) if num_items > 1000 else np.empty(0)
    interval_middles = np.sqrt(interval_bounds[1:] * interval_bounds[:-1])
    popularity_ranks = np.concatenate([head_popularity_ranks, interval_middles])
    num_items_of_interval = np.concatenate([np.ones_like(head_popularity_ranks), np.diff(interval_bounds)])
    draw_probability = popularity_ranks**-exponent
    draw_probability /= (draw_probability * num_items_of_interval).sum()
    with np.errstate(divide="ignore"):  # log1p(-1) is -inf for the only item
        log_miss_probability = num_draws * np.log1p(-draw_probability)
        if num_negatives:
            log_miss_probability += num_negatives * np.log1p(-1 / num_items)
    return float((num_items_of_interval * -np.expm1(log_miss_probability)).sum())
