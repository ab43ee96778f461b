"""The distinct items of a batch with Zipf's law, compared with a count over all items."""

import numpy as np
import pytest

from recsys_core.estimates.distinct_items import num_distinct_items
from recsys_core.sharding.lookup_stats import lookup_probability


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.2])
def test_distinct_items_of_a_zipf_law_equal_a_count_over_all_items(exponent: float) -> None:
    items, draws, negatives = 20_000, 5_000, 300
    count_I = np.rint(1e12 * np.arange(1, items + 1, dtype=np.float64) ** -exponent).astype(np.int64)
    counted = lookup_probability(count_I, num_draws=draws, num_negatives=negatives, alpha=0.0).sum()
    assert num_distinct_items(items, num_draws=draws, num_negatives=negatives, exponent=exponent) == pytest.approx(
        counted, rel=0.005
    )
