"""Random requests to a registered model: each request is answered or rejected with HTTP status 400."""

import json
import math
from collections.abc import Callable
from typing import Any

import mlflow
import pandas as pd
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PyFuncModel, scoring_server

from recsys_core.manifests import PackageManifest
from recsys_core.serving.description import DESCRIPTION_NAME, PackageDescription, description_sha256
from tasks.registry.loading import PACKAGE_SHA256_KEY, VERSION_KEY
from tasks.registry.versions import MODEL_CODE_FILE, signature_for
from tests.recsys_core.serving.conftest import CONTEXT_FEATURES, ITEM_FILES, ITEM_IDS, NUM_ITEMS, USER_FEATURES, USER_IDS
from tests.recsys_core.serving.conftest import build_packaged_model as build_packaged_model

NUM_REQUESTS = 150
ModelBuilder = Callable[..., tuple[Any, PackageManifest]]


@pytest.fixture(scope="module")
def model(build_packaged_model: ModelBuilder, tmp_path_factory: pytest.TempPathFactory) -> PyFuncModel:
    """An MLflow model of a package with features, 8-bit rows and an approximate index."""
    _, package_manifest = build_packaged_model(
        index_kind="hnsw", quantization="int8", features=(*USER_FEATURES, *CONTEXT_FEATURES), item_files=ITEM_FILES
    )
    model_folder = tmp_path_factory.mktemp("mlflow") / "model"
    description = PackageDescription.model_validate_json((package_manifest.folder / "package" / DESCRIPTION_NAME).read_bytes())
    mlflow.pyfunc.save_model(
        str(model_folder),
        python_model=str(MODEL_CODE_FILE),
        artifacts={"package": str(package_manifest.folder / "package")},
        model_config={PACKAGE_SHA256_KEY: description_sha256(package_manifest), VERSION_KEY: ""},
        pip_requirements=[],
        signature=signature_for(description, item_id_type="string"),
    )
    return mlflow.pyfunc.load_model(str(model_folder))


ANY_VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
ITEM_ID = st.sampled_from([*ITEM_IDS[:50], "unheard of"])
SHORT_HISTORY = st.lists(ITEM_ID, max_size=20)
LONG_HISTORY = st.just([ITEM_IDS[row % NUM_ITEMS] for row in range(100_000)])
VALUES_BY_COLUMN = {
    "user_id": st.one_of(st.sampled_from(USER_IDS), st.integers(1, 9)),
    "history": st.integers(0, 9).flatmap(lambda digit: LONG_HISTORY if digit == 9 else SHORT_HISTORY),
    "item_id": ITEM_ID,
    "context.number": st.one_of(st.floats(), st.none()),
    "context.single": st.sampled_from(["context.single 2", "unheard of", None]),
    "weighted_list": st.lists(st.sampled_from(["user.weighted_list 2", "unheard of"]), min_size=2, max_size=2),
    "weights": st.lists(st.floats(0, 2), min_size=2, max_size=2),
    "colour": st.just("red"),
}
FILTER = st.one_of(
    st.sampled_from(['{"genre": "rock"}', '{"price": {"ge": 10, "lt": 20}}', '{"since": {"since": "2026-03-01"}}', "{", ""]),
    st.dictionaries(st.sampled_from(["genre", "price", "stock", "is_new", "since", "colour"]), ANY_VALUE, max_size=2).map(
        lambda conditions: json.dumps(conditions)
    ),
)
VALUES_BY_PARAM = {
    "k": st.sampled_from([0, -1, 1, 10, 1_000_000]),
    "exclude": st.lists(ITEM_ID, max_size=5),
    "exclude_seen": st.booleans(),
    "min_score": st.floats(),
    "popularity_weight": st.floats(),
    "filter": FILTER,
    "with_vectors": st.booleans(),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Draw the records and params of a request. About every fourth request has values of any type."""
    has_arbitrary_types = draw(st.integers(0, 3)) == 0
    column_names = [name for name in VALUES_BY_COLUMN if name != "item_id" and draw(st.booleans())]
    if draw(st.integers(0, 5)) == 0:
        column_names = ["item_id"]
    if has_arbitrary_types:
        column_names = draw(st.lists(st.sampled_from([*VALUES_BY_COLUMN, "colour"]), max_size=3, unique=True))
    records = [
        {
            name: draw(st.one_of(VALUES_BY_COLUMN[name], ANY_VALUE) if has_arbitrary_types else VALUES_BY_COLUMN[name])
            for name in column_names
        }
        for _ in range(draw(st.integers(0, 3)))
    ]
    params = {name: draw(values) for name, values in VALUES_BY_PARAM.items() if draw(st.integers(0, 3)) == 0}
    if has_arbitrary_types:
        params |= {name: draw(ANY_VALUE) for name in draw(st.lists(st.sampled_from([*VALUES_BY_PARAM, "top"]), max_size=1))}
    return records, params


def check_prediction(prediction: dict[str, Any], record: dict[str, Any], params: dict[str, Any]) -> None:
    """Assert that a prediction has finite scores, and no repeated, unknown or excluded item."""
    item_ids, scores = prediction["item_ids"], prediction["scores"]
    assert len(item_ids) == len(scores) == len({*item_ids}) <= min(NUM_ITEMS, params.get("k", 10))
    assert {*item_ids} <= {*ITEM_IDS} and all(math.isfinite(score) for score in scores)
    if prediction["error"] is not None:
        assert not item_ids
    elif isinstance(record.get("history"), list) and params.get("exclude_seen", True):
        assert not {*item_ids} & {item_id for item_id in record["history"] if isinstance(item_id, str)}
    if isinstance(params.get("exclude"), list):
        assert not {*item_ids} & {*params["exclude"]}


@settings(max_examples=NUM_REQUESTS, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests())
def test_every_request_is_answered_or_rejected_with_a_message(
    model: PyFuncModel, request: tuple[list[dict[str, Any]], dict[str, Any]]
) -> None:
    records, params = request
    try:
        predictions = model.predict(pd.DataFrame(records), params=params)
    except MlflowException as error:
        assert error.error_code in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST") and error.message
        return
    assert len(predictions) == len(records)
    for prediction, record in zip(predictions, records, strict=True):
        check_prediction(prediction, record, params)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests())
def test_the_mlflow_server_answers_every_request_with_status_200_or_400(
    model: PyFuncModel, request: tuple[list[dict[str, Any]], dict[str, Any]]
) -> None:
    records, params = request
    request_body = json.dumps({"dataframe_records": records, "params": params})
    with TestClient(scoring_server.init(model), raise_server_exceptions=False) as client:
        response = client.post("/invocations", content=request_body, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400), response.text


def test_a_record_without_a_list_is_answered_next_to_a_record_with_a_list(model: PyFuncModel) -> None:
    records = [
        {"user_id": USER_IDS[0]},
        {"list": ["user.list 2"]},
        {"weighted_list": ["user.weighted_list 2"], "weights": [2.0]},
    ]
    answers = model.predict(pd.DataFrame(records), params={"k": 3})
    answers_alone = [model.predict(pd.DataFrame([record]), params={"k": 3})[0] for record in records]
    assert [answer["error"] for answer in answers] == [None, None, None]
    assert [answer["item_ids"] for answer in answers] == [answer["item_ids"] for answer in answers_alone]
    assert [answer["fallback"] for answer in answers] == [None, "features", "features"]
