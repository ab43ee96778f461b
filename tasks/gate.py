"""The gate: a version is tried in a fresh process, as it will be served, and compared with the champion on the same users."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from recsys_core.errors import StageError
from recsys_core.manifests import InteractionsManifest
from tasks.config import RegistryConfig
from tasks.registry import METRICS_TAG, REASONS_TAG, SMOKE_TAG, champion_of
from tasks.tracking import as_metrics, log_metrics
from tasks.trial import Trial, ask, find_faults, measure, prepare_trial


class Verdict(NamedTuple):
    """Whether a version becomes champion, and why."""

    promoted: bool
    reason: str


def pass_gate(
    version: ModelVersion, *, config: RegistryConfig, client: MlflowClient, interactions: InteractionsManifest, folder: Path
) -> dict[str, Any]:
    """Tries `version`, gives it the alias it earns, and tags it with the reasons; returns fields of RegistrationManifest.

    A version that does not pass the smoke test is tagged so, gets no alias, and raises StageError. Questions and answers stay
    in `folder`.
    """
    trial = prepare_trial(interactions, users=config.smoke_users, folder=folder / "trial")
    served = {f"served/{name}": value for name, value in _smoke_test(version, trial=trial, client=client).items()}
    verdict, metrics = _compare(version, served, config=config, client=client, trial=trial)
    alias = "champion" if verdict.promoted else "challenger"
    client.set_model_version_tag(version.name, version.version, METRICS_TAG, json.dumps(metrics))
    client.set_model_version_tag(version.name, version.version, REASONS_TAG, verdict.reason)
    client.set_registered_model_alias(version.name, alias, version.version)
    assert version.run_id is not None  # version_for makes a version from a run
    log_metrics(client, version.run_id, as_metrics(metrics))
    facts = {
        "model_name": version.name,
        "version": str(version.version),
        "alias": alias,
        "promoted": verdict.promoted,
        "reasons": (verdict.reason,),
        "mlflow_run_id": version.run_id,
        "metrics": metrics,
    }
    (folder / "registration.json").write_text(json.dumps(facts, indent=2))
    return facts


def judge(metrics: dict[str, float], *, config: RegistryConfig, champion: str) -> Verdict:
    """Compares served/<metric> with champion/<metric>.

    >>> judge({"served/recall@20": 0.2, "champion/recall@20": 0.25}, config=RegistryConfig(), champion="version 3")
    Verdict(promoted=False, reason='recall@20 is 0.2000, less than 0.98 of the 0.2500 of version 3')
    """
    new, old = metrics[f"served/{config.metric}"], metrics[f"champion/{config.metric}"]
    promoted = new >= old * (1 - config.margin)
    relation = "at least" if promoted else "less than"
    return Verdict(promoted, f"{config.metric} is {new:.4f}, {relation} {1 - config.margin:g} of the {old:.4f} of {champion}")


def _compare(
    version: ModelVersion, served: dict[str, float], *, config: RegistryConfig, client: MlflowClient, trial: Trial
) -> tuple[Verdict, dict[str, float]]:
    champion = champion_of(client, config.model_name)
    if champion is None:
        return Verdict(True, "there was no champion"), served
    if str(champion.version) == str(
        version.version
    ):  # promoted before the run was interrupted: what was found then still holds
        return Verdict(True, version.tags[REASONS_TAG]), json.loads(version.tags[METRICS_TAG])
    uri = f"models:/{champion.name}/{champion.version}"
    try:
        answers = ask(
            trial, model_uri=uri, tracking_uri=client.tracking_uri, answers=trial.file.with_name("champion-answers.parquet")
        )
    except StageError as error:
        return Verdict(False, f"the champion cannot be compared with: {error}"), served
    metrics = served | {f"champion/{name}": value for name, value in measure(answers, trial=trial).items()}
    return judge(metrics, config=config, champion=f"version {champion.version}"), metrics


def _smoke_test(version: ModelVersion, *, trial: Trial, client: MlflowClient) -> dict[str, float]:
    uri = f"models:/{version.name}/{version.version}"
    try:
        answers = ask(trial, model_uri=uri, tracking_uri=client.tracking_uri, answers=trial.file.with_name("answers.parquet"))
        faults = find_faults(answers, trial=trial)
        if faults:
            raise StageError(f"{uri}: the smoke test found {'; '.join(faults)}")
    except StageError as error:
        client.set_model_version_tag(version.name, version.version, SMOKE_TAG, f"failed: {error}"[:500])
        raise
    client.set_model_version_tag(version.name, version.version, SMOKE_TAG, "passed")
    return measure(answers, trial=trial)
