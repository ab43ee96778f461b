"""A registered version: loaded in this process and in a fresh interpreter, and served by MLflow's scoring server."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PyFuncModel, scoring_server
from ruamel.yaml import YAML

from flows.cli.commands.registry import query
from flows.query import recommend
from flows.settings import yaml_loader
from flows.settings.template import starter_config
from recsys_core.errors import InputError, StageError
from recsys_core.manifests import InteractionsManifest
from recsys_core.serving.requests import answer, parse
from recsys_core.serving.retriever import Retriever
from tasks.gate.sample import K, prepare_sample
from tasks.gate.smoke_test import ModelProcess, predict_in_subprocess
from tasks.registry import tracking
from tasks.registry.loading import PACKAGE_SHA256_TAG, load_model
from tasks.registry.mlflow_client import connect
from tasks.registry.versions import get_or_create_version, pinned_requirements
from tasks.runs.context import StageContext
from tasks.runs.run import Run
from tests.tasks.conftest import BuildStages

MODEL_URI = "models:/m/1"
PREDICT_PROGRAM = """
import json, sys

class ImportBlocker:
    def find_spec(self, name, path=None, target=None):
        if name in ("torchrec", "fbgemm_gpu", "prefect", "tasks", "flows"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, ImportBlocker())
import mlflow, pandas

mlflow.set_tracking_uri(sys.argv[1])
answers = mlflow.pyfunc.load_model(sys.argv[2]).predict(pandas.DataFrame({"user_id": ["user-0", "user-7"]}), params={"k": 5})
print(json.dumps([answer["item_ids"] for answer in answers]))
"""


OTHER_WORKSPACE = Path("the folder of another workspace")
"""A workspace to which the version does not belong: the version is then verified with the sha256 in its tag."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, new_database: Path, build_stages: BuildStages) -> Iterator[Path]:
    """A workspace with version 1 of the model m."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "")  # so that the patch removes the value that MLflow sets
        patch.delenv("MLFLOW_TRACKING_URI")
        run = Run("one", workspace=tmp_path_factory.mktemp("workspace"))
        run.folder.mkdir(parents=True)
        run.config_file.write_text("name: tests\n")
        shutil.copy(new_database, run.workspace)
        context = StageContext(run, experiment="tests")
        for manifest in (build_stages().dataset.interactions, *build_stages()[1:]):
            context.results.add(manifest)
        client = connect(run.workspace)
        mlflow_run_id = tracking.open_mlflow_run(client, context)
        tracking.log_params(client, mlflow_run_id, config_file=run.config_file)
        get_or_create_version(context, model_name="m", client=client, mlflow_run_id=mlflow_run_id)
        yield run.workspace


@pytest.fixture(scope="module")
def model(workspace: Path) -> PyFuncModel:
    return mlflow.pyfunc.load_model(MODEL_URI)


@pytest.fixture(scope="module")
def scoring_client(model: PyFuncModel) -> TestClient:
    """A client of the scoring server that `mlflow models serve` runs."""
    return TestClient(scoring_server.init(model))


def post(scoring_client: TestClient, records: list[dict[str, Any]], **params: Any) -> tuple[int, Any]:
    """Send the records. Return the HTTP status, and the answers or the error message."""
    request = json.dumps({"dataframe_records": records, "params": params})
    response = scoring_client.post("/invocations", content=request, headers={"content-type": "application/json"})
    response_body = response.json()
    return response.status_code, response_body.get("predictions", response_body.get("message"))


def answers_of(scoring_client: TestClient, records: list[dict[str, Any]], **params: Any) -> list[dict[str, Any]]:
    """Send valid records. Return an answer for each record."""
    status, answers = post(scoring_client, records, **params)
    assert status == 200, answers
    return answers


def test_a_version_requires_public_releases_of_the_packages_that_serving_imports(workspace: Path) -> None:
    requirements = Path(mlflow.pyfunc.get_model_dependencies(MODEL_URI)).read_text().split()
    assert sorted(requirements) == pinned_requirements()
    assert all(re.fullmatch(r"[a-z-]+==[0-9]+(\.[0-9]+)+", requirement) for requirement in requirements)
    assert {requirement.partition("==")[0] for requirement in requirements} == {
        *("faiss-cpu", "mlflow", "numpy", "pandas", "pyarrow", "pydantic", "safetensors", "torch")
    }


def test_a_version_answers_in_a_process_without_torchrec_fbgemm_and_nightjar(
    workspace: Path, model: PyFuncModel, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PREDICT_PROGRAM, mlflow.get_tracking_uri(), MODEL_URI]
    finished_process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert finished_process.returncode == 0, finished_process.stderr
    answers = model.predict(pd.DataFrame({"user_id": ["user-0", "user-7"]}), params={"k": 5})
    assert json.loads(finished_process.stdout.splitlines()[-1]) == [answer["item_ids"] for answer in answers]


def test_invalid_records_get_an_error_and_valid_records_get_recommendations(scoring_client: TestClient) -> None:
    valid_record, invalid_record = {"user_id": "user-0", "history": [5003, 5006]}, {"user_id": 7}
    records = [
        valid_record,
        invalid_record,
        {"history": [5003]},
        {"user_id": "user-1", "history": "5003"},
        {"user_id": "user-1", "history": [5003, None]},
        {"user_id": "user-1", "history": [5003, "x"]},
        {"user_id": "\ud800"},
        {"user_id": "not in the log"},
    ]
    answers = answers_of(scoring_client, records, k=3)
    assert [answer["error"] for answer in answers] == [
        None,
        "user_id 7 is not a string, but the model was trained on string ids",
        None,
        "history is of type str; pass a list of item ids, or leave it out",
        "history: item_id is missing",
        "history: item_id 'x' is not an integer, but the model was trained on integer ids",
        "user_id '\\ud800' is not valid Unicode",
        None,
    ]
    assert [len(record_answer["item_ids"]) for record_answer in answers] == [3, 0, 3, 0, 0, 0, 0, 3]
    assert [len(record_answer["scores"]) for record_answer in answers] == [3, 0, 3, 0, 0, 0, 0, 3]
    assert answers_of(scoring_client, [valid_record], k=3) == answers[:1]
    assert answers_of(scoring_client, [invalid_record], k=3) == answers[1:2]


def test_only_records_without_a_history_use_the_stored_history(scoring_client: TestClient) -> None:
    record_with_history = {"user_id": "user-1", "history": [5003, 5006]}
    records = [{"user_id": "user-0"}, record_with_history, {"user_id": "user-2"}]
    answers_alone = [answer for record in records for answer in answers_of(scoring_client, [record], k=4)]
    records_with_null = [*records[:2], {"user_id": "user-2", "history": None}]
    assert answers_of(scoring_client, records_with_null, k=4) == answers_alone
    dataframe_split = {
        "columns": ["user_id", "history"],
        "data": [["user-0", None], ["user-1", [5003, 5006]], ["user-2", None]],
    }
    response = scoring_client.post("/invocations", json={"dataframe_split": dataframe_split, "params": {"k": 4}})
    assert response.json()["predictions"] == answers_alone


def test_an_answer_has_its_version_space_fallback_and_number_of_unknown_items(
    workspace: Path, scoring_client: TestClient
) -> None:
    records = [{"user_id": "user-0"}, {"user_id": "?", "history": [5003, 1]}, {"user_id": None}, {"history": [5003]}]
    answers = answers_of(scoring_client, records, k=3)
    assert len({answer["space_id"] for answer in answers}) == 1
    assert [answer["fallback"] for answer in answers] == [None, "history", "popularity", "history"]
    assert [answer["num_unknown_items"] for answer in answers] == [0, 1, 0, 0]
    assert "query_vector" not in answers[0]
    verified_model = load_model(MODEL_URI, client=MlflowClient(), workspace=OTHER_WORKSPACE)
    assert [answer["version"] for answer in verified_model.predict(pd.DataFrame(records), params={"k": 3})] == ["1"] * 4


def test_params_exclude_items_and_return_vectors(scoring_client: TestClient) -> None:
    (full_answer,) = answers_of(scoring_client, [{"user_id": "user-0"}], k=4, with_vectors=True)
    best_item_ids = full_answer["item_ids"][:1]
    (filtered_answer,) = answers_of(scoring_client, [{"user_id": "user-0"}], k=3, exclude=best_item_ids, min_score=-10)
    assert filtered_answer["item_ids"] == full_answer["item_ids"][1:]
    inner_products = np.array(full_answer["item_vectors"]) @ np.array(full_answer["query_vector"])
    assert inner_products.tolist() == pytest.approx(full_answer["scores"], abs=1e-5)


def test_similar_items_are_requested_by_item_id(scoring_client: TestClient) -> None:
    similar_answer, unknown_answer = answers_of(scoring_client, [{"item_id": 5003}, {"item_id": 1}], k=3)
    assert len(similar_answer["item_ids"]) == 3 and 5003 not in similar_answer["item_ids"]
    assert unknown_answer["error"] == "item_id 1 is not in the catalogue"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"k": 3, "exclude_seen": True, "top": 5},
            r"params: unknown top; the model has \['k', 'exclude_seen', 'exclude_stored_history', 'exclude', ",
        ),
        ({"K": 3}, "params: unknown K"),
        ({"k": 0}, "k is 0; it must be at least 1"),
        ({"k": None}, "params: k is null"),
        ({"exclude_stored_history": None}, "params: exclude_stored_history is null"),
        ({"k": "3"}, "Invalid parameters found"),
        ({"k": 2.5}, "Invalid parameters found"),
        ({"exclude": ["x"]}, "Invalid parameters found"),
        ({"filter": "genre"}, "filter is not a JSON object"),
        ({"filter": '{"genre": "rock"}'}, r"unknown column 'genre'; the model has \[\]"),
    ],
)
def test_a_request_with_an_unknown_or_invalid_param_fails_with_the_name_of_the_param(
    scoring_client: TestClient, model: PyFuncModel, params: dict[str, Any], message: str
) -> None:
    status, error_message = post(scoring_client, [{"user_id": "user-0"}], **params)
    assert status == 400 and re.search(message, error_message), error_message
    with pytest.raises(MlflowException, match=message):
        model.predict(pd.DataFrame({"user_id": ["user-0"]}), params=params)


RequestAndItems = tuple[dict[str, Any], list[list[int]]]
"""A request, and the item ids that each user of the request gets."""


def recommend_with_mlflow(workspace: Path, interactions: InteractionsManifest) -> RequestAndItems:
    user_ids = ["user-0", "user-7", "not in the log"]
    answers: Any = mlflow.pyfunc.load_model(MODEL_URI).predict(pd.DataFrame({"user_id": user_ids}), params={"k": 5})
    return {"inputs": {"user_id": user_ids}, "params": {"k": 5}}, [answer["item_ids"] for answer in answers]


def recommend_with_query(workspace: Path, interactions: InteractionsManifest) -> RequestAndItems:
    config = starter_config().model_copy(update={"workspace": workspace})
    items = recommend(config, user="user-7", k=5, model_uri=MODEL_URI).items
    return {"inputs": {"user_id": ["user-7"]}, "params": {"k": 5}}, [[int(item.item_id) for item in items]]


def recommend_with_smoke_test(workspace: Path, interactions: InteractionsManifest) -> RequestAndItems:
    sample = prepare_sample(interactions, max_users=20, folder=workspace / "sample")
    with ModelProcess() as process:
        answers = predict_in_subprocess(
            sample,
            model_uri=MODEL_URI,
            client=MlflowClient(),
            workspace=workspace,
            process=process,
            output_file=workspace / "answers.parquet",
        )
    inputs = pq.read_table(sample.histories_file).to_pydict()
    return {"inputs": inputs, "params": {"k": K, "exclude_stored_history": False}}, answers.item_ids.to_pylist()


@pytest.mark.parametrize("recommend_items", [recommend_with_mlflow, recommend_with_query, recommend_with_smoke_test])
def test_each_way_to_load_a_version_gives_the_answers_of_the_package(
    workspace: Path, build_stages: BuildStages, recommend_items: Callable[..., RequestAndItems]
) -> None:
    request, item_ids = recommend_items(workspace, build_stages().dataset.interactions)
    package_answers = answer(Retriever.load(build_stages().package.folder), parse(request))
    assert item_ids == [package_answer.item_ids for package_answer in package_answers]
    assert all(item_ids)


def test_query_recommends_for_a_history_and_shows_similar_items(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = starter_config().model_copy(update={"workspace": workspace})
    query_answer = recommend(config, history=["5003", "1", "5006"], k=4, model_uri=MODEL_URI)
    assert (query_answer.version, query_answer.known_user) == ("1", False)
    assert (query_answer.fallback, query_answer.num_unknown_items) == ("history", 1)
    assert not {5003, 5006} & {item.item_id for item in query_answer.items}
    assert 5003 not in {item.item_id for item in recommend(config, item="5003", k=4, model_uri=MODEL_URI).items}
    for arguments, message in (
        ({"item": "1"}, "--item: item_id '1' is not in the catalogue"),
        ({"item": "x"}, "--item: item_id 'x' is not an integer"),
        ({"history": ["x"]}, "--history: history: item_id 'x' is not an integer"),
    ):
        with pytest.raises(InputError, match=message):
            recommend(config, k=4, model_uri=MODEL_URI, **arguments)  # type: ignore[arg-type]
    query(config, user="new", history="5003, 1", item=None, k=2, model_uri=MODEL_URI, as_json=False)
    console = capsys.readouterr()
    assert "m version 1, user new, history 5003, 1" in console.out
    assert "user new is unknown to version 1: these are recommended from the history alone" in console.err
    assert "1 item of the history is unknown to version 1" in console.err


@pytest.fixture
def stored_model_folder(workspace: Path, tmp_path: Path) -> Iterator[Path]:
    """The folder of the model in the artifact store. Its files are restored after the test."""
    (mlmodel,) = (workspace / "mlartifacts").rglob("MLmodel")
    folder = mlmodel.parent
    shutil.copytree(folder, tmp_path / "backup")
    yield folder
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)


def _replace_text(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_an_edited_package_is_rejected_wherever_it_is_loaded(stored_model_folder: Path) -> None:
    package_file = next(stored_model_folder.rglob("package.json"))
    _replace_text(package_file, '"pooling": "mean"', '"pooling": "sum"')
    with pytest.raises(StageError, match=r"package.json: the sha256 is"):
        mlflow.pyfunc.load_model(MODEL_URI)
    with pytest.raises(StageError, match=r"package.json: the sha256 is"):
        load_model(MODEL_URI, client=MlflowClient(), workspace=OTHER_WORKSPACE)


def test_a_package_edited_together_with_its_sha256_is_rejected_by_the_tag_of_its_version(stored_model_folder: Path) -> None:
    package_file, mlmodel = next(stored_model_folder.rglob("package.json")), stored_model_folder / "MLmodel"
    sha256_before = hashlib.sha256(package_file.read_bytes()).hexdigest()
    _replace_text(package_file, '"max_k": 120', '"max_k": 7')
    _replace_text(mlmodel, sha256_before, hashlib.sha256(package_file.read_bytes()).hexdigest())
    mlflow.pyfunc.load_model(MODEL_URI)  # passes, because MLmodel has the sha256 of the edited package.json
    with pytest.raises(StageError, match=rf"package.json: the sha256 is \w+, but the file was written with {sha256_before}"):
        load_model(MODEL_URI, client=MlflowClient(), workspace=OTHER_WORKSPACE)


def test_an_mlmodel_without_the_checksum_is_rejected(stored_model_folder: Path) -> None:
    mlmodel_fields = YAML(typ="safe", pure=True).load((stored_model_folder / "MLmodel").read_text())
    del mlmodel_fields["flavors"]["python_function"]["config"]
    (stored_model_folder / "MLmodel").write_text(yaml_loader.dump(mlmodel_fields))
    with pytest.raises(StageError, match="MLmodel: the python_function flavor has no config package_sha256"):
        load_model(MODEL_URI, client=MlflowClient(), workspace=OTHER_WORKSPACE)


def test_a_version_without_the_checksum_in_its_tags_is_rejected(workspace: Path) -> None:
    client = MlflowClient()
    version: ModelVersion = client.get_model_version("m", "1")
    client.delete_model_version_tag("m", "1", PACKAGE_SHA256_TAG)
    try:
        with pytest.raises(StageError, match=f"models:/m/1 does not have the tag {PACKAGE_SHA256_TAG}"):
            load_model(MODEL_URI, client=client, workspace=OTHER_WORKSPACE)
    finally:
        client.set_model_version_tag("m", "1", PACKAGE_SHA256_TAG, version.tags[PACKAGE_SHA256_TAG])
    model = load_model(MODEL_URI, client=client, workspace=OTHER_WORKSPACE)
    (user_answer,) = model.predict(pd.DataFrame({"user_id": ["user-0"]}))
    assert user_answer["error"] is None
