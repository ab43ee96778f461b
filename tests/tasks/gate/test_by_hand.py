"""The functions of `nightjar promote` and `nightjar rollback`, with real packages in a real MLflow."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from recsys_core.errors import InputError, StageError, TrackingServerError
from recsys_core.manifests import FeaturesManifest, InteractionsManifest, load_manifest
from tasks.gate import version_tester
from tasks.gate.by_hand import ManualDecision, promote_version, roll_back
from tasks.gate.sample import Answers, K, UserSample
from tasks.registry.config import RegistryConfig
from tasks.registry.mlflow_client import RUN_ID_TAG, connect
from tasks.registry.registry import Registry
from tasks.registry.releases import FORMER_CHAMPION_TAG, LOAD_ERROR_TAG, MANUAL_CHANGE_TAG, REFIT_OF_TAG, SPENT_DROP_TAG
from tests.recsys_core.manifests.committed_stage import commit_stage
from tests.tasks.conftest import AddVersions, BuildStages
from tests.tasks.gate.test_gate_broken_champions import flip_a_bit, package_folder
from tests.tasks.registration import RecordingPublisher, prepare_run, recommend_unknown_items, version_by_alias, version_tags

pytestmark = pytest.mark.usefixtures("empty_plots")

MakeDecision = Callable[..., ManualDecision]


@pytest.fixture
def publisher() -> RecordingPublisher:
    """The publisher of all decisions of a test."""
    return RecordingPublisher()


@pytest.fixture
def make_decision(workspace: Path, publisher: RecordingPublisher) -> MakeDecision:
    """A function that returns a manual decision with a reason."""

    def make(reason: str = "sold-out items") -> ManualDecision:
        return ManualDecision(RegistryConfig(model_name="m"), workspace, reason, [publisher])

    return make


@pytest.fixture
def workspace_of_three_versions(
    workspace: Path, build_stages: BuildStages, add_versions: AddVersions, in_process_predictions: list[str]
) -> Path:
    """A workspace with a former champion (version 1), a champion (2) and a challenger (3), and the logs of two runs."""
    add_versions("good")
    client = connect(workspace)
    client.set_model_version_tag("m", "1", RUN_ID_TAG, "20260101")
    shutil.rmtree(workspace / "runs")  # the run `one`, which has no log
    for version_number in ("2", "3"):
        package_copy = shutil.copytree(package_folder(workspace, "1"), workspace / f"version-{version_number}")
        client.create_model_version("m", f"file://{package_copy}", tags={RUN_ID_TAG: "20260102"})
    client.set_registered_model_alias("m", "champion", "2")
    client.set_registered_model_alias("m", "challenger", "3")
    client.set_model_version_tag("m", "1", FORMER_CHAMPION_TAG, "1760000000")
    for run_id in ("20260101", "20260102"):
        shutil.copytree(build_stages().dataset.interactions.folder, prepare_run(workspace, run_id).folder(InteractionsManifest))
    return workspace


def test_a_rollback_undoes_a_promotion_by_hand(
    workspace_of_three_versions: Path, make_decision: MakeDecision, publisher: RecordingPublisher
) -> None:
    client = connect(workspace_of_three_versions)
    assert promote_version(3, make_decision("legal: item 7")).startswith(
        "m version 3 is champion instead of version 2: recall@20 is 0."
    )
    assert version_by_alias(client) == {"champion": "3"}
    assert "promoted by hand, replaces version 2: legal: item 7" in version_tags(client, "3")[MANUAL_CHANGE_TAG]
    assert "replaced by version 3, promoted by hand: legal: item 7" in version_tags(client, "2")[MANUAL_CHANGE_TAG]
    assert FORMER_CHAMPION_TAG in version_tags(client, "2")
    assert [(change.alias, change.old_version, change.new_version, change.reason) for change in publisher.changes] == [
        ("champion", "2", "3", "promoted by hand: legal: item 7"),
        ("challenger", "3", None, "promoted by hand: legal: item 7"),
    ]
    publisher.changes.clear()

    assert roll_back(None, make_decision()).startswith("m version 2 is champion instead of version 3")
    assert FORMER_CHAMPION_TAG not in version_tags(client, "3")
    assert roll_back(None, make_decision()).startswith("m version 1 is champion instead of version 2")  # not back to version 3
    assert FORMER_CHAMPION_TAG not in version_tags(client, "2")
    assert "rolled back by hand, replaces version 2: sold-out items" in version_tags(client, "1")[MANUAL_CHANGE_TAG]
    assert publisher.moves() == [("champion", "3", "2"), ("champion", "2", "1")]
    with pytest.raises(InputError, match=r"^m: there is no former champion \(former champions: none\); list the versions"):
        roll_back(None, make_decision())
    assert version_by_alias(client) == {"champion": "1"}

    # A former champion that does not load is skipped, and it is no longer a former champion.
    for version_number in (2, 3):
        promote_version(version_number, make_decision())
    flip_a_bit(workspace_of_three_versions, "2")
    assert roll_back(None, make_decision()).startswith("m version 1 is champion instead of version 3")
    assert LOAD_ERROR_TAG in version_tags(client, "2")
    flip_a_bit(workspace_of_three_versions, "3")
    with pytest.raises(StageError, match=r"^models:/m/3: "):
        promote_version(3, make_decision())
    with pytest.raises(InputError, match=r"version 2 is not a former champion \(former champions: none\)"):
        roll_back(2, make_decision())
    assert version_by_alias(client) == {"champion": "1"}


def test_a_rollback_selects_a_version_that_did_not_load_once_and_was_promoted_later(
    workspace_of_three_versions: Path, make_decision: MakeDecision
) -> None:
    client = connect(workspace_of_three_versions)
    promote_version(3, make_decision())
    client.set_model_version_tag("m", "2", LOAD_ERROR_TAG, "the disk was full")
    promote_version(2, make_decision())
    assert LOAD_ERROR_TAG not in version_tags(client, "2")
    promote_version(1, make_decision())
    assert roll_back(None, make_decision()).startswith("m version 2 is champion instead of version 1")


def test_a_withdrawn_version_is_no_former_champion_even_if_another_process_promotes_its_successor(
    workspace_of_three_versions: Path, make_decision: MakeDecision, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_champion = Registry.move_champion

    def promote_before_the_move(*arguments: Any, mark_as_former: bool, **options: Any) -> bool:
        assert move_champion(*arguments, **options)  # by the other process
        return move_champion(*arguments, mark_as_former=mark_as_former, **options)

    monkeypatch.setattr(Registry, "move_champion", promote_before_the_move)
    assert roll_back(None, make_decision()).startswith("m version 1 is champion instead of version 2")
    assert FORMER_CHAMPION_TAG not in version_tags(connect(workspace_of_three_versions), "2")


def test_a_promotion_by_hand_resets_the_margin_and_a_rollback_restores_the_earlier_margin(
    workspace_of_three_versions: Path, make_decision: MakeDecision
) -> None:
    client = connect(workspace_of_three_versions)
    for version_number, spent_drop in (("2", "0.020000"), ("3", "0.300000")):  # the gate has rejected version 3
        client.set_model_version_tag("m", version_number, SPENT_DROP_TAG, spent_drop)
    promote_version(3, make_decision())
    assert float(version_tags(client, "3")[SPENT_DROP_TAG]) == 0
    roll_back(None, make_decision())
    assert float(version_tags(client, "2")[SPENT_DROP_TAG]) == 0.02


def test_no_metric_is_printed_for_a_refit_because_it_was_trained_on_the_test_events(
    workspace_of_three_versions: Path, make_decision: MakeDecision
) -> None:
    connect(workspace_of_three_versions).set_model_version_tag("m", "3", REFIT_OF_TAG, "2")
    assert promote_version(3, make_decision()) == (
        "m version 3 is champion instead of version 2: a refit of version 2, without metrics, because it was trained on the "
        "test events too"
    )
    assert roll_back(None, make_decision()).startswith("m version 2 is champion instead of version 3: recall@20 is 0.")


def test_an_impossible_promotion_raises_one_message_and_changes_nothing(
    workspace_of_three_versions: Path,
    make_decision: MakeDecision,
    publisher: RecordingPublisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = connect(workspace_of_three_versions)
    for version_number, reason, message in (
        (9, "x", r"^m: there is no version 9 in sqlite:.* \(newest versions: 3, 2, 1\); list the versions with"),
        (2, "x", r"^m: version 2 is already champion; nothing changes$"),
        (3, "  ", r"^the reason is empty; describe why the champion changes$"),
        (3, "a\nb", r"^reason 'a\\nb': a reason is one line"),
    ):
        with pytest.raises(InputError, match=message):
            promote_version(version_number, make_decision(reason))
    with pytest.raises(InputError, match=r"^m: version 3 is not a former champion \(former champions: 1\)"):
        roll_back(3, make_decision())
    with monkeypatch.context() as patch:
        patch.setattr(version_tester, "predict_in_subprocess", recommend_unknown_items)
        with pytest.raises(StageError, match="items that are not in the catalogue"):
            promote_version(3, make_decision())
    assert (version_by_alias(client), publisher.changes) == ({"champion": "2", "challenger": "3"}, [])
    assert not any(MANUAL_CHANGE_TAG in version_tags(client, version_number) for version_number in "123")

    move_champion = Registry.move_champion

    def promote_version_1_first(*arguments: Any, **options: Any) -> bool:
        client.set_registered_model_alias("m", "champion", "1")
        return move_champion(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "move_champion", promote_version_1_first)
        with pytest.raises(StageError, match="nothing has changed, because the champion was replaced while version 3 was test"):
            promote_version(3, make_decision())
    assert (version_by_alias(client), publisher.changes) == ({"champion": "1", "challenger": "3"}, [])

    for run_id in ("20260101", "20260102"):
        shutil.rmtree(workspace_of_three_versions / "runs" / run_id / "ingest_interactions")
    with pytest.raises(InputError, match="no run has an ingested interaction log, but the smoke test needs users"):
        promote_version(2, make_decision())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ada:s3cret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for change_champion in (lambda: promote_version(2, make_decision()), lambda: roll_back(None, make_decision())):
        with pytest.raises(TrackingServerError, match=r"^MLflow at http://ada:\*\*\*@127.0.0.1:9 does not work"):
            change_champion()


def test_a_version_whose_log_is_removed_may_recommend_items_outside_the_newest_log(
    workspace_of_three_versions: Path, make_decision: MakeDecision, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_items_per_user = K

    def recommend_distinct_unknown_items(sample: UserSample, **_: object) -> Answers:
        return Answers(pa.array([[*range(-num_items_per_user, 0)]] * sample.num_users), cpu_s=1.0, num_bytes=1)

    monkeypatch.setattr(version_tester, "predict_in_subprocess", recommend_distinct_unknown_items)
    with pytest.raises(StageError, match="items that are not in the catalogue"):
        promote_version(3, make_decision())
    shutil.rmtree(workspace_of_three_versions / "runs" / "20260102" / "ingest_interactions")  # retention has removed it
    assert promote_version(3, make_decision()).startswith("m version 3 is champion instead of version 2: recall@20 is 0.0000")
    num_items_per_user = K - 1
    with pytest.raises(StageError, match=r"users whose number of items is not min\(20, "):
        promote_version(2, make_decision())


@pytest.mark.parametrize("is_outdated", [False, True])
def test_the_sample_has_the_features_that_the_run_has_ingested_for_its_log(
    workspace_of_three_versions: Path,
    make_decision: MakeDecision,
    monkeypatch: pytest.MonkeyPatch,
    is_outdated: bool,
) -> None:
    folder = workspace_of_three_versions / "runs" / "20260102" / FeaturesManifest.stage
    fields = {"lineage": "interactions", "features": {}, "tables": {}, "sources": ()}
    interactions = load_manifest(folder.with_name(InteractionsManifest.stage), InteractionsManifest)
    inputs = [] if is_outdated else [interactions]
    features = commit_stage(folder, FeaturesManifest, inputs=inputs, build=lambda _: fields)
    samples = []

    def record_sample(sample: UserSample, **_: object) -> Answers:
        samples.append(sample)
        return recommend_unknown_items(sample)

    monkeypatch.setattr(version_tester, "predict_in_subprocess", record_sample)
    with pytest.raises(StageError, match="items that are not in the catalogue"):
        promote_version(3, make_decision())
    assert [sample.features for sample in samples] == [None if is_outdated else features]
