"""Sentences about the number of test users: how many users or days of events are enough for a decision or for the margin.

Shapes: U users.
"""

import math
from collections.abc import Sequence

import numpy as np

from recsys_core.comparison.decision import Evidence
from recsys_core.comparison.rules import Comparison
from recsys_core.dataset.events import EventStore
from recsys_core.errors import counted
from recsys_core.manifests import InteractionsManifest
from recsys_core.units import DAY_US
from tasks.gate.sample import UserSample
from tasks.registry.config import RegistryConfig


def needed_users_sentences(
    evidence: Sequence[Evidence], *, config: RegistryConfig, sample: UserSample, interactions: InteractionsManifest
) -> tuple[str, ...]:
    """Return a sentence with the number of test users that is enough for a decision, and the test days that have these users.

    The tuple is empty if every main comparison has enough users.
    """
    undecided_comparisons = [
        fact.comparison
        for fact in evidence
        if not fact.is_guardrail and fact.comparison.outcome == "not_enough_data" and fact.comparison.num_needed_users
    ]
    if not undecided_comparisons:
        return ()
    # Only a part of the sampled users is compared: a user whose test items are all in the history is left out.
    num_needed_users = max(
        math.ceil((comparison.num_needed_users or 0) * sample.num_users / max(1, comparison.num_users))
        for comparison in undecided_comparisons
    )
    sentence = f"about {num_needed_users:,} test users would be enough for a decision"
    store = EventStore.open(interactions)
    num_test_users = len(store.users_with_targets("test"))
    if num_needed_users > num_test_users and interactions.test_days is not None and store.has_times:
        num_days = days_with_users(store, num_needed_users)
        setting_text = f"interactions.split.test_days: {num_days}, now {interactions.test_days:g}"
        if num_days is None:
            sentence += f", but the whole log has {int(np.sum(store.event_count_U > 0)):,}"
        else:
            sentence += f", as many as in the last {counted(num_days, 'day')} ({setting_text})"
    if num_needed_users > config.smoke_test_users:
        sentence += f"; set registry.smoke_test_users to {num_needed_users:,} or more, now {config.smoke_test_users:,}"
    return (sentence,)


def days_with_users(store: EventStore, num_users: int) -> int | None:
    """Return the number of newest days in which `num_users` users have an event; None if the log has fewer users."""
    newest_time_U = store.newest_times()
    if num_users > len(newest_time_U):
        return None
    start_time_us = np.partition(newest_time_U, len(newest_time_U) - num_users)[len(newest_time_U) - num_users]
    return int((newest_time_U.max() - start_time_us) // DAY_US) + 1


def small_margin_sentences(comparison: Comparison, *, config: RegistryConfig) -> tuple[str, ...]:
    """Return a sentence if a comparison has too few users for the margin of the gate; otherwise an empty tuple."""
    detectable_drop, margin = comparison.detectable_drop, config.gate.max_relative_drop
    if detectable_drop is None or not margin < detectable_drop < math.inf:
        return ()
    return (
        f"with these test users, only a margin of at least {100 * detectable_drop:.1f} % can be tested, but "
        f"registry.gate.max_relative_drop is {100 * margin:g} %; with more test users, the gate rejects fewer "
        "versions that are as good as the champion",
    )
