"""The evidence of the gate, for simulated users: slices, the used-up margin, baselines, and too few users."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from recsys_core.comparison.decision import Evidence, decide, missing_evidence
from recsys_core.comparison.rules import Margin, PairedBootstrap
from recsys_core.evaluation.metrics import COMPARED_METRICS, UserMetrics
from tasks.gate.evidence import baseline_evidence, serving_evidence, version_evidence
from tasks.gate.sample import ServedMetrics
from tasks.gate.serving_loss import INDEX, PACKAGED, TRAINED
from tasks.registry.config import GuardrailsConfig, RegistryConfig

NUM_USERS = 20_000
CONFIG = RegistryConfig(gate=PairedBootstrap(num_resamples=500), guardrails=GuardrailsConfig(metrics=()))


def metrics_of(
    hit_U: np.ndarray, *, coverage: float = 0.5, cpu_ms_per_user: float = 1.0, num_bytes: int = 10**6
) -> ServedMetrics:
    """Return the metrics of a version. Every metric of user u is `hit_U[u]`. The second half of the users are heavy users."""
    user_row_U, middle = np.arange(len(hit_U)), len(hit_U) // 2

    def user_metrics(user_range: slice) -> UserMetrics:
        return UserMetrics(user_row_U[user_range], {name: hit_U[user_range].astype(np.float64) for name in COMPARED_METRICS})

    metrics_by_slice = {"light users": user_metrics(slice(0, middle)), "heavy users": user_metrics(slice(middle, None))}
    metrics_by_slice["new users"] = user_metrics(slice(0, 0))
    return ServedMetrics(user_metrics(slice(None)), metrics_by_slice, coverage, cpu_ms_per_user, num_bytes)


def hits(rate: float, *, num_users: int = NUM_USERS) -> np.ndarray:
    """Return whether each user has a hit. A user with a hit at one rate has a hit at every higher rate."""
    return np.random.default_rng(3).random(num_users) < rate


class Decision(NamedTuple):
    """A verdict on a version, and the first reason for it."""

    verdict: str
    reason: str


def decision_on(new_version: ServedMetrics, champion: ServedMetrics, *, spent_drop: float = 0.0, **settings: Any) -> Decision:
    """Return the decision on a version. spent_drop: the relative drop of earlier versions, 0.01 for 1 %."""
    config = CONFIG.model_copy(update=settings)
    verdict, reasons = decide(version_evidence(config, new_version, champion, baseline="version 7", spent_drop=spent_drop))
    return Decision(verdict, reasons[0])


def verdict_on(evidence: Sequence[Evidence]) -> str:
    """Return the verdict without its reasons."""
    verdict, _ = decide(evidence)
    return verdict


def test_a_loss_of_one_percent_is_accepted_until_earlier_losses_have_used_up_the_margin() -> None:
    new_version, champion = metrics_of(hits(0.198)), metrics_of(hits(0.2))
    assert decision_on(new_version, champion).verdict == "promoted"
    verdict, reason = decision_on(new_version, champion, spent_drop=0.045)
    assert verdict == "not_promoted" and "(margin -0.5 %" in reason


@pytest.mark.parametrize("rule", [Margin(), PairedBootstrap(num_resamples=200)], ids=lambda rule: rule.kind)
def test_thirty_runs_that_each_lose_a_little_lose_at_most_the_margin_in_total(rule: Margin | PairedBootstrap) -> None:
    """Each version is 1.5 % worse than its champion, and at least one version is promoted."""
    best_rate = champion_rate = 0.4
    spent_drop, num_promoted = 0.0, 0
    for _ in range(30):
        new_version, champion = metrics_of(hits(0.985 * champion_rate)), metrics_of(hits(champion_rate))
        config = CONFIG.model_copy(update={"gate": rule})
        evidence = version_evidence(config, new_version, champion, baseline="version 7", spent_drop=spent_drop)
        if verdict_on(evidence) == "promoted":
            spent_drop = max(0.0, spent_drop - (evidence[0].comparison.relative_difference or 0.0))
            champion_rate, num_promoted = 0.985 * champion_rate, num_promoted + 1
    assert num_promoted >= 1
    tolerance = 0.005  # the share of users with a hit deviates from the rate
    assert champion_rate >= (1 - rule.max_relative_drop) * best_rate * (1 - tolerance)


def test_a_version_that_is_worse_on_one_slice_alone_is_refused() -> None:
    hit_U = hits(0.2)
    worse_hit_U = hit_U.copy()
    worse_hit_U[NUM_USERS // 2 :] &= np.random.default_rng(1).random(NUM_USERS // 2) < 0.75  # heavy users lose a quarter
    num_lost_hits = int((hit_U ^ worse_hit_U).sum())
    light_users_without_hit = np.flatnonzero(~hit_U[: NUM_USERS // 2])
    worse_hit_U[light_users_without_hit[:num_lost_hits]] = True  # so that the recall over all users is equal
    verdict, reason = decision_on(metrics_of(worse_hit_U), metrics_of(hit_U))
    assert verdict == "not_promoted" and reason.startswith("recall@20 of heavy users is ")
    no_guardrails = GuardrailsConfig(slices=False, metrics=())
    assert decision_on(metrics_of(worse_hit_U), metrics_of(hit_U), guardrails=no_guardrails).verdict == "promoted"


def test_a_slice_with_too_few_users_is_reported_and_does_not_prevent_a_promotion() -> None:
    new_version, champion = metrics_of(hits(0.2, num_users=5_000)), metrics_of(hits(0.2, num_users=5_000))
    small_slice = {"cold items": UserMetrics(np.arange(9), {name: np.zeros(9) for name in COMPARED_METRICS})}
    new_version, champion = (version._replace(user_metrics_by_slice=small_slice) for version in (new_version, champion))
    evidence = version_evidence(CONFIG, new_version, champion, baseline="version 7", spent_drop=0)
    assert [(fact.subject, fact.comparison.outcome) for fact in evidence if fact.comparison.outcome != "accepted"] == [
        ("recall@20 of cold items", "not_enough_data")
    ]
    assert verdict_on(evidence) == "promoted"


def test_slices_with_too_few_users_do_not_make_the_other_comparisons_stricter() -> None:
    new_version, champion = metrics_of(hits(0.2, num_users=5_000)), metrics_of(hits(0.21, num_users=5_000))
    small_slices = {
        f"brand {brand}": UserMetrics(np.arange(9), {name: np.zeros(9) for name in COMPARED_METRICS}) for brand in range(50)
    }
    versions_with_small_slices = [
        version._replace(user_metrics_by_slice=version.user_metrics_by_slice | small_slices)
        for version in (new_version, champion)
    ]
    (comparisons, comparisons_with_small_slices) = (
        {fact.subject: fact.comparison for fact in version_evidence(CONFIG, *versions, baseline="version 7", spent_drop=0)}
        for versions in ([new_version, champion], versions_with_small_slices)
    )
    assert len(comparisons_with_small_slices) == len(comparisons) + 50
    assert {subject: comparisons_with_small_slices[subject] for subject in comparisons} == comparisons


def with_brand_slice(version: ServedMetrics, hit_U: np.ndarray, *, num_slice_users: int) -> ServedMetrics:
    """Return the metrics of a version whose only slice, `item.brand=red`, has the first `num_slice_users` users."""
    slice_metrics = UserMetrics(
        np.arange(num_slice_users), {name: hit_U[:num_slice_users].astype(float) for name in COMPARED_METRICS}
    )
    return version._replace(user_metrics_by_slice={"item.brand=red": slice_metrics})


def test_a_version_that_is_worse_on_one_guarded_feature_slice_alone_is_refused() -> None:
    hit_U, num_slice_users = hits(0.2), NUM_USERS // 4
    worse_hit_U = hit_U.copy()
    worse_hit_U[:num_slice_users] &= np.random.default_rng(1).random(num_slice_users) < 0.7  # the slice loses 30 % of its hits
    num_lost_hits = int((hit_U ^ worse_hit_U).sum())
    other_users_without_hit = num_slice_users + np.flatnonzero(~hit_U[num_slice_users:])
    worse_hit_U[other_users_without_hit[:num_lost_hits]] = True  # so that the recall over all users is equal
    new_version, champion = (
        with_brand_slice(metrics_of(slice_hit_U), slice_hit_U, num_slice_users=num_slice_users)
        for slice_hit_U in (worse_hit_U, hit_U)
    )
    for rule in (CONFIG.gate, Margin()):
        config = CONFIG.model_copy(update={"gate": rule})
        verdict, reasons = decide(
            version_evidence(
                config, new_version, champion, baseline="version 7", spent_drop=0, min_users_by_slice={"item.brand=red": None}
            )
        )
        assert verdict == "not_promoted" and len(reasons) == 1
        assert reasons[0].startswith("recall@20 of item.brand=red is 0.1424, ")  # about 0.7 times the rate of 0.2
        config_without_slices = config.model_copy(update={"guardrails": GuardrailsConfig(slices=False, metrics=())})
        evidence = version_evidence(config_without_slices, new_version, champion, baseline="version 7", spent_drop=0)
        assert verdict_on(evidence) == "promoted"


@pytest.mark.parametrize(
    ("num_slice_users", "min_users"),
    [(150, None), (900, 1_000), (0, None)],
    ids=["fewer than the gate needs", "fewer than the slice needs", "none"],
)
def test_a_guarded_slice_with_too_few_users_is_named_in_the_reasons(num_slice_users: int, min_users: int | None) -> None:
    champion_hit_U = hits(0.2)
    new_hit_U = champion_hit_U.copy()
    new_hit_U[: num_slice_users // 2] = False
    new_version, champion = (
        with_brand_slice(metrics_of(hit_U), hit_U, num_slice_users=num_slice_users) for hit_U in (new_hit_U, champion_hit_U)
    )
    evidence = version_evidence(
        CONFIG, new_version, champion, baseline="version 7", spent_drop=0, min_users_by_slice={"item.brand=red": min_users}
    )
    (brand_evidence,) = [fact for fact in evidence if fact.subject == "recall@20 of item.brand=red"]
    assert (brand_evidence.comparison.outcome, verdict_on(evidence)) == ("not_enough_data", "promoted")
    assert f"{num_slice_users} test users, but the gate needs at least {min_users or 200:,}" in brand_evidence.comparison.reason
    assert missing_evidence(evidence) == ("not enough data for 1 of 4 guardrails: recall@20 of item.brand=red",)


def test_a_feature_slice_may_be_compared_with_fewer_users_than_the_gate_needs() -> None:
    hit_U = hits(0.5)
    new_version, champion = (
        with_brand_slice(metrics_of(hit_U), slice_hit_U, num_slice_users=150) for slice_hit_U in (np.zeros(NUM_USERS), hit_U)
    )
    evidence = version_evidence(
        CONFIG, new_version, champion, baseline="version 7", spent_drop=0, min_users_by_slice={"item.brand=red": 100}
    )
    assert verdict_on(evidence) == "not_promoted"


def test_a_version_that_recommends_far_fewer_items_is_refused() -> None:
    verdict, reason = decision_on(metrics_of(hits(0.2), coverage=0.2), metrics_of(hits(0.2)))
    assert (verdict, reason) == ("not_promoted", "coverage@20 is 0.2000, less than 0.75 times the 0.5000 of version 7")


@pytest.mark.parametrize(
    ("num_users", "rate", "popularity_rate", "expected_verdict", "expected_words"),
    [
        (8, 0.5, 0.0, "not_enough_data", "8 test users, but the gate needs at least 200"),
        (5_000, 0.1, 0.2, "not_promoted", "of popularity (must be better; users +"),
        (5_000, 0.2, 0.1, "promoted", "of popularity"),
        (300, 0.21, 0.2, "not_enough_data", "too few for this margin"),
    ],
    ids=["too few users", "worse than popularity", "better than popularity", "too similar to popularity"],
)
def test_a_first_version_must_beat_popularity(
    num_users: int, rate: float, popularity_rate: float, expected_verdict: str, expected_words: str
) -> None:
    baseline = metrics_of(np.roll(hits(popularity_rate, num_users=num_users), num_users // 3)).user_metrics
    evidence = baseline_evidence(CONFIG, metrics_of(hits(rate, num_users=num_users)), {"popularity": baseline})
    verdict, reasons = decide(evidence)
    assert verdict == expected_verdict and expected_words in reasons[0], reasons


def test_a_first_version_that_does_not_beat_the_zero_shot_baseline_is_refused() -> None:
    baselines = {"popularity": metrics_of(hits(0.1)).user_metrics, "zero_shot": metrics_of(hits(0.25)).user_metrics}
    evidence = baseline_evidence(CONFIG, metrics_of(hits(0.2)), baselines)
    assert {fact.baseline: fact.comparison.outcome for fact in evidence} == {"popularity": "accepted", "zero-shot": "rejected"}
    verdict, reasons = decide(evidence)
    assert verdict == "not_promoted" and "of zero-shot (must be better; users +0 / -" in reasons[0]


def test_a_version_and_a_baseline_are_compared_on_their_common_users() -> None:
    new_version = metrics_of(np.ones(1_000, bool))
    baseline = UserMetrics(np.arange(600, 2_000), {name: np.zeros(1_400) for name in COMPARED_METRICS})
    (popularity_evidence,) = baseline_evidence(CONFIG, new_version, {"popularity": baseline})
    comparison = popularity_evidence.comparison
    assert (comparison.num_users, comparison.outcome) == (400, "accepted")  # users 600 to 999


@pytest.mark.parametrize(
    ("cost", "reason"),
    [
        ({"cpu_ms_per_user": 2.1}, "CPU ms per user is 2.1, more than 2 times the 1 of version 7"),
        ({"num_bytes": 3 * 10**6}, "model size in MB is 3, more than 2 times the 1 of version 7"),
    ],
    ids=["CPU time", "memory"],
)
def test_a_version_that_needs_far_more_cpu_time_or_memory_is_refused(cost: dict[str, Any], reason: str) -> None:
    new_version, champion = metrics_of(hits(0.2), **cost), metrics_of(hits(0.2))
    assert decision_on(new_version, champion) == ("not_promoted", reason)
    assert decision_on(new_version, champion, guardrails=GuardrailsConfig(max_cost_increase=3)).verdict == "promoted"


def test_a_cpu_time_that_was_too_short_to_measure_does_not_prevent_a_promotion() -> None:
    new_version = metrics_of(hits(0.2), cpu_ms_per_user=float("nan"))
    evidence = version_evidence(CONFIG, new_version, metrics_of(hits(0.2)), baseline="version 7", spent_drop=0)
    assert [fact.sentence for fact in evidence if fact.comparison.outcome == "not_enough_data" and "CPU" in fact.subject] == [
        "CPU ms per user is not compared with version 7: too few users to measure it"
    ]
    assert verdict_on(evidence) == "promoted"


def index_metrics(recall: float) -> UserMetrics:
    """Return the metrics of 1,000 queries for which the index has this recall."""
    return UserMetrics(np.arange(1_000), {"recall@100": np.full(1_000, recall)})


def test_an_index_that_misses_most_items_is_refused() -> None:
    user_metrics = metrics_of(hits(0.2)).user_metrics
    exact_metrics = {TRAINED: user_metrics, PACKAGED: user_metrics, INDEX: index_metrics(0.3)}
    verdict, reasons = decide(serving_evidence(CONFIG, metrics_of(hits(0.2)), exact_metrics))
    assert verdict == "not_promoted"
    assert reasons[0].startswith("recall@100 of the index is 0.3000, -70.0 %") and "of an exact search" in reasons[0]


@pytest.mark.parametrize(
    ("trained_rate", "packaged_rate", "served_rate", "reason"),
    [
        (0.2, 0.2, 0.15, "recall@20 with the index is 0.1524, -24.5 %"),
        (0.2, 0.15, 0.15, "recall@20 with the packaged query tower is 0.1524, -24.5 %"),
        (0.2, 0.199, 0.198, None),
    ],
    ids=["loss by the index", "loss by the query tower", "small loss"],
)
def test_a_package_is_refused_only_if_it_answers_clearly_worse_than_its_model(
    trained_rate: float, packaged_rate: float, served_rate: float, reason: str | None
) -> None:
    exact_metrics = {
        TRAINED: metrics_of(hits(trained_rate)).user_metrics,
        PACKAGED: metrics_of(hits(packaged_rate)).user_metrics,
        INDEX: index_metrics(0.9),
    }
    evidence = serving_evidence(CONFIG, metrics_of(hits(served_rate)), exact_metrics)
    verdict, reasons = decide(evidence)
    if reason is None:
        assert verdict == "promoted"
    else:
        assert verdict == "not_promoted" and reasons[0].startswith(reason), reasons


def test_a_package_without_metrics_of_an_exact_search_is_not_compared_with_its_model() -> None:
    assert serving_evidence(CONFIG, metrics_of(hits(0.2)), {}) == []
