"""How many values a batch looks up in each table: measured in what the ingest left, not guessed.

Shapes: I items, U users, B queries.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from recsys_core.config import Frozen
from recsys_core.data.events import EventStore
from recsys_core.data.features.store import FeatureStore
from recsys_core.manifests import Dataset
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.sampling import negative_share
from recsys_core.models.spec import ModelSpec

Floats = NDArray[np.float64]
CURVE_POINTS = 100
_AT_ONCE = 1 << 22


class Traffic(Frozen):
    """What one batch of one rank looks up.

    values: by table, values per query. Item tables are looked up once per distinct item of the batch (candidates, negatives
    and histories together), so theirs is the expected number of distinct items (times the length of a list) divided by the
    queries. hottest: by table whose rows' frequencies are known, the share of the lookups that go to the hottest 1 %, 2 %, ...
    100 % of its rows: what a cache of that size would answer at best.
    """

    values: dict[str, float]
    hottest: dict[str, tuple[float, ...]]


def measure_traffic(
    model: ModelSpec,
    *,
    batch_size: int,
    loss: LossConfig,
    dataset: Dataset,
) -> Traffic:
    """traffic_of for committed stages."""
    features = None if dataset.features is None else FeatureStore.open(dataset.features)
    store = EventStore.open(dataset.interactions)
    return traffic_of(model, batch_size=batch_size, loss=loss, store=store, features=features)


def traffic_of(
    model: ModelSpec, *, batch_size: int, loss: LossConfig, store: EventStore, features: FeatureStore | None = None
) -> Traffic:
    """Traffic of a batch of `batch_size` queries on average over an epoch.

    The items of a batch (positives, negatives, histories) are taken as drawn independently of each other, histories by the same
    shares as positives.
    """
    trained_U = store.train_end - store.user_offset[:-1]
    found_I = seen_share(
        store.item_count,
        draws=batch_size * (1 + mean_history(trained_U, model=model, ordered=store.ordered)),
        negatives=loss.negatives,
        alpha=loss.negatives_alpha,
    )
    distinct = max(1.0, float(found_I.sum()))
    lists = features.features if features is not None else {}
    values: dict[str, float] = {}
    for name, table in model.tables.items():
        offset = lists[name].offset if name in lists else None
        if table.side == "item":
            asked = distinct if offset is None else _weighted_length(offset, found_I)
            values[name] = asked / batch_size
        elif offset is None:
            values[name] = 1.0
        elif name.startswith("user."):
            values[name] = _weighted_length(offset, trained_U) / max(1, store.train_events)
        else:  # lists of the context, one per event
            values[name] = float(offset[-1]) / max(1, len(offset) - 1)
    hottest = {name: hot_shares(found_I) for name, table in model.tables.items() if table.feature == "item"}
    if "user" in model.tables:
        hottest["user"] = hot_shares(trained_U.astype(np.float64))
    # Rounded, so that a plan is not another one for its last digits on another machine.
    return Traffic(values={name: float(f"{value:.6g}") for name, value in values.items()}, hottest=hottest)


def mean_history(trained_U: NDArray[np.int64], *, model: ModelSpec, ordered: bool) -> float:
    """Items in the history of a training event on average. trained_U: [users], training events of each.

    >>> from recsys_core.models.config import HistoryConfig, TwoTowerConfig
    >>> model = ModelSpec.sized(TwoTowerConfig(history=HistoryConfig(length=2)), users=1, items=9)
    >>> mean_history(np.array([4]), model=model, ordered=True)  # 0, 1, 2, 2
    1.25
    >>> mean_history(np.array([4]), model=model, ordered=False)
    2.0
    """
    history = model.config.history
    events_U, longest = trained_U.astype(np.float64), history.length
    if ordered:
        rising = np.minimum(events_U, longest)
        total_U = rising * (rising - 1) / 2 + (events_U - rising) * longest
    else:
        others_U = events_U if history.with_target else np.maximum(events_U - 1, 0)
        total_U = events_U * np.minimum(others_U, longest)
    return float(total_U.sum() / max(1.0, events_U.sum()))


def seen_share(count_I: NDArray[np.int64], *, draws: float, negatives: int, alpha: float) -> Floats:
    """[items]: probability that a batch asks for each item at all; their sum is the expected number of distinct items.

    Args:
        count_I: training events of each item.
        draws: positives and history items of the batch, drawn in proportion to count_I.
        negatives, alpha: items drawn beside them, see `negative_share`.

    >>> seen_share(np.array([1, 1]), draws=1, negatives=0, alpha=0.0).tolist()
    [0.5, 0.5]
    >>> round(float(seen_share(np.array([1, 1, 1, 1]), draws=4, negatives=0, alpha=0.0).sum()), 4)  # 4 (1 - (3/4)^4)
    2.7344
    """
    found_I = np.empty(len(count_I))
    total = max(1, int(count_I.sum()))
    drawn_I = negative_share(count_I, alpha) if negatives else None
    for part in _parts(len(count_I)):
        # log(1 - 1) is -inf: an item that is always drawn is never missed, which is what its exponential says.
        with np.errstate(divide="ignore"):
            missed = draws * np.log1p(-count_I[part] / total)
            if drawn_I is not None:
                missed += negatives * np.log1p(-np.minimum(drawn_I[part], 1.0))
        found_I[part] = -np.expm1(missed)
    return found_I


def hot_shares(weight_R: Floats) -> tuple[float, ...]:
    """Share of the lookups that fall on the hottest 1 %, 2 %, ... 100 % of the rows. weight_R: [rows], how often each is asked.

    >>> shares = hot_shares(np.array([6.0, 0, 3, 1]))
    >>> [round(shares[percent - 1], 2) for percent in (1, 25, 50, 100)]
    [0.02, 0.6, 0.9, 1.0]
    """
    total = float(weight_R.sum())
    if total == 0:
        return tuple((1 + point) / CURVE_POINTS for point in range(CURVE_POINTS))
    rising = np.concatenate([[0.0], np.cumsum(np.sort(weight_R)[::-1])]) / total
    place = np.arange(1, CURVE_POINTS + 1) * len(weight_R) / CURVE_POINTS
    low = np.minimum(place.astype(np.int64), len(weight_R) - 1)
    shares: Floats = rising[low] + (place - low) * (rising[low + 1] - rising[low])
    return tuple(round(min(1.0, share), 6) for share in shares.tolist())


def _weighted_length(offset: NDArray[np.int64], weight: NDArray[np.int64] | Floats) -> float:
    """Sum over the lists of length times weight."""
    return sum(float(np.dot(np.diff(offset[part.start : part.stop + 1]), weight[part])) for part in _parts(len(weight)))


def _parts(rows: int) -> Iterator[slice]:
    """Pieces of a catalogue: the memory that measuring takes does not grow with it."""
    return (slice(start, min(rows, start + _AT_ONCE)) for start in range(0, rows, _AT_ONCE))
