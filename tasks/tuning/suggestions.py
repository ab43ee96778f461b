"""Settings that fit the data: facts about an ingested log, and rules that derive settings from the facts.

The suggested values were measured to be good starting points (docs/models.md). `nightjar tune` searches for better values.

Shapes: I items, U users.
"""

import math
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from recsys_core.config import Frozen
from recsys_core.dataset.events import EventStore
from recsys_core.ingest.log.split_config import FileSplit, Split
from recsys_core.manifests import Dataset
from tasks.tuning.config import RangeConfig

DENSE_LOG_SHARE = 0.01
"""A log is dense if it contains at least this share of all (user, item) pairs."""
STEPS_PER_EPOCH = 300
"""Number of steps per epoch that the suggested batch size aims at."""
FACTORISATION_STEPS_PER_EPOCH = 80
"""Number of steps per epoch that the suggested batch size of a matrix factorisation aims at."""
MAX_HISTORY_LENGTH = 50
"""Largest suggested number of items in a history."""
SMALL_LOG_EVENTS = 300_000
"""With fewer training events, a matrix factorisation needs a higher temperature.

In benchmarks/suggestions.json, 0.25 is better than 0.18 on dense logs of 65,000 to 192,000 training events. On ml1m, with
717,000 training events, the best temperature is 0.18.
"""
MAX_FACTORISATION_ITEMS = 20_000
"""A matrix factorisation, with a softmax over the whole catalogue, is suggested for at most this many items."""
MOSTLY_COLD_SHARE = 0.5
"""If a larger share of the events is of cold items, the settings are for cold items (suggestions.json, citeulike_t cold)."""
MAX_ROWS_WITHOUT_BLOCK = 200
"""A spectral block, with 80 singular vectors, is suggested if there are more users and more items than this."""
MAX_DIM = 128
"""Largest suggested width of the item embeddings."""
MIN_EVENTS_FOR_POPULARITY = 20
"""A learned popularity is suggested if the median user has at least this many training events."""
SEARCHED_RANGES = {
    "training.table_optimizer.learning_rate": RangeConfig(low=0.01, high=0.3, log=True),
    "model.query.dropout": RangeConfig(low=0.0, high=0.5),
    "loss.num_negatives": RangeConfig(choices=(512, 2048)),
}
"""Ranges in which `nightjar tune` searches by default, by setting. A suggestion for the setting takes precedence."""
VALIDATED_POPULARITY = {"kind": "validated"}
LEARNED_POPULARITY = {"kind": "learned", "served_weight": None}


class DataFacts(Frozen):
    """Facts about an ingested log on which the suggestions depend.

    Attributes:
        density: share of all (user, item) pairs that are in the training events.
        history_median, history_p95: median and 95th percentile of the training events per user.
        is_ordered: whether the events of a user have an order.
        vector_share: share of the training events whose item has a pretrained vector.
        vector_dim: width of the item vectors; 0 without vectors.
        cold_share: share of the held-out events whose item has no training event.
        cold_validation_share, cold_test_share: the same share of the validation events, and of the test events.
        is_validation_sampled: whether the validation events are a sample of the training files.
    """

    num_users: int
    num_items: int
    num_train_events: int
    density: float
    history_median: float
    history_p95: float
    is_ordered: bool
    has_item_features: bool
    vector_share: float
    vector_dim: int
    cold_share: float
    cold_validation_share: float
    cold_test_share: float
    is_validation_sampled: bool

    @classmethod
    def of(cls, dataset: Dataset, split: Split) -> Self:
        """Return the facts about `dataset`, which was ingested with `split`. Only the cold shares read held-out events."""
        interactions, store = dataset.interactions, EventStore.open(dataset.interactions)
        train_count_U, train_count_I = store.train_count_U, store.train_count_I
        history_lengths = train_count_U[train_count_U > 0]
        num_users, num_items, num_events = len(history_lengths), int((train_count_I > 0).sum()), interactions.num_train_events
        vector_row_I = store.vector_rows("item")
        count_before_test_I, event_count_I = store.item_counts_before("test"), store.event_count_I()

        def cold_share(held_out_count_I: NDArray[np.int64]) -> float:
            return float(held_out_count_I[train_count_I == 0].sum() / max(1, held_out_count_I.sum()))

        return cls(
            num_users=num_users,
            num_items=num_items,
            num_train_events=num_events,
            density=num_events / max(1, num_users * num_items),
            history_median=float(np.median(history_lengths)) if len(history_lengths) else 0.0,
            history_p95=float(np.percentile(history_lengths, 95)) if len(history_lengths) else 0.0,
            is_ordered=store.is_ordered,
            has_item_features=dataset.features is not None
            and any(key.startswith("item.") for key in dataset.features.features),
            vector_share=0.0 if vector_row_I is None else float(train_count_I[vector_row_I >= 0].sum() / max(1, num_events)),
            vector_dim=0 if vector_row_I is None or dataset.embeddings is None else dataset.embeddings.tables["item"].dim,
            cold_share=cold_share(event_count_I - train_count_I),
            cold_validation_share=cold_share(count_before_test_I - train_count_I),
            cold_test_share=cold_share(event_count_I - count_before_test_I),
            is_validation_sampled=isinstance(split, FileSplit) and split.validation_share > 0,
        )

    @property
    def is_dense(self) -> bool:
        """Whether the log counts as dense."""
        return self.density >= DENSE_LOG_SHARE

    @property
    def lacks_order_and_vectors(self) -> bool:
        """Whether events have no order and items no pretrained vectors, so that other settings fit (suggestions.json)."""
        return not self.is_ordered and self.vector_share == 0

    @property
    def describes_items(self) -> bool:
        """Whether items have features or pretrained vectors in addition to their ids."""
        return self.has_item_features or self.vector_share > 0


class Suggestion(Frozen):
    """A setting, its suggested value, and the reason in one sentence.

    Attributes:
        search: the range in which `nightjar tune` searches; None if `nightjar tune` does not vary the setting.
    """

    setting: str
    value: Any
    reason: str
    search: RangeConfig | None = None


def suggestions(facts: DataFacts) -> list[Suggestion]:
    """Return the settings that fit the data."""
    is_factorisation = facts.is_dense and not facts.is_ordered and facts.num_items <= MAX_FACTORISATION_ITEMS
    rules = [_factorisation] if is_factorisation else [_loss, _ordered if facts.is_ordered else _unordered, _training]
    return [suggestion for rule in rules for suggestion in rule(facts)]


def _suggestion(setting: str, value: Any, reason: str, *choices: Any, low: Any = None, high: Any = None) -> Suggestion:
    """Return a suggestion with the choices, or the range from `low` to `high`, that `nightjar tune` searches.

    The range is logarithmic if `low` is above 0.
    """
    search = None
    if choices:
        search = RangeConfig(choices=choices)
    elif low is not None:
        search = RangeConfig(low=low, high=high, log=low > 0)
    return Suggestion(setting=setting, value=value, reason=reason, search=search)


def _factorisation(facts: DataFacts) -> Iterator[Suggestion]:
    """Yield the settings of a matrix factorisation with a softmax over the whole catalogue."""
    density_text = f"{_percent(facts.density)} of all pairs are in the log"
    reason = f"{density_text}, and the log has no order, so an embedding per user is better than a mean of items"
    yield _suggestion("model.learn_user_embedding", True, reason)
    reason = "the model reads the embedding of the user instead of the history"
    yield _suggestion("model.history.last_item_feature", False, reason)
    yield _suggestion("model.history.length", 0, reason)
    yield _suggestion("model.query.layers", [], reason)
    reason = f"{facts.num_items:,} items are few, and large batches make a softmax over all of them fast"
    yield _suggestion("loss.kind", "softmax", reason)
    yield _suggestion("loss.negatives", "all", reason)
    reason = f"{density_text}: a dense log needs a higher temperature than a sparse one"
    yield _suggestion(
        "model.temperature", 0.25 if facts.num_train_events < SMALL_LOG_EVENTS else 0.18, reason, low=0.1, high=0.4
    )
    reason = "an exponent above 1 gives the negatives more weight, which fits the temperature above"
    yield _suggestion("loss.negatives_exponent", 1.1, reason, low=1.0, high=1.3)
    reason = f"5 % of the users have more than {facts.history_p95:,.0f} events, and would dominate the loss"
    yield _suggestion("loss.user_exponent", -0.5, reason, -0.5, 0.0)
    if min(facts.num_users, facts.num_items) > MAX_ROWS_WITHOUT_BLOCK:
        reason = "a decomposition of the log finds further items; the validation chooses its weight"
        yield _suggestion("model.spectral_block", {"output_dim": 64}, reason)
    batch_size = _batch_size(facts, steps_per_epoch=FACTORISATION_STEPS_PER_EPOCH)
    yield _suggestion("training.batch_size", batch_size, _steps_reason(facts, batch_size))
    reason = "Adam trains a factorisation in few epochs; the rate falls to 0 until the last epoch"
    for table_name in ("item", "user"):
        copies_reason = "Adam on a CPU needs a copy of the table on each rank"
        yield _suggestion(f"sharding.tables.{table_name}.sharding_types", ["data_parallel"], copies_reason)
    yield _suggestion("training.table_optimizer.kind", "adam", reason)
    yield _suggestion("training.table_optimizer.learning_rate", 0.01, reason, low=0.003, high=0.03)
    yield _suggestion("training.table_optimizer.lr_decay", "linear", reason)
    yield _suggestion("training.epochs", 12, reason)


def _loss(facts: DataFacts) -> Iterator[Suggestion]:
    """Yield the settings of the loss and of the popularity for a model that reads histories."""
    density_text = f"{_percent(facts.density)} of all pairs are in the log"
    if facts.is_dense:
        reason = f"{density_text}: a dense log needs a higher temperature than a sparse one"
        yield _suggestion("model.temperature", 0.2, reason, low=0.1, high=0.4)
        reason = f"{density_text}, so many sampled negatives are items that the user has had"
        yield _suggestion("loss.mask_negatives", "seen", reason, "positive", "seen")
        reason = f"{facts.num_items:,} items can be negatives; more of them approximate the softmax over all items better"
        yield _suggestion("loss.num_negatives", 2048 if facts.num_items > 2048 else 512, reason, 512, 2048)
    else:
        reason = f"{density_text}: a sparse log needs a low temperature"
        temperature = 0.15 if facts.lacks_order_and_vectors else 0.1
        yield _suggestion("model.temperature", temperature, reason, low=0.05, high=0.2)
    if not facts.is_ordered and not facts.is_dense:
        reason = "the validation chooses the weight of a term for popularity, which can be 0"
        yield _suggestion("model.popularity", VALIDATED_POPULARITY, reason)
    elif facts.history_median >= MIN_EVENTS_FOR_POPULARITY:
        reason = f"the median user has {facts.history_median:,.0f} training events; a learned term for popularity then helps"
        yield _suggestion("model.popularity", LEARNED_POPULARITY, reason, {"kind": "none"}, LEARNED_POPULARITY)


def _ordered(facts: DataFacts) -> Iterator[Suggestion]:
    """Yield the settings of a model whose histories have an order."""
    history_length = int(min(MAX_HISTORY_LENGTH, max(10, 10 * math.ceil(facts.history_p95 / 10))))
    reason = f"95 % of the users have at most {facts.history_p95:,.0f} events"
    yield _suggestion("model.history.length", history_length, reason, 10, 20, 50)
    reason = "the log has an order, so newer items can count more"
    yield _suggestion("model.history.pooling", "recency", reason, "mean", "recency")
    if facts.describes_items:
        item_data = "features" if facts.has_item_features else "pretrained vectors"
        reason = f"items have {item_data}, which then also describe the histories"
        yield _suggestion("model.history.item_representation", "candidate_tower", reason, "embedding", "candidate_tower")
    has_many_cold_items = facts.vector_share > 0 and facts.cold_share > 0.2
    if has_many_cold_items:
        yield from _vectors_with_offsets(facts)
    if facts.is_dense:
        return
    if not has_many_cold_items:
        reason = f"on a sparse log, {MAX_DIM} numbers per item and layers with a skip connection find more items"
        yield from _wide_candidates(MAX_DIM, reason)
    if facts.describes_items:
        reason = "on a sparse log, offsets learn which items follow an item, which its vector does not contain"
        yield _suggestion("model.history.learn_offsets", True, reason, False, True)
    reason = "several models in one are better on a sparse log; a training takes up to three times as long"
    yield _suggestion("model.num_members", 3, reason)


def _unordered(facts: DataFacts) -> Iterator[Suggestion]:
    """Yield the settings of a model whose histories have no order."""
    reason = "the log has no order, so no item is the last"
    yield _suggestion("model.history.pooling", "mean", reason)
    yield _suggestion("model.history.last_item_feature", False, reason)
    yield _suggestion("loss.mask_negatives", "seen", "an item of the history is not a negative", "positive", "seen")
    if not facts.lacks_order_and_vectors:
        yield from _unordered_with_vectors(facts)
        return
    reason = "other items of the user, in random order, are the history; a long one contains most of them"
    yield _suggestion("model.history.length", MAX_HISTORY_LENGTH, reason, 20, 50)
    reason = f"on a sparse log, {MAX_DIM} numbers per item and layers with a skip connection find more items"
    yield from _wide_candidates(MAX_DIM, reason)


def _unordered_with_vectors(facts: DataFacts) -> Iterator[Suggestion]:
    """Yield the settings of a model that adds an embedding per user to the mean of pretrained vectors."""
    reason = "the log has no order; an embedding per user adds information to the mean of the items"
    yield _suggestion("model.learn_user_embedding", True, reason, False, True)
    yield _suggestion("model.query.layers", [], "the embedding and the mean are added, without a layer")
    reason = "the embedding of a user starts near zero and changes slowly, so that the mean dominates at first"
    yield _suggestion("tables.user.init_std", 1e-4, reason)
    yield _suggestion("tables.user.optimizer.learning_rate", 0.02, reason)
    reason = f"the vectors have {facts.vector_dim} numbers; layers with a skip connection adapt them"
    yield from _wide_candidates(min(max(4, facts.vector_dim // 4 * 4), MAX_DIM), reason)
    yield from _vectors_with_offsets(facts)


def _wide_candidates(dim: int, reason: str) -> Iterator[Suggestion]:
    yield _suggestion("model.embedding_dim", dim, reason)
    yield _suggestion("model.candidate", {"layers": [4 * dim, dim], "skip_connection": True}, reason)


def _vectors_with_offsets(facts: DataFacts) -> Iterator[Suggestion]:
    """Yield the settings of pretrained item vectors that stay fixed, with a learned offset for each item."""
    reason = f"{_percent(facts.cold_share)} of the held-out events are of items without training events, other items have few"
    yield _suggestion("tables.item.transfer", "residual", reason)
    reason = "offsets are removed at random, so that the towers also learn from the vectors alone"
    yield _suggestion("tables.item.id_dropout", 0.5 if facts.cold_share > MOSTLY_COLD_SHARE else 0.1, reason)
    reason = "the vectors have a norm of about 1, and the steps of the offsets are small compared with it"
    yield _suggestion("tables.item.init_std", round(facts.vector_dim**-0.5, 3), reason)
    yield _suggestion("tables.item_offset.optimizer.learning_rate", 0.02, reason)
    is_validation_cold = facts.cold_validation_share > MOSTLY_COLD_SHARE
    if facts.is_validation_sampled and facts.cold_test_share > MOSTLY_COLD_SHARE and not is_validation_cold:
        is_validation_cold = True
        reason = (
            f"{_percent(facts.cold_test_share)} of the test events are of such items, so the validation holds out items too"
        )
        yield _suggestion("interactions.split.validation_unit", "item", reason)
    if is_validation_cold:
        reason = "the validation, which chooses the epoch, then ranks only items without a training event"
        yield _suggestion("training.validation.candidates", "cold", reason)


def _training(facts: DataFacts) -> Iterator[Suggestion]:
    min_batch_size = 1024 if facts.lacks_order_and_vectors else 512
    batch_size = _batch_size(facts, steps_per_epoch=STEPS_PER_EPOCH, min_batch_size=min_batch_size)
    yield _suggestion("training.batch_size", batch_size, _steps_reason(facts, batch_size))
    if facts.is_ordered and not facts.is_dense and not facts.describes_items:
        return  # constant rates are better for ids alone (suggestions.json, Amazon Beauty, ids alone)
    reason = "the learning rates fall to 0 until the last epoch"
    yield _suggestion("training.table_optimizer.lr_decay", "cosine", reason)
    yield _suggestion("training.dense_optimizer.lr_decay", "cosine", reason)


def _batch_size(facts: DataFacts, *, steps_per_epoch: int, min_batch_size: int = 512) -> int:
    """Return a power of two from `min_batch_size` to 8,192 with which an epoch has about `steps_per_epoch` steps."""
    return int(2 ** round(math.log2(min(8192, max(min_batch_size, facts.num_train_events / steps_per_epoch)))))


def _steps_reason(facts: DataFacts, batch_size: int) -> str:
    return f"an epoch then has about {max(1, facts.num_train_events // batch_size):,} steps"


def _percent(share: float) -> str:
    """Format a share in percent.

    >>> _percent(0.00012), _percent(0.047), _percent(0.996)
    ('0.012 %', '4.7 %', '100 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
