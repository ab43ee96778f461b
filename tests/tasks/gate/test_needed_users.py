"""The number of users and days that a decision needs, from small logs with known times."""

from pathlib import Path

import numpy as np
import pytest

from recsys_core.comparison.decision import Evidence
from recsys_core.comparison.rules import Comparison, Margin, PairedBootstrap
from recsys_core.dataset.events import EventStore
from recsys_core.manifests import InteractionsManifest
from recsys_core.units import DAY_US
from tasks.gate.needed_users import days_with_users, needed_users_sentences, small_margin_sentences
from tasks.gate.sample import prepare_sample
from tasks.registry.config import RegistryConfig
from tests.recsys_core.evaluation.stage_folders import write_interactions_stage
from tests.recsys_core.ingest.interaction_logs import ingest, write_log

NUM_USERS = 40


@pytest.fixture
def interactions(tmp_path: Path) -> InteractionsManifest:
    """A log of 40 users, of whom users 0 to 4 have test events.

    The last event of user 0 ends the log. The last event of another user u is u days and an hour earlier.
    """
    event_times_us = []
    for user in range(NUM_USERS):
        last_event_us = (100 - user) * DAY_US - (DAY_US // 24 if user else 0)
        event_times_us += [last_event_us - 50 * DAY_US, last_event_us]
    has_test_events = [user < 5 for user in range(NUM_USERS)]
    return write_interactions_stage(
        tmp_path / "interactions",
        train=[[0] if has_test_event else [0, 1] for has_test_event in has_test_events],
        validation=[[]] * NUM_USERS,
        test=[[2] if has_test_event else [] for has_test_event in has_test_events],
        num_items=30,
        arrays={"event_time": np.array(event_times_us, np.int64)},
        test_days=5.0,
    )


@pytest.mark.parametrize(("num_users", "days"), [(1, 1), (2, 2), (3, 3), (40, 40), (41, None)])
def test_the_smallest_number_of_days_with_enough_users_is_found(
    num_users: int, days: int | None, interactions: InteractionsManifest
) -> None:
    assert days_with_users(EventStore.open(interactions), num_users) == days


@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_days_do_not_depend_on_the_shards_of_the_event_store(num_shards: int, tmp_path: Path) -> None:
    # User u has u + 1 events, all of them 20 - u days after 1970-01-01.
    events = [(user, item, (20 - user) * DAY_US) for user in range(10) for item in range(user + 1)]
    split = {"kind": "time", "test_days": 1}
    manifest = ingest(tmp_path / "stage", write_log(tmp_path / "log.parquet", events), shards=num_shards, split=split)
    event_store = EventStore.open(manifest)
    assert [days_with_users(event_store, num_users) for num_users in (1, 2, 5, 10, 11)] == [1, 2, 5, 10, None]


def evidence_of_too_few_users(rule: Margin | PairedBootstrap, *, num_users: int, is_guardrail: bool = False) -> Evidence:
    """Return a comparison of two equal versions with fewer users than the rule needs."""
    comparison = rule.compare(np.ones(num_users), np.ones(num_users), baseline="version 1")
    assert comparison.outcome == "not_enough_data"
    return Evidence(subject="recall@20", baseline="version 1", is_guardrail=is_guardrail, comparison=comparison)


@pytest.mark.parametrize(
    ("min_users", "sentence"),
    [
        (
            12,
            "about 12 test users would be enough for a decision, as many as in the last 12 days (interactions.split.test_days: "
            "12, now 5)",
        ),
        (60, "about 60 test users would be enough for a decision, but the whole log has 40"),
    ],
    ids=["the log is large enough", "the log is too small"],
)
def test_if_users_are_missing_the_reason_names_the_needed_numbers_of_users_and_days(
    min_users: int, sentence: str, interactions: InteractionsManifest, tmp_path: Path
) -> None:
    sample = prepare_sample(interactions, max_users=9, folder=tmp_path / "sample")
    evidence = [
        evidence_of_too_few_users(Margin(min_users=min_users), num_users=5),
        evidence_of_too_few_users(Margin(min_users=99), num_users=5, is_guardrail=True),
    ]
    arguments = {"sample": sample, "interactions": interactions}
    assert needed_users_sentences(evidence, config=RegistryConfig(), **arguments) == (sentence,)
    sentences_of_small_sample = needed_users_sentences(evidence, config=RegistryConfig(smoke_test_users=9), **arguments)
    assert sentences_of_small_sample == (f"{sentence}; set registry.smoke_test_users to {min_users} or more, now 9",)
    assert needed_users_sentences(evidence[1:], config=RegistryConfig(), **arguments) == ()


def test_if_the_sample_has_fewer_users_than_the_test_split_the_reason_names_the_setting_of_the_sample(
    interactions: InteractionsManifest, tmp_path: Path
) -> None:
    sample = prepare_sample(interactions, max_users=2, folder=tmp_path / "sample")
    sentences = needed_users_sentences(
        [evidence_of_too_few_users(Margin(min_users=4), num_users=2)],
        config=RegistryConfig(smoke_test_users=2),
        sample=sample,
        interactions=interactions,
    )
    assert sentences == (
        "about 4 test users would be enough for a decision; set registry.smoke_test_users to 4 or more, now 2",
    )


def test_the_needed_users_are_enough_for_each_comparison_although_some_sampled_users_are_not_compared(
    interactions: InteractionsManifest, tmp_path: Path
) -> None:
    sample = prepare_sample(interactions, max_users=4, folder=tmp_path / "sample")
    sentences = needed_users_sentences(
        [evidence_of_too_few_users(Margin(min_users=min_users), num_users=2) for min_users in (3, 6, 4)],
        config=RegistryConfig(),
        sample=sample,
        interactions=interactions,
    )
    assert sample.num_users == 4  # two of them are compared, so that 6 compared users need 12 sampled users
    assert len(sentences) == 1 and sentences[0].startswith("about 12 test users would be enough for a decision, as many as in")


def test_the_number_of_users_that_a_bootstrap_requests_is_enough() -> None:
    rule = PairedBootstrap(num_resamples=500)

    def compare(num_users: int) -> Comparison:
        new_value_U = np.arange(num_users) % 2.0
        baseline_value_U = 1 - new_value_U  # with an equal mean, but each user has another value
        return rule.compare(new_value_U, baseline_value_U, baseline="version 1")

    comparison_of_few_users = compare(300)
    assert comparison_of_few_users.outcome == "not_enough_data" and comparison_of_few_users.num_needed_users is not None
    assert f"which needs about {comparison_of_few_users.num_needed_users:,}" in comparison_of_few_users.reason
    num_needed_users = comparison_of_few_users.num_needed_users
    comparison_of_enough_users = compare(num_needed_users + num_needed_users % 2)  # an even number, for equal means
    assert (comparison_of_enough_users.outcome, comparison_of_enough_users.num_needed_users) == ("accepted", None)
    assert comparison_of_enough_users.absolute_interval is not None
    low, high = comparison_of_enough_users.absolute_interval
    assert low < 0 < high and comparison_of_enough_users.relative_difference == 0


def test_a_margin_that_is_too_small_for_the_number_of_users_is_reported() -> None:
    generator = np.random.default_rng(0)
    baseline_hit_U = generator.random(1_000) < 0.2
    new_hit_U = baseline_hit_U | (generator.random(1_000) < 0.05)
    comparison = PairedBootstrap(num_resamples=500).compare(new_hit_U * 1.0, baseline_hit_U * 1.0, baseline="version 1")
    assert comparison.is_accepted and comparison.detectable_drop is not None and comparison.detectable_drop > 0.05
    (sentence,) = small_margin_sentences(comparison, config=RegistryConfig())
    smallest_margin_text = f"{100 * comparison.detectable_drop:.1f} %"
    assert sentence.startswith(f"with these test users, only a margin of at least {smallest_margin_text} can be tested, but")
    assert small_margin_sentences(comparison, config=RegistryConfig(gate=PairedBootstrap(max_relative_drop=0.9))) == ()
    comparison_without_margin_test = Margin().compare(new_hit_U * 1.0, baseline_hit_U * 1.0, baseline="version 1")
    assert small_margin_sentences(comparison_without_margin_test, config=RegistryConfig()) == ()
