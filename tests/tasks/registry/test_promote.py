"""The gate of runs with `promote: never`, `promote: force` or a dry run; real packages on a real MLflow."""

from pathlib import Path

import pytest

from recsys_core.errors import StageError
from recsys_core.manifests import RegistrationManifest, load_manifest
from tasks.gate import version_tester
from tasks.registry.mlflow_client import connect
from tasks.registry.releases import current_person
from tests.tasks.conftest import AddVersions, BuildStages
from tests.tasks.gate.test_gate_broken_champions import flip_a_bit
from tests.tasks.registration import (
    prepare_run,
    recommend_unknown_items,
    register_version,
    version_by_alias,
    version_tags,
)

pytestmark = pytest.mark.usefixtures("empty_plots")


def test_with_promote_never_a_version_is_compared_but_promoted_only_by_a_resume(
    workspace: Path, build_stages: BuildStages, add_versions: AddVersions, in_process_predictions: list[str]
) -> None:
    add_versions("good")
    equal_registration = register_version(
        build_stages(), prepare_run(workspace, "two", promote="never", reason="try a new loss")
    )
    assert (equal_registration.alias, equal_registration.promoted) == ("challenger", False)
    assert (equal_registration.promote, equal_registration.run_reason) == ("never", "try a new loss")
    reason = equal_registration.reasons[0]
    assert reason.startswith("promote is never; recall@20 is") and reason.endswith("of version 1")
    client = connect(workspace)
    assert version_by_alias(client) == {"champion": "1", "challenger": "2"}
    tags = version_tags(client, "2")
    assert (tags["nightjar.promote"], tags["nightjar.run_reason"]) == ("never", "try a new loss")

    resumed_registration = register_version(build_stages(), prepare_run(workspace, "two"))
    assert (resumed_registration.version, resumed_registration.alias, resumed_registration.promote) == (
        "2",
        "champion",
        "by_gate",
    )
    assert version_by_alias(client) == {"champion": "2"}


def test_force_promotes_a_worse_version_and_records_the_reason(
    workspace: Path,
    build_stages: BuildStages,
    add_versions: AddVersions,
    in_process_predictions: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_versions("good")
    context = prepare_run(workspace, "two", promote="force", reason="legal: item 7 must go")
    forced_registration = register_version(build_stages(shuffled=True), context)
    assert (forced_registration.alias, forced_registration.promoted) == ("champion", True)
    reason = forced_registration.reasons[0]
    assert reason.startswith(f"promotion was forced by {current_person()} (legal: item 7 must go); recall@20 is")
    assert "less than 0.98 times the" in reason
    client = connect(workspace)
    assert version_by_alias(client) == {"champion": "2"}
    tags = version_tags(client, "2")
    assert (tags["nightjar.promote"], tags["nightjar.reasons"]) == ("force", reason)
    assert "nightjar.champion_until" in version_tags(client, "1")
    assert client.get_run(forced_registration.mlflow_run_id).data.tags["nightjar.run_reason"] == "legal: item 7 must go"
    saved_manifest = load_manifest(context.folder(RegistrationManifest), RegistrationManifest)
    assert saved_manifest is not None and (saved_manifest.promote, saved_manifest.run_reason) == (
        "force",
        "legal: item 7 must go",
    )

    # A forced promotion also needs a passed smoke test.
    monkeypatch.setattr(version_tester, "predict_in_subprocess", recommend_unknown_items)
    with pytest.raises(StageError, match="items that are not in the catalogue"):
        register_version(build_stages(), prepare_run(workspace, "three", promote="force", reason="now"))
    assert version_by_alias(client) == {"champion": "2"}


def test_a_broken_champion_is_reported_and_replaced_only_by_force(
    workspace: Path, build_stages: BuildStages, add_versions: AddVersions, in_process_predictions: list[str]
) -> None:
    add_versions("good")
    flip_a_bit(workspace, "1")
    unforced_registration = register_version(build_stages(), prepare_run(workspace, "two", promote="never"))
    assert unforced_registration.alarm is not None
    assert unforced_registration.alarm.startswith("the champion, version 1, does not load")
    assert unforced_registration.alarm.endswith("; no other version becomes champion")
    assert version_by_alias(connect(workspace)) == {"champion": "1", "challenger": "2"}

    forced_registration = register_version(build_stages(), prepare_run(workspace, "two", promote="force", reason="repair"))
    assert forced_registration.alarm is not None and forced_registration.alarm.endswith("; version 2 is champion instead")
    assert version_by_alias(connect(workspace)) == {"champion": "2"}


def test_a_dry_run_logs_the_metrics_and_registers_nothing_until_it_is_resumed(
    workspace: Path, build_stages: BuildStages, in_process_predictions: list[str]
) -> None:
    context, client = prepare_run(workspace, "one", dry_run=True, reason="look first"), connect(workspace)
    assert register_version(build_stages(), context) is None
    assert client.search_registered_models() == [] and not context.folder(RegistrationManifest).exists()
    (mlflow_run,) = client.search_runs(["1"])  # the experiment of the run
    assert mlflow_run.data.metrics["test/recall_at_20"] == build_stages().evaluation.metrics["test/recall@20"]
    assert mlflow_run.data.tags["nightjar.run_reason"] == "look first"

    resumed_registration = register_version(build_stages(), prepare_run(workspace, "one", reason="looks good"))
    assert (resumed_registration.alias, resumed_registration.mlflow_run_id) == ("champion", mlflow_run.info.run_id)
    assert client.get_run(mlflow_run.info.run_id).data.tags["nightjar.run_reason"] == "looks good"
