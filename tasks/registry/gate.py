"""The gate: a version is tried in a fresh process, as it will be served, and compared with the champion on the same users.

A champion that does not load is replaced: the new version is compared with the last former champion that loads, or, where none
does, with popularity. The better one becomes champion.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from recsys_core.errors import StageError
from recsys_core.manifests import EvaluationManifest, InteractionsManifest
from tasks.registry.config import RegistryConfig
from tasks.registry.mlflow_client import LOG, persist
from tasks.registry.promotion import move_champion
from tasks.registry.releases import ALARM_TAG, BROKEN_TAG, METRICS_TAG, REASONS_TAG, SMOKE_TAG, champion_of, former_champions
from tasks.registry.smoke_test import (
    NotFetchedError,
    Trial,
    UnusableVersionError,
    answer_by_popularity,
    ask,
    find_faults,
    measure,
    prepare_trial,
)
from tasks.registry.tracking import as_metrics, log_metrics

FORMER_CHAMPIONS = 3
"""Former champions that are loaded, at most, to find one to compare with."""
_TAG_CHARACTERS = 500

T = TypeVar("T")


class Verdict(NamedTuple):
    """Whether a version becomes champion, and why.

    metrics: of all that were compared; alarm: what is wrong with the champion; restored: the new champion, a former one.
    """

    promoted: bool
    reason: str
    metrics: dict[str, float]
    alarm: str | None = None
    restored: ModelVersion | None = None


@dataclass(frozen=True)
class _Gate:
    """A version on trial, and the metrics of the others, by version number, that it was compared with."""

    version: ModelVersion
    config: RegistryConfig
    client: MlflowClient
    trial: Trial
    evaluation: EvaluationManifest
    measured: dict[str, dict[str, float]] = field(default_factory=dict)

    def mlflow(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls MLflow, again where it does not work for a while."""
        return persist(partial(call, *args, **kwargs), uri=self.client.tracking_uri)

    def set_tag(self, version: ModelVersion, name: str, value: str) -> None:
        self.mlflow(self.client.set_model_version_tag, version.name, version.version, name, value)


def pass_gate(
    version: ModelVersion,
    *,
    config: RegistryConfig,
    client: MlflowClient,
    interactions: InteractionsManifest,
    evaluation: EvaluationManifest,
    folder: Path,
) -> dict[str, Any]:
    """Tries `version`, gives it the alias it earns, and tags it with the reasons; returns fields of RegistrationManifest.

    A version that fails the smoke test is tagged so, gets no alias and raises StageError. Answers stay in `folder`.
    """
    trial = prepare_trial(interactions, users=config.smoke_users, folder=folder / "trial")
    gate = _Gate(version, config, client, trial, evaluation)
    verdict = _settle(gate, _smoke_test(gate))
    assert version.run_id is not None  # version_for makes a version from a run
    gate.mlflow(log_metrics, client, version.run_id, as_metrics(verdict.metrics))
    facts = {
        "model_name": version.name,
        "version": str(version.version),
        "alias": "champion" if verdict.promoted else "challenger",
        "promoted": verdict.promoted,
        "reasons": (verdict.reason,),
        "alarm": verdict.alarm,
        "mlflow_run_id": version.run_id,
        "metrics": verdict.metrics,
    }
    (folder / "registration.json").write_text(json.dumps(facts, indent=2))
    return facts


def judge(
    metrics: dict[str, float], *, config: RegistryConfig, other: str, name: str = "champion", margin: float | None = None
) -> Verdict:
    """Compares served/<metric> with <other>/<metric>; `name`: of the other; margin: config.margin unless given.

    >>> metrics = {"served/recall@20": 0.2, "champion/recall@20": 0.25}
    >>> judge(metrics, config=RegistryConfig(), other="champion", name="version 3").reason
    'recall@20 is 0.2000, less than 0.98 of the 0.2500 of version 3'
    """
    share = 1 - (config.margin if margin is None else margin)
    new, old = metrics[f"served/{config.metric}"], metrics[f"{other}/{config.metric}"]
    promoted = new >= old * share
    relation = "at least" if promoted else "less than"
    return Verdict(promoted, f"{config.metric} is {new:.4f}, {relation} {share:g} of the {old:.4f} of {name}", metrics)


def _settle(gate: _Gate, served: dict[str, float]) -> Verdict:
    """Gives the aliases; compares again where another version became champion during the comparison."""
    version, client = gate.version, gate.client
    while True:
        champion = gate.mlflow(champion_of, client, version.name)
        verdict = _compare(gate, served, champion=champion)
        gate.set_tag(version, METRICS_TAG, json.dumps(verdict.metrics))
        gate.set_tag(version, REASONS_TAG, verdict.reason)
        if verdict.alarm is not None:
            gate.set_tag(version, ALARM_TAG, verdict.alarm)
        heir = version if verdict.promoted else verdict.restored
        move = partial(move_champion, instead_of=champion, keep_former=verdict.alarm is None, trial_of=version)
        if heir is None or gate.mlflow(move, client, heir):
            break
        LOG.info("%s: another version became champion; version %s is compared with it", version.name, version.version)
    if not verdict.promoted:
        gate.mlflow(client.set_registered_model_alias, version.name, "challenger", version.version)
    if verdict.alarm is not None:
        LOG.error("%s: %s", version.name, verdict.alarm)
        if heir is None:
            raise StageError(f"{version.name}: {verdict.alarm}; {verdict.reason}")
    return verdict


def _compare(gate: _Gate, served: dict[str, float], *, champion: ModelVersion | None) -> Verdict:
    version = gate.version
    if champion is None:
        return Verdict(True, "there was no champion", served)
    if str(champion.version) == str(version.version):  # promoted before the run was interrupted: the first verdict holds
        tags = gate.mlflow(gate.client.get_model_version, version.name, version.version).tags
        return Verdict(True, tags[REASONS_TAG], json.loads(tags[METRICS_TAG]), tags.get(ALARM_TAG))
    try:
        metrics = served | _measure(gate, champion, name="champion")
    except UnusableVersionError as error:
        return _compare_without(gate, served, champion=champion, problem=str(error))
    return judge(metrics, config=gate.config, other="champion", name=f"version {champion.version}")


def _compare_without(gate: _Gate, served: dict[str, float], *, champion: ModelVersion, problem: str) -> Verdict:
    """The verdict where the champion does not load: against the last former champion that does, or popularity."""
    version, broken = gate.version, f"the champion, version {champion.version}, does not load ({problem})"
    for former in gate.mlflow(former_champions, gate.client, champion.name)[:FORMER_CHAMPIONS]:
        try:
            metrics = served | _measure(gate, former, name="former_champion")
        except UnusableVersionError:
            continue
        verdict = judge(metrics, config=gate.config, other="former_champion", name=f"version {former.version}")
        heir = version if verdict.promoted else former
        alarm = f"{broken}; version {heir.version} is champion instead"
        return verdict._replace(alarm=alarm, restored=None if verdict.promoted else former)
    popular_I = np.load(gate.evaluation.path("popularity.npy")).astype(np.int64)
    popular = measure(answer_by_popularity(gate.trial, popular_I=popular_I), trial=gate.trial)
    metrics = served | {f"popularity/{name}": value for name, value in popular.items()}
    verdict = judge(metrics, config=gate.config, other="popularity", name="popularity", margin=0.0)
    instead = f"version {version.version} is champion instead" if verdict.promoted else "no other version can be champion"
    return verdict._replace(alarm=f"{broken}; {instead}")


def _measure(gate: _Gate, version: ModelVersion, *, name: str) -> dict[str, float]:
    """<name>/<metric> of `version` on the trial; UnusableVersionError, and a tag of the version, if it does not load."""
    number = str(version.version)
    if number not in gate.measured:
        try:
            answers = _ask_other(gate, version)
        except UnusableVersionError as error:
            gate.set_tag(version, BROKEN_TAG, str(error)[:_TAG_CHARACTERS])
            raise
        if BROKEN_TAG in version.tags:
            gate.mlflow(gate.client.delete_model_version_tag, version.name, version.version, BROKEN_TAG)
        gate.measured[number] = measure(answers, trial=gate.trial)
    return {f"{name}/{metric}": value for metric, value in gate.measured[number].items()}


def _ask_other(gate: _Gate, version: ModelVersion) -> pa.ListArray:
    try:
        return _ask(gate, version)
    except NotFetchedError as error:
        _ask(gate, gate.version)  # raises where the reason is MLflow, and not the files of `version`
        raise UnusableVersionError(str(error)) from None


def _ask(gate: _Gate, version: ModelVersion) -> pa.ListArray:
    uri, file = f"models:/{version.name}/{version.version}", f"answers-{version.version}.parquet"
    return gate.mlflow(
        ask, gate.trial, model_uri=uri, tracking_uri=gate.client.tracking_uri, answers=gate.trial.file.with_name(file)
    )


def _smoke_test(gate: _Gate) -> dict[str, float]:
    """served/<metric> of the version. StageError if it does not answer as it must."""
    version = gate.version
    try:
        answers = _ask(gate, version)
        faults = find_faults(answers, trial=gate.trial)
        if faults:
            raise UnusableVersionError(f"models:/{version.name}/{version.version}: the smoke test found {'; '.join(faults)}")
    except UnusableVersionError as error:
        gate.set_tag(version, SMOKE_TAG, f"failed: {error}"[:_TAG_CHARACTERS])
        raise
    gate.set_tag(version, SMOKE_TAG, "passed")
    return {f"served/{name}": value for name, value in measure(answers, trial=gate.trial).items()}
