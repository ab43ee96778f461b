"""The expected number of distinct items in a batch of a log that does not exist yet, with Zipf's law."""

import numpy as np


def num_distinct_items(num_items: int, *, num_draws: float, num_negatives: int, exponent: float) -> float:
    """Return the expected number of distinct items in a batch of `num_draws` Zipf draws and `num_negatives` uniform draws.

    The probabilities of the 1,000 most popular items are added up one by one. Those of the other items are integrated over
    4,000 intervals of the popularity rank, so a catalogue of 10^9 items needs no array of that size.

    >>> num_distinct_items(1, num_draws=5, num_negatives=0, exponent=1.0)
    1.0
    >>> round(num_distinct_items(2, num_draws=2, num_negatives=0, exponent=0.0), 6)  # 2 (1 - (1/2)^2)
    1.5
    """
    head_ranks = np.arange(1, min(num_items, 1000) + 1, dtype=np.float64)
    interval_bounds = np.geomspace(1000.5, num_items + 0.5, 4001) if num_items > 1000 else np.empty(0)
    interval_middles = np.sqrt(interval_bounds[1:] * interval_bounds[:-1])
    popularity_rank = np.concatenate([head_ranks, interval_middles])
    num_items_of_interval = np.concatenate([np.ones_like(head_ranks), np.diff(interval_bounds)])
    draw_probability = popularity_rank**-exponent
    draw_probability /= (draw_probability * num_items_of_interval).sum()
    with np.errstate(divide="ignore"):  # log1p(-1) is -inf for the only item
        log_miss_probability = num_draws * np.log1p(-draw_probability)
        if num_negatives:
            log_miss_probability += num_negatives * np.log1p(-1 / num_items)
    return float((num_items_of_interval * -np.expm1(log_miss_probability)).sum())
