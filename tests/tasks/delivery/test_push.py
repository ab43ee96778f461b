"""The contract of all vector stores, with their real libraries: LanceDB, Qdrant's local mode and Milvus Lite."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import TypeAdapter

from recsys_core.errors import InputError, StageError
from recsys_core.manifests import PackageManifest
from recsys_core.serving.golden import golden_vectors
from recsys_core.serving.retriever import Retriever
from tasks.delivery import vector_store
from tasks.delivery.config import AnyStore, DeliveryConfig, StoreConfig
from tasks.delivery.push import exact_top_scores, push, push_to_all
from tasks.delivery.vector_store import VectorStore
from tests.recsys_core.serving.conftest import ITEM_FILES, ITEM_IDS, NUM_ITEMS, build_packaged_model  # noqa: F401  a fixture

KINDS = ("lancedb", "qdrant", "milvus")
STORE: TypeAdapter[AnyStore] = TypeAdapter(StoreConfig)


@pytest.fixture(scope="session")
def package(build_packaged_model: Callable[..., Any]) -> PackageManifest:  # noqa: F811
    made: PackageManifest = build_packaged_model(item_files=ITEM_FILES)[1]
    return made


@pytest.fixture(params=KINDS)
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> AnyStore:
    return store(request.param, tmp_path)


def store(kind: str, folder: Path, **options: Any) -> AnyStore:
    place = {"file": folder / "milvus.db"} if kind == "milvus" else {"folder": folder / kind}
    return STORE.validate_python({"kind": kind, **place, **options})


def version(package: PackageManifest, number: int) -> Retriever:
    return Retriever.load(package.folder, version=str(number))


def name(retriever: Retriever) -> str:
    return f"films_v{retriever.version}_{retriever.space_id}"


def served(settings: AnyStore) -> tuple[str | None, list[str]]:
    """Return the collection of the alias, and all collections."""
    with settings.connect() as store:
        return store.target("films"), sorted(store.collections())


def test_the_best_items_of_a_store_are_the_exact_ones_with_their_ids(settings: AnyStore, package: PackageManifest) -> None:
    retriever = version(package, 1)
    pushed = push(retriever, settings, model_name="films")
    assert (pushed.collection, pushed.num_loaded, pushed.overlap) == (name(retriever), NUM_ITEMS, 1.0)
    assert served(settings) == (name(retriever), [name(retriever)])
    query_BD = golden_vectors(retriever)
    assert len(query_BD) > 20
    with settings.connect() as store:
        item_ids = store.search(name(retriever), query_BD, 10)
        assert store.count(name(retriever)) == NUM_ITEMS
    vectors = retriever.item_vectors(np.arange(NUM_ITEMS))
    for query, ids in zip(query_BD, item_ids, strict=True):
        assert ids == [ITEM_IDS[row] for row in np.argsort(-(vectors @ query), kind="stable")[:10]]


def test_titles_and_filter_columns_arrive(package: PackageManifest, tmp_path: Path) -> None:
    import lancedb
    import pymilvus
    import qdrant_client

    retriever = version(package, 1)
    for kind in KINDS:
        push(retriever, store(kind, tmp_path), model_name="films")
    row = 4  # it has a title, and genre pop
    rows = lancedb.connect(tmp_path / "lancedb").open_table(name(retriever)).search()
    (in_lancedb,) = rows.where(f"item_id = '{ITEM_IDS[row]}'").select(["title", "genre", "price", "is_new"]).to_list()
    assert in_lancedb == {"title": "title 4", "genre": "pop", "price": 4.0, "is_new": True}
    client = qdrant_client.QdrantClient(path=str(tmp_path / "qdrant"))
    models = qdrant_client.models
    condition = models.FieldCondition(key="since", range=models.DatetimeRange(gte="2026-01-05", lt="2026-01-06"))
    (point,), _ = client.scroll("films", scroll_filter=models.Filter(must=[condition]))
    client.close()
    assert point.payload == {
        "item_id": ITEM_IDS[row], "title": "title 4", "genre": "pop", "price": 4.0, "stock": 4, "is_new": True,
        "since": "2026-01-05T00:00:00.000000Z",
    }  # fmt: skip
    with store("milvus", tmp_path).connect():
        milvus = pymilvus.MilvusClient(str(tmp_path / "milvus.db"))
        milvus.load_collection("films")
        day_us = 86_400_000_000
        since = f"since >= {20_458 * day_us} and since < {20_459 * day_us}"  # 20,458 days from 1970 to 2026-01-05
        (found,) = milvus.query("films", filter=since, output_fields=["item_id", "title", "genre", "stock", "is_new"])
    assert found == {"item_id": ITEM_IDS[row], "title": "title 4", "genre": "pop", "stock": 4, "is_new": True}


@pytest.mark.parametrize("ids", [[-5, 0, 2**62], ["a b", "ü", "0"]])
def test_both_types_of_ids_come_back_as_they_went(settings: AnyStore, ids: list[Any]) -> None:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.eye(3, 4, dtype=np.float32).reshape(-1)), 4)
    prices = pa.array([1.0, None, float("nan")])
    items = pa.table({"item_id": ids, "price": prices, "vector": vectors})
    with settings.connect() as store:
        store.create("few", items.schema)
        store.add("few", items)
        store.finish("few")
        found = store.search("few", np.eye(3, 4, dtype=np.float32), 1)
    assert found == [[item_id] for item_id in ids]


def test_a_push_keeps_the_collection_before_and_drops_older_ones(settings: AnyStore, package: PackageManifest) -> None:
    versions = [version(package, number) for number in (1, 2, 3)]
    for retriever in versions:
        push(retriever, settings, model_name="films")
    names = [name(retriever) for retriever in versions]
    assert served(settings) == (names[2], names[1:])
    again = push(versions[2], settings, model_name="films")
    assert again.num_loaded == 0
    assert served(settings) == (names[2], names[1:])
    back = push(versions[1], settings, model_name="films")  # a rollback loads nothing
    assert back.num_loaded == 0
    assert served(settings) == (names[1], names[1:])


def test_another_alias_in_the_same_store_is_not_touched(settings: AnyStore, package: PackageManifest) -> None:
    retriever = version(package, 1)
    for alias in ("films", "films_v2"):
        push(retriever, settings.model_copy(update={"alias": alias}), model_name="other")
    push(version(package, 2), settings, model_name="films")
    push(version(package, 3), settings, model_name="films")
    with settings.connect() as store:
        assert store.target("films_v2") == f"films_v2_v1_{retriever.space_id}"
        assert store.count(f"films_v2_v1_{retriever.space_id}") == NUM_ITEMS


def test_a_crash_before_the_switch_leaves_the_alias_and_the_next_push_completes(
    settings: AnyStore, package: PackageManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_version, new_version = version(package, 1), version(package, 2)
    push(old_version, settings, model_name="films")
    connect = type(settings).connect

    @contextmanager
    def crashing(self: AnyStore) -> Iterator[VectorStore]:
        with connect(self) as store:
            monkeypatch.setattr(store, "switch", lambda alias, collection: (_ for _ in ()).throw(KeyboardInterrupt))
            yield store

    monkeypatch.setattr(type(settings), "connect", crashing)
    with pytest.raises(KeyboardInterrupt):
        push(new_version, settings, model_name="films")
    monkeypatch.setattr(type(settings), "connect", connect)
    assert served(settings) == (name(old_version), [name(old_version), name(new_version)])
    assert push(new_version, settings, model_name="films").num_loaded == 0
    assert served(settings) == (name(new_version), [name(old_version), name(new_version)])


def test_a_collection_that_an_interrupted_push_left_incomplete_is_loaded_again(
    settings: AnyStore, package: PackageManifest
) -> None:
    retriever = version(package, 1)
    with settings.connect() as store:
        part = next(retriever.item_batches(20)).replace_schema_metadata()
        store.create(name(retriever), part.schema)
        store.add(name(retriever), part)
        store.finish(name(retriever))
    assert push(retriever, settings, model_name="films").num_loaded == NUM_ITEMS
    assert served(settings)[0] == name(retriever)


def test_wrong_vectors_fail_the_golden_queries_and_the_alias_stays(
    settings: AnyStore, package: PackageManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_version, new_version = version(package, 1), version(package, 2)
    push(old_version, settings, model_name="films")
    batches = new_version.item_batches

    def shuffled(num_rows: int) -> Iterator[pa.Table]:
        for items in batches(num_rows):
            index = items.schema.get_field_index("vector")
            yield items.set_column(index, items.schema.field("vector"), items["vector"][::-1])

    monkeypatch.setattr(new_version, "item_batches", shuffled)
    with pytest.raises(StageError) as failure:
        push(new_version, settings, model_name="films")
    message = str(failure.value)
    assert f"the collection {name(new_version)} returns " in message and "100.0% are required" in message
    assert f"the alias films names {name(old_version)}. Remove the cause, and repeat the push with `nightjar push`" in message
    assert served(settings)[0] == name(old_version)
    monkeypatch.undo()
    assert push(new_version, settings, model_name="films").num_loaded == NUM_ITEMS


def test_a_served_collection_that_was_damaged_is_reported_and_stays(settings: AnyStore, package: PackageManifest) -> None:
    retriever = version(package, 1)
    push(retriever, settings, model_name="films")
    with settings.connect() as store:
        store.drop(name(retriever))
        items = next(retriever.item_batches(20)).replace_schema_metadata()
        store.create(name(retriever), items.schema)
        store.add(name(retriever), items)
        store.finish(name(retriever))
        store.switch("films", name(retriever))
    with pytest.raises(StageError, match=r"has 20 items, but the version has 300; the alias names this collection, so it is"):
        push(retriever, settings, model_name="films")
    assert served(settings) == (name(retriever), [name(retriever)])


@pytest.mark.parametrize("kind", ["lancedb", "milvus"])
def test_an_approximate_search_needs_a_share_of_the_exact_items(kind: str, package: PackageManifest, tmp_path: Path) -> None:
    retriever = version(package, 1)
    settings = store(kind, tmp_path, index="approximate", min_overlap=0.5)
    assert 0.5 <= push(retriever, settings, model_name="films").overlap <= 1.0
    assert served(settings)[0] == name(retriever)


def test_the_exact_scores_are_those_of_a_sorted_catalogue(package: PackageManifest) -> None:
    retriever = version(package, 1)
    query_BD = golden_vectors(retriever)[:3]
    expected = -np.sort(-(query_BD @ retriever.item_vectors(np.arange(NUM_ITEMS)).T), axis=1)[:, :7]
    np.testing.assert_allclose(exact_top_scores(retriever, query_BD, k=7), expected, rtol=1e-6)


def test_a_store_that_fails_does_not_stop_the_others(package: PackageManifest, tmp_path: Path) -> None:
    (tmp_path / "lancedb").write_text("a file, not a folder")
    stores = (store("lancedb", tmp_path), store("qdrant", tmp_path))
    pushed, alarms = push_to_all(version(package, 4), stores, model_name="films")
    assert [result.location for result in pushed] == [f"qdrant {tmp_path / 'qdrant'}"]
    (alarm,) = alarms
    assert alarm.startswith(f"version 4 was not pushed: lancedb {tmp_path / 'lancedb'}: ")
    assert "the alias films names no collection" in alarm


def test_the_key_of_a_server_comes_from_the_environment_and_is_in_no_message(
    package: PackageManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["api-key"])
            self.send_response(403)
            self.end_headers()
            self.wfile.write(b"forbidden")

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("QDRANT_API_KEY", "t0p-s3cret")
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        settings = STORE.validate_python({"kind": "qdrant", "url": f"http://127.0.0.1:{server.server_port}"})
        with pytest.warns(UserWarning), pytest.raises(StageError) as failure:  # the library warns of keys without TLS
            push(version(package, 1), settings, model_name="films")
        server.shutdown()
    assert set(keys) == {"t0p-s3cret"}
    assert f"qdrant {settings.location.split()[1]}: UnexpectedResponse: " in str(failure.value) and "403" in str(failure.value)
    assert "s3cret" not in str(failure.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "qdrant"}, "set either url, for a Qdrant server, or folder"),
        ({"kind": "milvus", "url": "http://a:1", "file": "/x.db"}, "set either url, for a Milvus server, or file"),
        ({"kind": "milvus", "file": "/x"}, "must end in .db"),
        ({"kind": "qdrant", "url": "http://user:secret@host"}, "should match pattern"),
        ({"kind": "milvus", "url": "http://host?token=secret"}, "should match pattern"),
        ({"kind": "lancedb", "folder": "/x", "alias": "a-b"}, "should match pattern"),
    ],
)
def test_an_invalid_store_is_rejected(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeliveryConfig.model_validate({"stores": [config]})


def test_a_missing_library_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vector_store, "find_spec", lambda library: None)
    with pytest.raises(InputError, match="needs qdrant_client, which is not installed; install nightjar with the extra"):
        DeliveryConfig(stores=(store("qdrant", tmp_path),)).require_libraries()
