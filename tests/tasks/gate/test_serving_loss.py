"""The loss of recall from the trained model to the package and its index, for a package with an exact index."""

from pathlib import Path

import mlflow
import numpy as np
import pyarrow as pa
import pytest
import torch
from mlflow import MlflowClient

from recsys_core.dataset.jagged import JaggedArray
from recsys_core.evaluation.metrics import USER_METRICS_FILE, read_user_metrics
from recsys_core.manifests import Dataset, PackageManifest
from recsys_core.serving.description import description_sha256
from tasks.gate import serving_loss, smoke_test
from tasks.gate.sample import UserSample, prepare_sample
from tasks.gate.serving_loss import INDEX, PACKAGED, TRAINED, exact_metrics
from tasks.gate.smoke_test import ModelProcess, predict_in_subprocess
from tasks.registry.loading import PACKAGE_SHA256_KEY, VERSION_KEY
from tasks.registry.versions import MODEL_CODE_FILE, description_of, signature_for
from tests.recsys_core.serving.conftest import CONTEXT_FEATURES, ITEM_IDS, USER_IDS, ModelBuilder, load_retriever
from tests.tasks.conftest import NUM_USERS, BuildStages
from tests.tasks.registration import prepare_run, register_version

pytestmark = pytest.mark.usefixtures("empty_plots")


def test_the_packaged_query_tower_ranks_all_items_almost_as_the_trained_model(
    workspace: Path, build_stages: BuildStages
) -> None:
    built_stages, context = build_stages(), prepare_run(workspace, "one")
    for manifest in (built_stages.dataset.interactions, *built_stages[1:]):
        context.results.add(manifest)
    sample = prepare_sample(built_stages.dataset.interactions, max_users=NUM_USERS, folder=workspace / "sample")
    metrics_by_ranker = exact_metrics(context, sample)
    trained_metrics = read_user_metrics(built_stages.evaluation.path(USER_METRICS_FILE))["model"]
    assert metrics_by_ranker[TRAINED].means("m") == trained_metrics.means("m")
    assert metrics_by_ranker[PACKAGED].user_row_U.tolist() == trained_metrics.user_row_U.tolist()
    trained_recall, packaged_recall = (metrics_by_ranker[ranker].means("m")["m/recall@20"] for ranker in (TRAINED, PACKAGED))
    assert packaged_recall == pytest.approx(trained_recall, abs=0.05)  # the package rounds vectors to 8 bits per value


def test_a_registration_has_metrics_of_each_step_from_training_to_serving(
    workspace: Path, build_stages: BuildStages, in_process_predictions: list[str]
) -> None:
    metrics = register_version(build_stages(), prepare_run(workspace, "one")).metrics
    rankers = {name.partition("/")[0] for name in metrics}
    assert rankers == {"served", TRAINED, PACKAGED, INDEX}
    assert metrics["index/recall@100"] == 1.0
    assert metrics["served/recall@20"] == pytest.approx(metrics[f"{PACKAGED}/recall@20"])  # a flat index is exact


@pytest.fixture
def packages(build_packaged_model: ModelBuilder) -> list[PackageManifest]:
    """Packages of the same model, with and without users. The model reads features of users and a context feature."""
    features = ("user.single", "user.list", "user.weighted_list", "context.single")
    return [build_packaged_model(features=features, users=users).package for users in ("stored", "none")]


def sample_of(package: PackageManifest, folder: Path) -> UserSample:
    """Return a sample of the users with whose log the package was built."""
    dataset = Dataset.open(interactions=package.folder.with_name("interactions"), features=package.folder.with_name("features"))
    return prepare_sample(dataset.interactions, max_users=len(USER_IDS), folder=folder, features=dataset.features)


def test_a_package_without_users_has_the_metrics_of_the_package_with_users(
    packages: list[PackageManifest], tmp_path: Path
) -> None:
    sample = sample_of(packages[1], tmp_path / "sample")
    metrics_with_users, metrics_without_users = (
        serving_loss._packaged_metrics(
            sample,
            retriever=load_retriever(package),
            item_vector_ID=torch.from_numpy(np.load(package.folder.with_name("export") / "item_vectors.npy")),
            order_I=np.arange(len(ITEM_IDS)),
            num_users=sample.num_users,
        )
        for package in packages
    )
    assert metrics_without_users.value_U_by_metric.keys() == metrics_with_users.value_U_by_metric.keys()
    for metric, value_U in metrics_with_users.value_U_by_metric.items():
        np.testing.assert_array_equal(metrics_without_users.value_U_by_metric[metric], value_U, err_msg=metric)


def test_a_version_without_users_gives_the_answers_of_the_version_with_users(
    packages: list[PackageManifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, item_id_lists = sample_of(packages[1], tmp_path / "sample"), []
    with ModelProcess() as process:
        for package in packages:
            model_folder = save_model(package, tmp_path / package.folder.parent.name)
            monkeypatch.setattr(smoke_test, "fetch_model", lambda *_, folder=model_folder, **__: (folder, None))
            answers = predict_in_subprocess(
                sample,
                model_uri="models:/m/1",
                client=MlflowClient("sqlite://"),
                workspace=tmp_path,
                process=process,
                output_file=tmp_path / f"answers-{package.folder.parent.name}.parquet",
            )
            item_id_lists.append(answers.item_ids.to_pylist())
    answers_with_users, answers_without_users = item_id_lists
    assert answers_without_users == answers_with_users


def save_model(package: PackageManifest, folder: Path) -> Path:
    """Write an MLflow model with the package."""
    mlflow.pyfunc.save_model(
        str(folder),
        python_model=str(MODEL_CODE_FILE),
        artifacts={"package": str(package.folder / "package")},
        model_config={PACKAGE_SHA256_KEY: description_sha256(package), VERSION_KEY: ""},
        pip_requirements=[],
        signature=signature_for(description_of(package), item_id_type="string"),
    )
    return folder


def test_users_who_are_known_only_from_the_context_are_ranked_by_the_context(
    build_packaged_model: ModelBuilder, tmp_path: Path
) -> None:
    model, package = build_packaged_model(features=CONTEXT_FEATURES)
    item_rows_by_user = [model.train[0], model.train[1], [], []]
    histories = JaggedArray.from_lengths(
        np.array([*map(len, item_rows_by_user)]), np.concatenate(item_rows_by_user).astype(np.int64)
    )
    num_items = len(ITEM_IDS)
    sample = UserSample(
        histories_file=tmp_path / "cases.parquet",
        context={"single": pa.array(["context.single 3", None, "context.single 2", None])},
        user_row_U=np.arange(4),
        item_ids=pa.array(ITEM_IDS),
        history=histories,
        num_seen_U=histories.lengths,
        seen_pair_L=np.sort(histories.pair_keys(bound=num_items)),
        target_pair_T=np.arange(4) * num_items + [min({*range(num_items)} - {*seen_rows}) for seen_rows in item_rows_by_user],
        target_mask_by_slice={},
        min_users_by_slice={},
    )
    packaged_metrics = serving_loss._packaged_metrics(
        sample,
        retriever=load_retriever(package),
        item_vector_ID=torch.from_numpy(model.item_vectors),
        order_I=np.arange(num_items),
        num_users=4,
    )
    assert packaged_metrics.user_row_U.tolist() == [0, 1, 2, 3]
    # Users 2 and 3 have no history, and their target is the first item. Only user 2 has a value of the context.
    for user, given_features in ((2, {"context.single": ([2], None)}), (3, {})):
        query_vector = model.query_vector(None, [], given_features=given_features)
        best_ids = model.best_ids(query_vector, seen_rows=[], k=20)
        assert packaged_metrics.value_U_by_metric["recall@20"][user] == (ITEM_IDS[0] in best_ids)
