"""Champion gate: smoke test of a new version, comparison with the champion on the same users, promotion.

1. Smoke test: the new version recommends items to a sample of test users in a fresh process, as it will be served.
2. Comparison: the champion recommends items to the same users. The new version is promoted unless `registry.metric` dropped by
   more than `registry.gate` allows.
3. Fallback: if the champion does not load, the new version is compared with the last former champion that loads, and the winner
   becomes champion. If no former champion loads either, the new version must be at least as good as popularity.
4. Promotion: the winner gets the alias `champion`. A new version that does not win gets `challenger`. `RunOptions.promote` can
   override the comparison.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from mlflow.entities.model_registry import ModelVersion

from recsys_core.comparison.rules import Margin, Rule
from recsys_core.errors import StageError
from recsys_core.evaluation.metrics import UserMetrics
from recsys_core.manifests import EvaluationManifest
from tasks.gate.smoke_test import (
    ModelProcess,
    UnusableVersionError,
    prepare_sample,
    recommend_popular,
    user_metrics,
)
from tasks.gate.version_tester import VersionTester
from tasks.registry.config import RegistryConfig
from tasks.registry.mlflow_client import LOG, RUN_REASON_TAG
from tasks.registry.registry import Registry
from tasks.registry.releases import (
    ALARM_TAG,
    MAX_FORMER_CHAMPIONS,
    METRICS_TAG,
    PROMOTE_TAG,
    REASONS_TAG,
)
from tasks.registry.tracking import as_metrics, log_metrics
from tasks.runs.context import StageContext
from tasks.runs.options import RunOptions


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison.

    Attributes:
        is_promoted: whether the new version becomes champion.
        reason: the comparison in one sentence.
        metrics: metrics of all compared versions, as <served | champion | former_champion | popularity>/<metric>.
        alarm: error of a champion that does not load, and the version that replaces it; None if the champion loads.
        reinstated_champion: the former champion that becomes champion again, if any.
    """

    is_promoted: bool
    reason: str
    metrics: dict[str, float]
    alarm: str | None = None
    reinstated_champion: ModelVersion | None = None


@dataclass(frozen=True)
class _Gate:
    """The new version, with the settings, the registry and the tester for its comparison."""

    version: ModelVersion
    config: RegistryConfig
    options: RunOptions
    registry: Registry
    tester: VersionTester
    evaluation: EvaluationManifest


def run_champion_gate(
    version: ModelVersion,
    *,
    config: RegistryConfig,
    context: StageContext,
    registry: Registry,
    processes: list[ModelProcess],
    folder: Path,
) -> dict[str, Any]:
    """Test `version`, compare it with the champion, set its alias and its tags; return the fields of RegistrationManifest.

    Args:
        context: its option `promote` is the rule of the promotion, and `reason` becomes a tag of the version.
        processes: processes of `start_processes` for the first versions that are tested.
        folder: receives the users of the smoke test and each version's recommendations.

    Raises:
        StageError: the version failed the smoke test, or no version can be champion.
    """
    options, smoke_test_folder = context.options, folder / "smoke_test"
    sample = prepare_sample(context.dataset.interactions, max_users=config.smoke_test_users, folder=smoke_test_folder)
    tester = VersionTester(registry, sample, context.run.workspace, processes)
    gate = _Gate(version, config, options, registry, tester, context.results[EvaluationManifest])
    registry.set_tag(version, PROMOTE_TAG, options.promote)
    if options.reason:
        registry.set_tag(version, RUN_REASON_TAG, options.reason)
    verdict = _compare_and_promote(gate, tester.smoke_test(version))
    assert version.run_id is not None  # get_or_create_version creates every version from an MLflow run
    registry.call(log_metrics, registry.client, version.run_id, as_metrics(verdict.metrics))
    registration_fields = {
        "model_name": version.name,
        "version": str(version.version),
        "alias": "champion" if verdict.is_promoted else "challenger",
        "promoted": verdict.is_promoted,
        "reasons": (verdict.reason,),
        "promote": options.promote,
        "run_reason": options.reason,
        "alarm": verdict.alarm,
        "mlflow_run_id": version.run_id,
        "metrics": verdict.metrics,
    }
    (folder / "registration.json").write_text(json.dumps(registration_fields, indent=2))
    return registration_fields


def _compare_and_promote(gate: _Gate, new_metrics: UserMetrics) -> Verdict:
    """Compare the new version with the champion and set the aliases.

    If another run promotes its version during the comparison, repeat the comparison with the new champion.
    """
    version, registry = gate.version, gate.registry
    while True:
        champion = registry.champion()
        verdict = _decide(gate, new_metrics, champion=champion)
        registry.set_tag(version, METRICS_TAG, json.dumps(verdict.metrics))
        registry.set_tag(version, REASONS_TAG, verdict.reason)
        if verdict.alarm is not None:
            registry.set_tag(version, ALARM_TAG, verdict.alarm)
        winner = version if verdict.is_promoted else verdict.reinstated_champion
        # A champion that does not load is not marked as a former champion, because the gate could not fall back on it.
        if winner is None or registry.move_champion(
            winner, expected=champion, reason=verdict.reason, mark_as_former=verdict.alarm is None
        ):
            break
        LOG.info("%s: another version became champion; version %s is compared with it", version.name, version.version)
    if not verdict.is_promoted:
        registry.move_challenger(version, reason=verdict.reason)
    elif "challenger" in registry.version(version.version).aliases:
        # An earlier start of the run did not promote the version, but this start has another `promote`.
        registry.move_challenger(None, reason=verdict.reason)
    if verdict.alarm is not None:
        LOG.error("%s: %s", version.name, verdict.alarm)
        if winner is None and gate.options.promote == "by_gate":
            raise StageError(f"{version.name}: {verdict.alarm}; {verdict.reason}")
    return verdict


def _decide(gate: _Gate, new_metrics: UserMetrics, *, champion: ModelVersion | None) -> Verdict:
    """Compare the new version, whose metrics are `new_metrics`, with the champion, and apply `promote` to the result."""
    version = gate.version
    if champion is not None and str(champion.version) == str(version.version):
        # The run was interrupted after the promotion and resumed: repeat the first verdict.
        tags = gate.registry.version(version.version).tags
        return Verdict(True, tags[REASONS_TAG], json.loads(tags[METRICS_TAG]), tags.get(ALARM_TAG))
    verdict = _compare(gate, new_metrics, champion=champion)
    match gate.options.promote:
        case "never":
            verdict = replace(
                verdict, is_promoted=False, reinstated_champion=None, reason=f"promote is never; {verdict.reason}"
            )
        case "force":
            reason = f"promotion was forced ({gate.options.reason}); {verdict.reason}"
            verdict = replace(verdict, is_promoted=True, reinstated_champion=None, reason=reason)
    if verdict.alarm is None:
        return verdict
    winner = version if verdict.is_promoted else verdict.reinstated_champion
    outcome = "no other version becomes champion" if winner is None else f"version {winner.version} is champion instead"
    return replace(verdict, alarm=f"{verdict.alarm}; {outcome}")


def _compare(gate: _Gate, new_metrics: UserMetrics, *, champion: ModelVersion | None) -> Verdict:
    """Compare the new version with the champion or, if the champion does not load, with a former champion or popularity."""
    if champion is None:
        return Verdict(True, "there was no champion", new_metrics.means("served"))
    try:
        champion_metrics = gate.tester.measure(champion, control_version=gate.version)
    except UnusableVersionError as error:
        verdict = _compare_with_former_champion(gate, new_metrics) or _compare_with_popularity(gate, new_metrics)
        return replace(verdict, alarm=f"the champion, version {champion.version}, does not load ({error})")
    return _judge(gate, new_metrics, champion_metrics, baseline="champion", baseline_label=f"version {champion.version}")


def _compare_with_former_champion(gate: _Gate, new_metrics: UserMetrics) -> Verdict | None:
    """Compare with the last former champion that loads; return None if none of them loads. The winner becomes champion."""
    for former_champion in gate.registry.former_champions()[:MAX_FORMER_CHAMPIONS]:
        try:
            former_metrics = gate.tester.measure(former_champion, control_version=gate.version)
        except UnusableVersionError:
            continue
        label = f"version {former_champion.version}"
        verdict = _judge(gate, new_metrics, former_metrics, baseline="former_champion", baseline_label=label)
        return verdict if verdict.is_promoted else replace(verdict, reinstated_champion=former_champion)
    return None


def _compare_with_popularity(gate: _Gate, new_metrics: UserMetrics) -> Verdict:
    """Compare with popularity. A version that is worse than popularity is not promoted."""
    popular_item_I = np.load(gate.evaluation.path("popularity.npy")).astype(np.int64)
    answers = recommend_popular(gate.tester.sample, popular_item_I=popular_item_I)
    metrics = user_metrics(answers, sample=gate.tester.sample)
    no_drop = Margin(max_relative_drop=0)
    return _judge(gate, new_metrics, metrics, baseline="popularity", baseline_label="popularity", rule=no_drop)


def _judge(
    gate: _Gate,
    new: UserMetrics,
    other: UserMetrics,
    *,
    baseline: str,
    baseline_label: str,
    rule: Rule | None = None,
) -> Verdict:
    """Apply the rule of the config, or `rule`, to the metric of the config. Both versions have answered for the same users.

    Args:
        baseline: first part of the keys of the other metrics.
        baseline_label: name of the baseline in the reason.
    """
    metric = gate.config.metric
    comparison = (rule or gate.config.gate).compare(
        new.value_U_by_metric[metric], other.value_U_by_metric[metric], baseline=baseline_label
    )
    metrics = new.means("served") | other.means(baseline)
    return Verdict(comparison.is_accepted, f"{metric} is {comparison.reason}", metrics)
