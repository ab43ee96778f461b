"""The evidence of the gate on simulated users: slices, spent margin, baselines, and too few users."""

from typing import Any

import numpy as np
import pytest

from recsys_core.comparison.decision import decide
from recsys_core.comparison.rules import PairedBootstrap
from recsys_core.evaluation.metrics import SERVED_METRICS, UserMetrics
from tasks.gate.evidence import baseline_evidence, version_evidence
from tasks.gate.sample import ServedMetrics
from tasks.registry.config import GuardrailsConfig, RegistryConfig

NUM_USERS = 20_000
CONFIG = RegistryConfig(gate=PairedBootstrap(num_resamples=500), guardrails=GuardrailsConfig(metrics=()))


def served(hit_U: np.ndarray, *, coverage: float = 0.5) -> ServedMetrics:
    """Return the metrics of a version whose users have these hits. The second half of the users are heavy users."""
    rows, middle = np.arange(len(hit_U)), len(hit_U) // 2

    def metrics(part: slice) -> UserMetrics:
        return UserMetrics(rows[part], {name: hit_U[part].astype(np.float64) for name in SERVED_METRICS})

    slices = {"light users": metrics(slice(0, middle)), "heavy users": metrics(slice(middle, None))}
    return ServedMetrics(metrics(slice(None)), slices | {"new users": metrics(slice(0, 0))}, coverage)


def hits(rate: float, *, num_users: int = NUM_USERS) -> np.ndarray:
    """Return hits of the users: a version with a higher rate has all hits of a version with a lower rate."""
    return np.random.default_rng(3).random(num_users) < rate


def verdict(new: ServedMetrics, other: ServedMetrics, *, spent_drop: float = 0.0, **config: Any) -> tuple[str, str]:
    evidence = version_evidence(CONFIG.model_copy(update=config), new, other, label="version 7", spent_drop=spent_drop)
    name, reasons = decide(evidence)
    return name, reasons[0]


def test_a_version_that_loses_one_percent_is_promoted_until_earlier_promotions_have_used_up_the_margin() -> None:
    new, champion = served(hits(0.198)), served(hits(0.2))
    assert verdict(new, champion)[0] == "promoted"
    name, reason = verdict(new, champion, spent_drop=0.045)
    assert name == "not_promoted" and "(margin -0.5 %" in reason


def test_a_version_that_is_worse_on_one_slice_alone_is_refused() -> None:
    hit_U = hits(0.2)
    worse_U = hit_U.copy()
    worse_U[NUM_USERS // 2 :] &= np.random.default_rng(1).random(NUM_USERS // 2) < 0.75  # a quarter of heavy users' hits
    gained = np.flatnonzero(~hit_U[: NUM_USERS // 2])[: int((hit_U ^ worse_U).sum())]
    worse_U[gained] = True  # as many new hits of light users: recall over all users is equal
    name, reason = verdict(served(worse_U), served(hit_U))
    assert name == "not_promoted" and reason.startswith("recall@20 of heavy users is ")
    assert verdict(served(worse_U), served(hit_U), guardrails=GuardrailsConfig(slices=False, metrics=()))[0] == "promoted"


def test_a_slice_with_too_few_users_is_reported_and_prevents_no_promotion() -> None:
    new, champion = served(hits(0.2, num_users=5_000)), served(hits(0.2, num_users=5_000))
    small = {"cold items": UserMetrics(np.arange(9), {name: np.zeros(9) for name in SERVED_METRICS})}
    new, champion = (served._replace(users_by_slice=small) for served in (new, champion))
    evidence = version_evidence(CONFIG, new, champion, label="version 7", spent_drop=0)
    assert [(item.subject, item.comparison.outcome) for item in evidence if item.comparison.outcome != "accepted"] == [
        ("recall@20 of cold items", "not_enough_data")
    ]
    assert decide(evidence)[0] == "promoted"


def test_a_version_that_recommends_far_fewer_items_is_refused() -> None:
    name, reason = verdict(served(hits(0.2), coverage=0.2), served(hits(0.2)))
    assert (name, reason) == ("not_promoted", "coverage@20 is 0.2000, less than 0.75 times the 0.5000 of version 7")


@pytest.mark.parametrize(
    ("num_users", "rate", "popularity", "expected", "text"),
    [
        (8, 0.5, 0.0, "not_enough_data", "8 test users, but the gate needs at least 200"),
        (5_000, 0.1, 0.2, "not_promoted", "of popularity (must be better; users +"),
        (5_000, 0.2, 0.1, "promoted", "of popularity"),
        (300, 0.21, 0.2, "not_enough_data", "too few for this margin"),
    ],
)
def test_a_first_version_must_beat_popularity(num_users: int, rate: float, popularity: float, expected: str, text: str) -> None:
    baseline = served(np.roll(hits(popularity, num_users=num_users), num_users // 3)).users
    evidence = baseline_evidence(CONFIG, served(hits(rate, num_users=num_users)), {"popularity": baseline})
    name, reasons = decide(evidence)
    assert (name, text in reasons[0]) == (expected, True), reasons


def test_versions_are_compared_with_a_baseline_on_the_users_that_both_have() -> None:
    new = served(np.ones(1_000, bool))
    baseline = UserMetrics(np.arange(600, 2_000), {name: np.zeros(1_400) for name in SERVED_METRICS})
    (item,) = baseline_evidence(CONFIG, new, {"popularity": baseline})
    assert (item.comparison.num_users, item.comparison.outcome) == (400, "accepted")
