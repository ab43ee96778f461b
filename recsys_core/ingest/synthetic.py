"""Synthetic interactions and item vectors with patterns for a model to learn: topics, popularity, drift and new items.

Shapes: U users, I items, T topics, E events, D width of a vector.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.disk import atomic_replacement
from recsys_core.units import DAY_US

NUM_TOPICS = 60
TOPIC_CONCENTRATION = 0.02
"""Parameter of the Dirichlet distribution of an item's topic weights. With a small value, most items have one main topic."""
FIRST_ITEM_ID = 1_000
FIRST_DAY = np.datetime64("2026-01-01T00:00:00", "us")
POPULARITY_EXPONENT = 0.7
TOPICS_PER_USER = 2
NUM_TOPIC_SHIFTS = 1


def generate(
    folder: Path,
    *,
    num_users: int = 5_000,
    num_items: int = 3_000,
    num_events: int = 200_000,
    num_days: int = 30,
    dim: int = 64,
    seed: int = 7,
    num_cold_items: int = 150,
) -> None:
    """Write interactions/day-NN.parquet (user_id string, item_id int64, timestamp) and item_embeddings.parquet.

    Each user has a few topics, which change over time. The item of an event belongs to one of the user's topics; popular items
    are more likely. An item's vector is a linear projection of its topic weights plus noise. The last `num_cold_items` items
    occur on the last two days only.
    """
    rng = np.random.default_rng(seed)
    topic_weight_IT = rng.dirichlet(np.full(NUM_TOPICS, TOPIC_CONCENTRATION), num_items)
    first_day_I = np.where(np.arange(num_items) < num_items - num_cold_items, 0, num_days - 2)
    popularity_rank_I = rng.permutation(num_items)
    popularity_I = 1.0 / (1.0 + popularity_rank_I) ** POPULARITY_EXPONENT
    day_E = np.sort(rng.integers(0, num_days, num_events))
    activity_U = rng.gamma(1.5, size=num_users) + 0.1  # users differ in how active they are
    user_E = rng.choice(num_users, num_events, p=activity_U / activity_U.sum())
    topic_E = _topics_of_events(rng, user_E, day_E, num_users=num_users, num_days=num_days)
    item_E = _items_of_events(rng, topic_E, day_E, topic_weight_IT, popularity_I, first_day_I)
    time_E = FIRST_DAY + (day_E * DAY_US + rng.integers(0, DAY_US, num_events)).astype("timedelta64[us]")
    _write_log(folder / "interactions", user_E, item_E, time_E, day_E)
    _write_vectors(rng, folder / "item_embeddings.parquet", topic_weight_IT, dim=dim)


def _topics_of_events(
    rng: np.random.Generator, user_E: NDArray[np.int64], day_E: NDArray[np.int64], *, num_users: int, num_days: int
) -> NDArray[np.int64]:
    """Draw a topic for each event from the topics of its user. The topics of a user change over the days."""
    topic_order_UT = np.argsort(rng.random((num_users, NUM_TOPICS)), axis=1)
    # A user starts with the first TOPICS_PER_USER topics of the user's row. Each shift moves this window by one topic.
    num_shifts_E = ((NUM_TOPIC_SHIFTS + 0.999) * day_E / num_days).astype(np.int64)
    topic_E: NDArray[np.int64] = topic_order_UT[user_E, num_shifts_E + rng.integers(0, TOPICS_PER_USER, len(user_E))]
    return topic_E


def _items_of_events(
    rng: np.random.Generator,
    topic_E: NDArray[np.int64],
    day_E: NDArray[np.int64],
    topic_weight_IT: NDArray[np.float64],
    popularity_I: NDArray[np.floating],
    first_day_I: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Draw an item for each event: an item of the event's topic that is available on that day."""
    item_E = np.empty(len(topic_E), np.int64)
    for cold_items_exist in (False, True):  # the period before the first day of the cold items, and the period from then on
        period_event_indices = np.flatnonzero((day_E >= first_day_I.max()) == cold_items_exist)
        is_available_I = (first_day_I == 0) | cold_items_exist
        for topic in range(NUM_TOPICS):
            topic_event_indices = period_event_indices[topic_E[period_event_indices] == topic]
            weight_I = topic_weight_IT[:, topic] * popularity_I * is_available_I
            item_E[topic_event_indices] = rng.choice(len(weight_I), len(topic_event_indices), p=weight_I / weight_I.sum())
    return item_E


def _write_log(
    folder: Path,
    user_E: NDArray[np.int64],
    item_E: NDArray[np.int64],
    time_E: NDArray[np.datetime64],
    day_E: NDArray[np.int64],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"user_id": np.char.add("u", user_E.astype(str)), "item_id": FIRST_ITEM_ID + item_E, "timestamp": time_E})
    first_event_of_day = np.searchsorted(day_E, np.arange(day_E.max() + 2))
    for day, (start_event, stop_event) in enumerate(pairwise(first_event_of_day)):
        pq.write_table(table.slice(start_event, stop_event - start_event), folder / f"day-{day:02d}.parquet")


def _write_vectors(rng: np.random.Generator, path: Path, topic_weight_IT: NDArray[np.float64], *, dim: int) -> None:
    topic_vector_TD = rng.normal(size=(NUM_TOPICS, dim))
    vector_ID = topic_weight_IT @ topic_vector_TD + rng.normal(scale=0.35, size=(len(topic_weight_IT), dim))
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(vector_ID.astype(np.float32).ravel()), dim)
    shuffled_item_I = rng.permutation(len(topic_weight_IT))
    table = pa.table({"item_id": FIRST_ITEM_ID + np.arange(len(topic_weight_IT)), "embedding": vectors}).take(shuffled_item_I)
    # This file is written last and atomically, so that all files are complete if it exists.
    with atomic_replacement(path) as temporary_path:
        pq.write_table(table, temporary_path)
