"""The champion that a person chooses: promotion of a registered version, and rollback to a former champion.

The version is tested as in the champion gate before the alias `champion` moves to it. The users of the test come from the log
of a run in the workspace.

Shapes: U users whose recommendations are measured.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow.entities.model_registry import ModelVersion

from recsys_core.errors import InputError, StageError, redacted
from recsys_core.evaluation.metrics import UserMetrics
from recsys_core.manifests import FeaturesManifest, InteractionsManifest, load_manifest
from tasks.delivery.publishers import Publisher
from tasks.gate.sample import ServedMetrics, prepare_sample
from tasks.gate.smoke_test import ModelProcess, NotFetchedError, UnusableVersionError
from tasks.gate.version_tester import VersionTester
from tasks.registry.config import RegistryConfig
from tasks.registry.mlflow_client import RUN_ID_TAG, connect
from tasks.registry.registry import Registry, version_number_text
from tasks.registry.releases import (
    FORMER_CHAMPION_TAG,
    MANUAL_CHANGE_TAG,
    MAX_FORMER_CHAMPIONS,
    PARENT_TAG,
    REFIT_OF_TAG,
    SPENT_DROP_TAG,
    current_person,
)
from tasks.runs.context import check_reason
from tasks.runs.workspace import Workspace


@dataclass(frozen=True)
class ManualDecision:
    """The decision of a person about the champion.

    Attributes:
        reason: why the person changes the champion; it becomes a tag of both versions.
        publishers: systems that are informed of each moved alias.
    """

    config: RegistryConfig
    workspace: Path
    reason: str
    publishers: Sequence[Publisher]

    def __post_init__(self) -> None:
        """Raise InputError for a missing or invalid reason."""
        check_reason(self.reason)
        if not self.reason.strip():
            raise InputError("the reason is empty; describe why the champion changes")

    def connect(self) -> Registry:
        """Return the registry. A failed connection is not repeated, because a person waits for the answer."""
        return Registry(connect(self.workspace), self.config.model_name, self.publishers)


def promote_version(version_number: int, decision: ManualDecision) -> str:
    """Make a version the champion if it passes the smoke test; return one sentence about the change.

    Raises:
        InputError: the version does not exist, or it is already champion.
        StageError: the version failed the smoke test, or another version became champion during the test.
        TrackingServerError: MLflow does not work.
    """
    registry, model_name = decision.connect(), decision.config.model_name
    versions = registry.versions()
    version = next((version for version in versions if int(version.version) == version_number), None)
    if version is None:
        raise InputError(
            f"{model_name}: there is no version {version_number} in {redacted(registry.client.tracking_uri)} (newest versions: "
            f"{_version_numbers(versions)}); list the versions with `nightjar releases`"
        )
    champion = registry.champion()
    if version_number_text(champion) == version_number_text(version):
        raise InputError(f"{model_name}: version {version_number} is already champion; nothing changes")
    own_log = _interaction_log_of(version, decision)
    with _open_tester(registry, decision, interactions=own_log) as tester:
        # The smoke test would reject the items that a refresh added, because they are not in the log of the run.
        is_refresh = PARENT_TAG in version.tags
        metrics = tester.measure(version) if is_refresh else tester.smoke_test(version, is_own_log=own_log is not None)
        return _make_champion(tester, version, decision, champion=champion, metrics=metrics, is_rollback=False)


def roll_back(version_number: int | None, decision: ManualDecision) -> str:
    """Give the alias champion to a former champion; return one sentence about the change.

    Args:
        version_number: number of a former champion; None: the newest former champion that loads.

    Raises:
        InputError: there is no former champion, or version `version_number` is not a former champion.
        StageError: no former champion loads, or another version became champion during the test.
        TrackingServerError: MLflow does not work.
    """
    registry, model_name = decision.connect(), decision.config.model_name
    champion = registry.champion()
    champion_number = version_number_text(champion)
    former_champions = [version for version in registry.former_champions() if version_number_text(version) != champion_number]
    candidates = [version for version in former_champions if version_number in (None, int(version.version))]
    if not candidates:
        problem = (
            "there is no former champion" if version_number is None else f"version {version_number} is not a former champion"
        )
        raise InputError(
            f"{model_name}: {problem} (former champions: {_version_numbers(former_champions)}); list the versions with "
            "`nightjar releases`, and make one of them the champion with `nightjar promote --version N`"
        )
    load_errors = []
    with _open_tester(registry, decision, interactions=None) as tester:
        for version in candidates[:MAX_FORMER_CHAMPIONS]:
            try:
                metrics = tester.measure(version)
            except (UnusableVersionError, NotFetchedError) as error:
                load_errors.append(str(error))
                continue
            return _make_champion(tester, version, decision, champion=champion, metrics=metrics, is_rollback=True)
    raise StageError(f"{model_name}: nothing has changed, because no former champion loads: {'; '.join(load_errors)}")


def _version_numbers(versions: Sequence[ModelVersion]) -> str:
    return ", ".join(str(version.version) for version in versions[:10]) or "none"


def _interaction_log_of(version: ModelVersion, decision: ManualDecision) -> InteractionsManifest | None:
    """Return the log of the run that registered a version; None if the workspace no longer has the log."""
    run_id = version.tags.get(RUN_ID_TAG)
    if run_id is None:
        return None
    return load_manifest(Workspace(decision.workspace).run(run_id).stage_folder(InteractionsManifest), InteractionsManifest)


def _features_of(interactions: InteractionsManifest) -> FeaturesManifest | None:
    """Return the features that a run has ingested for its log; None if there are none, or if the files no longer exist."""
    features = load_manifest(interactions.folder.with_name(FeaturesManifest.stage), FeaturesManifest)
    is_of_log = features is not None and features.input_fingerprints.get(interactions.stage) == interactions.fingerprint
    return features if is_of_log else None


@contextmanager
def _open_tester(
    registry: Registry, decision: ManualDecision, *, interactions: InteractionsManifest | None
) -> Iterator[VersionTester]:
    """Yield a tester with users of the log `interactions`; None: the newest log in the workspace."""
    workspace = Workspace(decision.workspace)
    interactions = interactions or workspace.newest_manifest(InteractionsManifest)
    if interactions is None:
        raise InputError(
            f"{workspace.folder}: no run has an ingested interaction log, but the smoke test needs users of a log; "
            "ingest a log with `nightjar run --until ingest_interactions`"
        )
    with TemporaryDirectory(prefix="nightjar-") as folder_name, ModelProcess() as process:
        sample = prepare_sample(
            interactions,
            max_users=decision.config.smoke_test_users,
            folder=Path(folder_name) / "smoke_test",
            features=_features_of(interactions),
        )
        yield VersionTester(registry, sample, decision.workspace, process)


def _make_champion(
    tester: VersionTester,
    version: ModelVersion,
    decision: ManualDecision,
    *,
    champion: ModelVersion | None,
    metrics: ServedMetrics,
    is_rollback: bool,
) -> str:
    """Make `version` the champion, tag the old and the new champion with the decision, and return one sentence about it."""
    registry, version_number = tester.registry, str(version.version)
    action = "rolled back by hand" if is_rollback else "promoted by hand"
    reason = f"{action}: {decision.reason}"
    is_moved = registry.move_champion(version, expected_champion=champion, reason=reason, mark_as_former=not is_rollback)
    if not is_moved and registry.aliases().get("champion") != version_number:
        raise StageError(
            f"{registry.model_name}: nothing has changed, because the champion was replaced while version {version_number} was "
            "tested; look at `nightjar releases`, then repeat the command"
        )
    old_champion_text = "no version" if champion is None else f"version {champion.version}"
    if not is_rollback:  # the tag may have the drop for which the gate rejected the version
        registry.set_tag(version, SPENT_DROP_TAG, "0")
    _tag_decision(registry, version, f"{action}, replaces {old_champion_text}", decision)
    if champion is not None:
        _tag_decision(registry, champion, f"replaced by version {version_number}, {action}", decision)
        if is_rollback:  # a later rollback must not return to this version, which another process may just have tagged
            registry.remove_tag(registry.version(champion.version), FORMER_CHAMPION_TAG)
    if registry.aliases().get("challenger") == version_number:
        registry.move_challenger(None, reason=reason)
    old_champion_clause = "" if champion is None else f" instead of {old_champion_text}"
    refitted_number = version.tags.get(REFIT_OF_TAG)
    metric_text = _metric_text(metrics.user_metrics, decision.config.metric)
    if refitted_number is not None:
        metric_text = f"a refit of version {refitted_number}, without metrics, because it was trained on the test events too"
    return f"{registry.model_name} version {version_number} is champion{old_champion_clause}: {metric_text}"


def _metric_text(user_metrics: UserMetrics, metric_name: str) -> str:
    """Return a text with the mean of a metric, and with the number of users that have the metric.

    >>> import numpy as np
    >>> _metric_text(UserMetrics(np.arange(3), {"recall@20": np.array([0.0, 0.5, 1.0])}), "recall@20")
    'recall@20 is 0.5000 for 3 users'
    """
    mean = user_metrics.means("served")[f"served/{metric_name}"]
    return f"{metric_name} is {mean:.4f} for {len(user_metrics.user_row_U):,} users"


def _tag_decision(registry: Registry, version: ModelVersion, change: str, decision: ManualDecision) -> None:
    tag_value = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {current_person()}: {change}: {decision.reason}"
    registry.set_tag(version, MANUAL_CHANGE_TAG, tag_value)
