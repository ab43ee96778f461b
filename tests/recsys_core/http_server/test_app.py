"""The HTTP application: its answers compared with the Retriever, and the requests that it rejects."""

import threading
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings

from recsys_core.http_server.api import request_bodies
from recsys_core.http_server.batching import Batcher, ParsedRequest, QueueFullError
from recsys_core.http_server.config import ServeConfig
from recsys_core.http_server.follower import ReleaseFollower
from recsys_core.serving.requests import PARAMS
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.http_server.conftest import ClientStarter
from tests.recsys_core.serving.conftest import ITEM_IDS, USER_IDS

TOKEN = "a-token-of-24-characters"  # noqa: S105
REQUEST_ROW = {"user_id": USER_IDS[0]}


def recommend(client: TestClient, rows: list[Any], **params: Any) -> list[dict[str, Any]]:
    response = client.post("/recommend", json={"rows": rows, "params": params})
    assert response.status_code == 200, response.text
    predictions: list[dict[str, Any]] = response.json()["predictions"]
    return predictions


def test_a_response_has_the_answers_of_the_retriever(start_client: ClientStarter, retriever: Retriever) -> None:
    rows = [{"user_id": USER_IDS[4]}, {"history": ITEM_IDS[:3]}, {"user_id": 1, "history": ["no item"]}, {}]
    predictions = recommend(start_client(), rows, k=6)
    expected_answers = retriever.recommend([USER_IDS[4], None, 1, None], 6, histories=[None, ITEM_IDS[:3], ["no item"], None])
    for prediction, answer in zip(predictions, expected_answers, strict=True):
        assert prediction["item_ids"] == answer.item_ids
        assert prediction["scores"] == pytest.approx(answer.scores)
        assert (prediction["fallback"], prediction["num_unknown_items"]) == (answer.fallback, answer.num_unknown_items)
        assert (prediction["version"], prediction["space_id"], prediction["error"]) == ("7", retriever.space_id, None)
        assert "query_vector" not in prediction


def test_params_reach_the_retriever(start_client: ClientStarter, retriever: Retriever) -> None:
    item_filter = {"genre": {"in": ["rock"]}, "price": {"lt": 20}}
    (prediction,) = recommend(
        start_client(), [REQUEST_ROW], k=4, filter=item_filter, exclude=ITEM_IDS[:50], exclude_seen=False, with_vectors=True
    )
    (expected_answer,) = retriever.recommend(
        [USER_IDS[0]], 4, filter=item_filter, exclude=ITEM_IDS[:50], exclude_seen=False, with_vectors=True
    )
    assert prediction["item_ids"] == expected_answer.item_ids
    assert prediction["query_vector"] == pytest.approx(expected_answer.query_vector)
    assert len(prediction["item_vectors"]) == 4


def test_a_request_without_k_gets_at_most_max_k_items(start_client: ClientStarter) -> None:
    client = start_client(max_k=4, max_results=4)
    assert len(recommend(client, [REQUEST_ROW])[0]["item_ids"]) == 4
    response = client.post("/similar", json={"rows": [{"item_id": ITEM_IDS[3]}]})
    assert len(response.json()["predictions"][0]["item_ids"]) == 4
    assert "each row gets 4 items" in client.get("/openapi.json").text
    assert len(recommend(start_client(), [REQUEST_ROW])[0]["item_ids"]) == 10


def test_similar_items_are_the_items_of_the_retriever(start_client: ClientStarter, retriever: Retriever) -> None:
    response = start_client().post(
        "/similar", json={"rows": [{"item_id": ITEM_IDS[3]}, {"item_id": "no item"}], "params": {"k": 5}}
    )
    prediction, prediction_for_unknown_id = response.json()["predictions"]
    assert prediction["item_ids"] == retriever.similar([ITEM_IDS[3]], 5)[0].item_ids
    assert prediction_for_unknown_id["error"] == "item_id 'no item' is not in the catalogue"


@pytest.mark.parametrize(
    ("body", "status", "expected_reason"),
    [
        ("{", 400, "the body is not JSON"),
        ('{"rows": [{"user_id": NaN}]}', 400, "the body is not JSON"),
        ("[]", 422, "the body is an array; it must be a JSON object"),
        ("{}", 422, "rows is missing; add it"),
        ('{"rows": []}', 422, "rows: the list should have at least 1 item, not 0"),
        ('{"rows": [3]}', 422, "rows.0 is 3; it must be a JSON object"),
        ('{"rows": [{"user_id": 1.5}]}', 422, "rows.0.user_id is 1.5; it must be a valid integer"),
        ('{"rows": [{"user_id": "x"}]}', 422, "rows.0: user_id 'x' is not an integer"),
        ('{"rows": [{"history": 3}]}', 422, "rows.0.history is 3; it must be an array"),
        ('{"rows": [{"usr": 1}]}', 422, "unknown column ['usr']"),
        ('{"rows": [{}], "params": {"k": 0}}', 422, "params.k is 0; it must be greater than or equal to 1"),
        ('{"rows": [{}], "params": {"k": -3}}', 422, "params.k is -3; it must be"),
        ('{"rows": [{}], "params": {"k": 1000000}}', 422, "params.k is 1000000; it must be less than or equal to 1000"),
        ('{"rows": [{}], "params": {"k": true}}', 422, "params.k is true; it must be a valid integer"),
        ('{"rows": [{}], "params": {"K": 3}}', 422, "unknown field 'params.K'; see the schema at /openapi.json"),
        ('{"rows": [{}], "params": {"list": 3}}', 422, "unknown field 'params.list'; see the schema at /openapi.json"),
        ('{"rows": [{}], "params": {"filter": {"colour": {"in": ["red"]}}}}', 422, "colour"),
        ('{"rows": [{"history": [' + ",".join(["1"] * 100_000) + "]}]}", 422, "rows.0.history: the list should have at most"),
        ('{"rows": [{}], "params": {"filter": {"price": ' + "[" * 999 + "]" * 999 + "}}}", 422, "filter: has too many levels"),
        ('{"rows": [' + ",".join(["{}"] * 900) + '], "params": {"k": 900}}', 422, "900 rows with k = 900 are 810000 items"),
    ],
)  # fmt: skip
def test_an_invalid_request_gets_a_status_and_a_reason(
    start_client: ClientStarter, body: str, status: int, expected_reason: str
) -> None:
    response = start_client().post("/recommend", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    assert expected_reason in response.json()["error"]


def test_a_filter_is_rejected_whatever_its_number_of_levels(start_client: ClientStarter) -> None:
    client = start_client()
    for num_levels in range(940, 1_000):  # Python's JSON encoder accepts a few levels more than its decoder
        body = '{"rows": [{}], "params": {"filter": {"price": ' + "[" * num_levels + "]" * num_levels + "}}}"
        response = client.post("/recommend", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 422 and response.json()["error"].startswith("filter: "), num_levels


def test_an_invalid_row_does_not_affect_another_row(start_client: ClientStarter) -> None:
    prediction_for_invalid_row, prediction = recommend(start_client(), [{"user_id": "x"}, REQUEST_ROW], k=2)
    assert prediction_for_invalid_row["error"].startswith("user_id 'x' is not an integer")
    assert prediction_for_invalid_row["item_ids"] == []
    assert prediction["error"] is None and len(prediction["item_ids"]) == 2


def test_a_large_body_and_another_content_type_are_refused(start_client: ClientStarter) -> None:
    client = start_client(max_body_bytes=2_000)
    response = client.post("/recommend", json={"rows": [{"history": list(range(3_000))}]})
    assert (response.status_code, response.json()["error"]) == (
        413,
        "the body is larger than 2,000 bytes; send fewer rows per request",
    )
    response = client.post("/recommend", content=b"user_id=3", headers={"Content-Type": "text/plain"})
    assert (response.status_code, response.json()["error"]) == (415, "the content type is 'text/plain'; send application/json")


def test_with_a_token_only_requests_that_have_it_are_answered(start_client: ClientStarter) -> None:
    client = start_client(token=TOKEN)
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
        response = client.post("/recommend", json={"rows": [REQUEST_ROW]}, headers=header)
        assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer")
    accepted_response = client.post("/recommend", json={"rows": [REQUEST_ROW]}, headers={"Authorization": f"Bearer {TOKEN}"})
    assert accepted_response.status_code == 200
    assert client.get("/metrics").status_code == 401
    for path in ("/healthz", "/readyz", "/openapi.json"):  # a probe of an orchestrator has no token
        assert client.get(path).status_code == 200, path


def test_readyz_reports_the_version_and_an_unknown_path_gets_a_hint(start_client: ClientStarter) -> None:
    client = start_client()
    assert client.get("/readyz").json() == {
        "status": "ready",
        "version": "7",
        "problem": None,
        "registry": {"answered_at": "1970-01-01T00:00:00Z", "down_since": None, "problem": None},
    }
    response = client.get("/nothing")
    assert (response.status_code, response.json()["error"]) == (404, "Not Found; the paths and methods are in /openapi.json")


def test_a_wrong_method_gets_status_405(start_client: ClientStarter) -> None:
    response = start_client().get("/recommend")
    assert (response.status_code, response.headers["Allow"]) == (405, "POST")


def test_a_request_without_an_answer_in_time_gets_status_504(
    start_client: ClientStarter, follower: ReleaseFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_timed_out, respond = threading.Event(), follower.respond

    def respond_too_late(queries: Sequence[ParsedRequest]) -> Any:
        has_timed_out.wait(30)
        return respond(queries)

    monkeypatch.setattr(follower, "respond", respond_too_late)
    client = start_client(timeout_s=0.2)
    response = client.post("/recommend", json={"rows": [REQUEST_ROW]})
    has_timed_out.set()
    assert response.status_code == 504 and response.json()["error"].startswith("there was no answer in time")


def test_a_request_that_the_full_queue_refuses_gets_status_503(
    start_client: ClientStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Batcher, "submit", Mock(side_effect=QueueFullError))
    response = start_client().post("/recommend", json={"rows": [REQUEST_ROW]})
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")


def test_an_unexpected_exception_gets_status_500_and_the_next_request_is_answered(
    start_client: ClientStarter, follower: ReleaseFollower, monkeypatch: Any
) -> None:
    client = start_client()

    def fail(queries: object) -> None:
        raise RuntimeError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(follower._served_model, "respond", fail)
        response = client.post("/recommend", json={"rows": [REQUEST_ROW]})
    assert (response.status_code, response.json()) == (500, {"error": "the server could not answer; the reason is in its log"})
    assert client.post("/recommend", json={"rows": [REQUEST_ROW]}).status_code == 200


@pytest.mark.parametrize("path", ["/recommend", "/similar"])
def test_generated_requests_get_documented_statuses_and_never_5xx(start_client: ClientStarter, path: str) -> None:
    client = start_client()
    operation = schemathesis.openapi.from_dict(client.get("/openapi.json").json())[path]["POST"]

    @settings(max_examples=50, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def check_status(case: Any) -> None:
        response = client.post(path, json=case.body)
        assert response.status_code in (200, 422), (response.status_code, response.text, case.body)

    check_status()


def test_the_openapi_document_names_the_token_and_the_answers_of_the_get_requests(start_client: ClientStarter) -> None:
    paths = start_client(token=TOKEN).get("/openapi.json").json()["paths"]
    assert [path for path, operations in paths.items() if "security" in next(iter(operations.values()))] == [
        *("/recommend", "/similar", "/metrics")
    ]
    assert [*paths["/metrics"]["get"]["responses"]] == ["200", "401", "500"]
    readiness_schema = paths["/readyz"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert readiness_schema == {"$ref": "#/components/schemas/Readiness"}


def test_the_schema_of_the_params_has_every_param_of_a_request() -> None:
    params = request_bodies(ServeConfig()).recommend.model_json_schema()["$defs"]["Params"]["properties"]
    assert tuple(params) == PARAMS
