"""Champion gate: smoke test of a new version, comparison with the champion on the same users, promotion.

1. Smoke test: the new version recommends items to a sample of test users in a fresh process, as it will be served.
2. Comparison: the champion recommends items to the same users. The rule `registry.gate` compares `registry.metric`, and the
   guardrails compare other metrics, slices, the coverage and the costs. The version must also beat popularity, and its
   package must answer about as well as an exact search with the trained model.
3. Fallback: if the champion does not load, the new version is compared with the last former champion that loads, and the winner
   becomes champion. If there is no champion, the new version must beat all baselines.
4. Promotion: the winner gets the alias `champion`. A new version that does not win gets `challenger`. `RunOptions.promote` can
   override the comparison.

Shapes: U users of the sample.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlflow.entities.model_registry import ModelVersion

from recsys_core.comparison.decision import ALARM_E_VALUE, Evidence, Verdict, decide, e_value, missing_evidence, write_evidence
from recsys_core.errors import StageError
from recsys_core.evaluation.config import FeatureSlice
from recsys_core.evaluation.metrics import USER_METRICS_FILE, UserMetrics, read_user_metrics
from recsys_core.manifests import EvaluationManifest, InteractionsManifest
from tasks.gate.evidence import baseline_evidence, serving_evidence, version_evidence
from tasks.gate.needed_users import needed_users_sentences, small_margin_sentences
from tasks.gate.sample import ServedMetrics, prepare_sample
from tasks.gate.serving_loss import exact_metrics, mean_metrics
from tasks.gate.smoke_test import ModelProcess, UnusableVersionError
from tasks.gate.version_tester import VersionTester
from tasks.registry.config import RegistryConfig
from tasks.registry.mlflow_client import LOG, RUN_REASON_TAG
from tasks.registry.registry import Registry, version_number_text
from tasks.registry.releases import (
    CHALLENGERS_TAG,
    CHAMPION_ERROR_TAG,
    COUNTED_BY_TAG,
    MANUAL_CHANGE_TAG,
    MAX_FORMER_CHAMPIONS,
    METRICS_TAG,
    PROMOTE_TAG,
    REASONS_TAG,
    REFIT_OF_TAG,
    SPENT_DROP_TAG,
    current_person,
)
from tasks.registry.tracking import as_metrics, log_metrics
from tasks.runs.context import RunOptions, StageContext


@dataclass(frozen=True)
class Decision:
    """Result of the comparison.

    Attributes:
        verdict: whether the new version becomes champion.
        reasons: the reasons, each in one sentence, the most important one first.
        metrics: mean metrics of the compared versions, such as `served/recall@20` of the new version and
            `champion/recall@20`, and of `exact_metrics`.
        evidence: the comparisons of metrics and costs, with their outcomes.
        spent_drop: relative drop of the metric from the best champion so far to the new version. If the new version becomes
            champion, this drop reduces the margin of later versions.
        alarm: why the champion does not load, and which version replaces it; None if there is no such problem.
        reinstated_champion: the former champion that becomes champion again, if any.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    metrics: dict[str, float]
    evidence: tuple[Evidence, ...] = ()
    spent_drop: float = 0.0
    alarm: str | None = None
    reinstated_champion: ModelVersion | None = None

    @property
    def is_promoted(self) -> bool:
        """Whether the new version becomes champion."""
        return self.verdict == "promoted"


@dataclass(frozen=True)
class _Gate:
    """The new version, with the settings, the registry and the tester for its comparison."""

    version: ModelVersion
    config: RegistryConfig
    options: RunOptions
    registry: Registry
    tester: VersionTester
    interactions: InteractionsManifest
    metrics_by_baseline: Mapping[str, UserMetrics]
    exact_metrics: Mapping[str, UserMetrics]


def run_champion_gate(
    version: ModelVersion,
    *,
    config: RegistryConfig,
    context: StageContext,
    registry: Registry,
    process: ModelProcess,
    folder: Path,
    feature_slices: Sequence[FeatureSlice] = (),
) -> dict[str, Any]:
    """Test `version`, compare it with the champion, set its alias and tags, and return the fields of RegistrationManifest.

    Args:
        context: context of the stage. Its option `promote` decides whether the comparison counts, and its option `reason`
            becomes a tag of the version.
        folder: gets the users of the smoke test and each version's recommendations.
        feature_slices: slices by features, on which the version is compared too.

    Raises:
        StageError: the version failed the smoke test, or no version can be champion.
    """
    options, smoke_test_folder = context.options, folder / "smoke_test"
    sample = prepare_sample(
        context.dataset.interactions,
        max_users=config.smoke_test_users,
        folder=smoke_test_folder,
        features=context.dataset.features,
        feature_slices=feature_slices,
    )
    tester = VersionTester(registry, sample, context.run.workspace, process)
    user_metrics_file = context.results[EvaluationManifest].path(USER_METRICS_FILE)
    metrics_by_baseline = read_user_metrics(user_metrics_file, user_rows=sample.user_row_U)
    registry.set_tag(version, PROMOTE_TAG, options.promote)
    if options.reason:
        registry.set_tag(version, RUN_REASON_TAG, options.reason)
    new_metrics = tester.smoke_test(version)
    interactions = context.dataset.interactions
    gate = _Gate(version, config, options, registry, tester, interactions, metrics_by_baseline, exact_metrics(context, sample))
    decision = _compare_and_promote(gate, new_metrics)
    assert version.run_id is not None  # get_or_create_version creates every version from an MLflow run
    registry.call(log_metrics, registry.client, version.run_id, as_metrics(decision.metrics))
    registration_fields = _registration_fields(version, decision, options)
    (folder / "registration.json").write_text(json.dumps(registration_fields, indent=2))
    write_evidence(decision.evidence, folder)
    return registration_fields


def _registration_fields(version: ModelVersion, decision: Decision, options: RunOptions) -> dict[str, Any]:
    """Return the fields of RegistrationManifest, by name."""
    return {
        "model_name": version.name,
        "version": str(version.version),
        "alias": "champion" if decision.is_promoted else "challenger",
        "promoted": decision.is_promoted,
        "has_enough_data": decision.verdict != "not_enough_data",
        "reasons": decision.reasons,
        "promote": options.promote,
        "run_reason": options.reason,
        "alarm": decision.alarm,
        "mlflow_run_id": version.run_id,
        "metrics": decision.metrics,
    }


def _compare_and_promote(gate: _Gate, new_metrics: ServedMetrics) -> Decision:
    """Compare the new version with the champion and set the aliases.

    If another run or a person changes the champion during the comparison, repeat the comparison with the new champion.
    """
    version, registry = gate.version, gate.registry
    while True:
        champion = registry.champion()
        decision = _decide(gate, new_metrics, champion=champion)
        reason = "; ".join(decision.reasons)
        registry.set_tag(version, METRICS_TAG, json.dumps(decision.metrics))
        registry.set_tag(version, REASONS_TAG, reason)
        registry.set_tag(version, SPENT_DROP_TAG, f"{decision.spent_drop:.6f}")
        if decision.alarm is not None:
            registry.set_tag(version, CHAMPION_ERROR_TAG, decision.alarm)
        winner = version if decision.is_promoted else decision.reinstated_champion
        if winner is None:
            is_champion_unchanged = version_number_text(registry.champion()) == version_number_text(champion)
        else:
            # A champion that does not load is not marked as a former champion, because the gate could not fall back on it.
            is_champion_unchanged = registry.move_champion(
                winner, expected_champion=champion, reason=reason, mark_as_former=decision.alarm is None
            )
        if is_champion_unchanged:
            break
        LOG.info("%s: another version became champion; version %s is compared with it", version.name, version.version)
    if champion is not None and winner is None and decision.evidence and decision.alarm is None:
        decision = _watch_champion(gate, champion, decision)
    if not decision.is_promoted:
        registry.move_challenger(version, reason=reason)
    elif "challenger" in registry.version(version.version).aliases:
        # An earlier start of the run, with another `promote`, made this version challenger. Now the version is champion.
        registry.move_challenger(None, reason=reason)
    if decision.alarm is not None:
        LOG.error("%s: %s", version.name, decision.alarm)
        if winner is None and gate.options.promote == "by_gate":
            raise StageError(f"{version.name}: {decision.alarm}; {reason}")
    return decision


def _watch_champion(gate: _Gate, champion: ModelVersion, decision: Decision) -> Decision:
    """Update the evidence against the champion, and add a reason to the decision if the evidence reaches ALARM_E_VALUE.

    The evidence is the product of the e-values of all versions that lost to the champion, and is stored in a tag of the
    champion. A resumed run does not update the tag twice.
    """
    registry, champion_number = gate.registry, str(champion.version)
    e_value_product = float(champion.tags.get(CHALLENGERS_TAG, 1))
    if registry.version(gate.version.version).tags.get(COUNTED_BY_TAG) != champion_number:
        comparison = decision.evidence[0].comparison
        e_value_product *= e_value(comparison.num_better_users, comparison.num_worse_users)
        registry.set_tag(champion, CHALLENGERS_TAG, f"{e_value_product:.4g}")
        registry.set_tag(gate.version, COUNTED_BY_TAG, champion_number)
    if e_value_product < ALARM_E_VALUE:
        return decision
    warning = (
        f"version {champion.version} has been losing to versions that were not promoted: they are better for more users "
        f"(evidence {e_value_product:.3g}, reported from {ALARM_E_VALUE:g})"
    )
    LOG.warning("%s: %s", champion.name, warning)
    return replace(decision, reasons=(*decision.reasons, warning))


def _decide(gate: _Gate, new_metrics: ServedMetrics, *, champion: ModelVersion | None) -> Decision:
    """Compare the new version with the champion, and apply the option `promote` to the decision."""
    version = gate.version
    if champion is not None and str(champion.version) == str(version.version):
        return _earlier_decision(gate, new_metrics)
    decision = _compare_with_champion(gate, new_metrics, champion=champion)
    match gate.options.promote:
        case "never":
            reasons = ("; ".join(["promote is never", *decision.reasons]),)
            decision = replace(decision, verdict="not_promoted", reinstated_champion=None, reasons=reasons)
        case "force":
            reasons = ("; ".join([f"promotion was forced by {current_person()} ({gate.options.reason})", *decision.reasons]),)
            decision = replace(decision, verdict="promoted", reinstated_champion=None, reasons=reasons, spent_drop=0.0)
    if decision.alarm is None:
        return decision
    winner = version if decision.is_promoted else decision.reinstated_champion
    outcome_text = "no other version becomes champion" if winner is None else f"version {winner.version} is champion instead"
    return replace(decision, alarm=f"{decision.alarm}; {outcome_text}")


def _earlier_decision(gate: _Gate, new_metrics: ServedMetrics) -> Decision:
    """Return the decision that has made the new version the champion.

    Either this run was interrupted after the promotion and resumed, or a person has promoted the version.
    """
    tags = gate.registry.version(gate.version.version).tags
    reasons = [tags[REASONS_TAG]] if REASONS_TAG in tags else []
    manual_change = tags.get(MANUAL_CHANGE_TAG)
    if not reasons or (manual_change is not None and manual_change not in reasons[0]):
        reasons.insert(0, "the champion was changed by hand" + (f": {manual_change}" if manual_change else ""))
    return Decision(
        "promoted",
        tuple(reasons),
        json.loads(tags[METRICS_TAG]) if METRICS_TAG in tags else new_metrics.user_metrics.means("served"),
        spent_drop=float(tags.get(SPENT_DROP_TAG, 0)),
        alarm=tags.get(CHAMPION_ERROR_TAG),
    )


def _compare_with_champion(gate: _Gate, new_metrics: ServedMetrics, *, champion: ModelVersion | None) -> Decision:
    """Compare the new version with the champion or, if the champion does not load, with a former champion or baselines."""
    if champion is None:
        return _compare_with_baselines(gate, new_metrics, situation="there was no champion")
    try:
        champion_metrics = gate.tester.measure(champion, control_version=gate.version)
    except UnusableVersionError as error:
        decision = _compare_with_former_champion(gate, new_metrics) or _compare_with_baselines(
            gate, new_metrics, situation="no former champion loads"
        )
        return replace(decision, alarm=f"the champion, version {champion.version}, does not load ({error})")
    refitted_number = champion.tags.get(REFIT_OF_TAG)
    if refitted_number is None:
        return _compare_with_version(gate, new_metrics, champion, champion_metrics, role="champion")
    # A refit may have been trained on the test events of this run, so the refitted version is measured instead.
    compared_version, compared_metrics = champion, champion_metrics
    reason = (
        f"the champion, version {champion.version}, may have been trained on the test events: it is the refit of version "
        f"{refitted_number}"
    )
    refitted_version = next((version for version in gate.registry.versions() if str(version.version) == refitted_number), None)
    try:
        if refitted_version is None:
            reason += ", which is not in the registry any more"
        else:
            compared_metrics = gate.tester.measure(refitted_version, control_version=gate.version)
            compared_version = refitted_version
    except UnusableVersionError as error:
        reason += f", which does not load ({error})"
    decision = _compare_with_version(gate, new_metrics, compared_version, compared_metrics, role="champion")
    metrics = decision.metrics | champion_metrics.user_metrics.means("refit")
    return replace(decision, reasons=(*decision.reasons, reason), metrics=metrics)


def _compare_with_former_champion(gate: _Gate, new_metrics: ServedMetrics) -> Decision | None:
    """Compare with the last former champion that loads; return None if none loads. The better version becomes champion."""
    for former_champion in gate.registry.former_champions()[:MAX_FORMER_CHAMPIONS]:
        try:
            former_metrics = gate.tester.measure(former_champion, control_version=gate.version)
        except UnusableVersionError:
            continue
        decision = _compare_with_version(gate, new_metrics, former_champion, former_metrics, role="former_champion")
        return decision if decision.is_promoted else replace(decision, reinstated_champion=former_champion)
    return None


def _compare_with_version(
    gate: _Gate, new_metrics: ServedMetrics, other_version: ModelVersion, other_metrics: ServedMetrics, *, role: str
) -> Decision:
    """Compare with another version, whose metrics get the keys `<role>/<metric>` in the decision."""
    spent_drop = float(other_version.tags.get(SPENT_DROP_TAG, 0))
    evidence = version_evidence(
        gate.config,
        new_metrics,
        other_metrics,
        baseline=f"version {other_version.version}",
        spent_drop=spent_drop,
        min_users_by_slice=gate.tester.sample.min_users_by_slice,
    )
    popularity_metrics = {name: metrics for name, metrics in gate.metrics_by_baseline.items() if name == "popularity"}
    evidence += baseline_evidence(gate.config, new_metrics, popularity_metrics)
    evidence += serving_evidence(gate.config, new_metrics, gate.exact_metrics)
    verdict, reasons = _verdict_with_reasons(gate, evidence, has_other_version=True)
    if other_metrics.num_unknown:
        reasons = (
            *reasons,
            f"version {other_version.version} was trained on another catalogue: {other_metrics.num_unknown:,} of "
            f"{other_metrics.num_recommended:,} recommendations are items that this run does not have, and are left out of its "
            "lists",
        )
    total_drop = spent_drop - (evidence[0].comparison.relative_difference or 0.0)
    return Decision(
        verdict,
        reasons,
        new_metrics.user_metrics.means("served") | other_metrics.user_metrics.means(role) | mean_metrics(gate.exact_metrics),
        tuple(evidence),
        spent_drop=max(0.0, total_drop),
    )


def _verdict_with_reasons(
    gate: _Gate, evidence: Sequence[Evidence], *, has_other_version: bool
) -> tuple[Verdict, tuple[str, ...]]:
    """Return the verdict and its reasons, with sentences about comparisons that have too few users.

    Args:
        has_other_version: whether the first comparison is with another version. If so, a promotion has only the reason of this
            comparison, and a sentence if the test users are too few for the margin.
    """
    verdict, reasons = decide(evidence)
    match verdict:
        case "promoted":
            if not has_other_version:
                return verdict, (*reasons, *missing_evidence(evidence))
            margin_sentences = small_margin_sentences(evidence[0].comparison, config=gate.config)
            return verdict, (reasons[0], *missing_evidence(evidence), *margin_sentences)
        case "not_enough_data":
            sample = gate.tester.sample
            return verdict, (
                *reasons,
                *needed_users_sentences(evidence, config=gate.config, sample=sample, interactions=gate.interactions),
            )
        case "not_promoted":
            return verdict, reasons


def _compare_with_baselines(gate: _Gate, new_metrics: ServedMetrics, *, situation: str) -> Decision:
    """Compare with the baselines of the config. Without a champion, the new version must beat each baseline."""
    evidence = baseline_evidence(gate.config, new_metrics, gate.metrics_by_baseline)
    evidence += serving_evidence(gate.config, new_metrics, gate.exact_metrics)
    verdict, reasons = _verdict_with_reasons(gate, evidence, has_other_version=False)
    reasons = (situation, *reasons) if verdict == "promoted" else (*reasons, situation)
    return Decision(
        verdict, reasons, new_metrics.user_metrics.means("served") | mean_metrics(gate.exact_metrics), tuple(evidence)
    )
