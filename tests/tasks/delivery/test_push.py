"""A push to each kind of vector store, with the real libraries: LanceDB, Qdrant's local mode and Milvus Lite."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from pydantic import TypeAdapter

from recsys_core.errors import InputError, StageError
from recsys_core.manifests import PackageManifest
from recsys_core.serving.golden import golden_vectors
from recsys_core.serving.retriever import Retriever
from tasks.delivery import lancedb_store, vector_store
from tasks.delivery.config import AnyStore, DeliveryConfig, StoreConfig
from tasks.delivery.push import exact_top_scores, push, push_to_all
from tasks.delivery.vector_store import VectorStore
from tests.recsys_core.serving.conftest import ITEM_FILES, ITEM_IDS, NUM_ITEMS, build_packaged_model  # noqa: F401  a fixture

KINDS = ("lancedb", "qdrant", "milvus")
STORE_ADAPTER: TypeAdapter[AnyStore] = TypeAdapter(StoreConfig)


@pytest.fixture(scope="session")
def package(build_packaged_model: Callable[..., Any]) -> PackageManifest:  # noqa: F811
    manifest: PackageManifest = build_packaged_model(item_files=ITEM_FILES).package
    return manifest


@pytest.fixture(params=KINDS)
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> AnyStore:
    return store_settings(request.param, tmp_path)


def store_settings(kind: str, folder: Path, **options: Any) -> AnyStore:
    """Return the settings of a store of this kind with its files in `folder`."""
    location = {"file": folder / "milvus.db"} if kind == "milvus" else {"folder": folder / kind}
    return STORE_ADAPTER.validate_python({"kind": kind, **location, **options})


def load_version(package: PackageManifest, number: int) -> Retriever:
    return Retriever.load(package.folder, version=str(number))


def collection_name(retriever: Retriever) -> str:
    return f"films_v{retriever.version}_{retriever.space_id}"


def aliased_collection(settings: AnyStore) -> str | None:
    """Return the collection that the alias names."""
    with settings.connect() as store:
        return store.aliased_collection("films")


def read_collections(settings: AnyStore) -> tuple[str | None, list[str]]:
    """Return the collection that the alias names, and all collections of the store."""
    with settings.connect() as store:
        return store.aliased_collection("films"), sorted(store.collections())


def test_a_store_returns_the_ids_of_the_exact_best_items(settings: AnyStore, package: PackageManifest) -> None:
    retriever = load_version(package, 1)
    push_result = push(retriever, settings, model_name="films")
    assert (push_result.collection, push_result.num_loaded, push_result.overlap) == (collection_name(retriever), NUM_ITEMS, 1.0)
    assert read_collections(settings) == (collection_name(retriever), [collection_name(retriever)])
    query_BD = golden_vectors(retriever)
    assert len(query_BD) > 20
    with settings.connect() as store:
        nearest_ids_by_query = store.search(collection_name(retriever), query_BD, 10)
        assert store.count(collection_name(retriever)) == NUM_ITEMS
    item_vector_ID = retriever.item_vectors(np.arange(NUM_ITEMS))
    for query_D, nearest_ids in zip(query_BD, nearest_ids_by_query, strict=True):
        assert nearest_ids == [ITEM_IDS[row] for row in np.argsort(-(item_vector_ID @ query_D), kind="stable")[:10]]


def test_titles_and_filter_columns_are_stored(package: PackageManifest, tmp_path: Path) -> None:
    import lancedb
    import pymilvus
    import qdrant_client

    retriever = load_version(package, 1)
    for kind in KINDS:
        push(retriever, store_settings(kind, tmp_path), model_name="films")
    item_row = 4  # the item of this row has a title and the genre pop
    collection = lancedb.connect(tmp_path / "lancedb").open_table(collection_name(retriever))
    search = collection.search().where(f"item_id = '{ITEM_IDS[item_row]}'")
    (lancedb_item,) = search.select(["title", "genre", "price", "is_new"]).to_list()
    assert lancedb_item == {"title": "title 4", "genre": "pop", "price": 4.0, "is_new": True}
    client = qdrant_client.QdrantClient(path=str(tmp_path / "qdrant"))
    models = qdrant_client.models
    condition = models.FieldCondition(key="since", range=models.DatetimeRange(gte="2026-01-05", lt="2026-01-06"))
    (qdrant_point,), _ = client.scroll("films", scroll_filter=models.Filter(must=[condition]))
    client.close()
    assert qdrant_point.payload == {
        "item_id": ITEM_IDS[item_row], "title": "title 4", "genre": "pop", "price": 4.0, "stock": 4, "is_new": True,
        "since": "2026-01-05T00:00:00.000000Z",
    }  # fmt: skip
    with store_settings("milvus", tmp_path).connect():
        milvus = pymilvus.MilvusClient(str(tmp_path / "milvus.db"))
        milvus.load_collection("films")
        day_us = 86_400_000_000
        since_filter = f"since >= {20_458 * day_us} and since < {20_459 * day_us}"  # 20,458 days from 1970 to 2026-01-05
        (milvus_item,) = milvus.query(
            "films", filter=since_filter, output_fields=["item_id", "title", "genre", "stock", "is_new"]
        )
    assert milvus_item == {"item_id": ITEM_IDS[item_row], "title": "title 4", "genre": "pop", "stock": 4, "is_new": True}


@pytest.mark.parametrize("item_ids", [[-5, 0, 2**62], ["a b", "ü", "0"]], ids=["integers", "strings"])
def test_integer_ids_and_string_ids_are_returned_unchanged(settings: AnyStore, item_ids: list[Any]) -> None:
    vector_column = pa.FixedSizeListArray.from_arrays(pa.array(np.eye(3, 4, dtype=np.float32).reshape(-1)), 4)
    prices = pa.array([None, float("inf"), float("nan")])
    items = pa.table({"item_id": item_ids, "price": prices, "vector": vector_column})
    with settings.connect() as store:
        store.create("three_items", items.schema)
        store.add("three_items", items)
        store.finish("three_items")
        nearest_ids = store.search("three_items", np.eye(3, 4, dtype=np.float32), 1)
    assert nearest_ids == [[item_id] for item_id in item_ids]


def test_a_push_keeps_the_previous_collection_and_drops_older_ones(settings: AnyStore, package: PackageManifest) -> None:
    retrievers = [load_version(package, number) for number in (1, 2, 3)]
    for retriever in retrievers:
        push(retriever, settings, model_name="films")
    collection_names = [collection_name(retriever) for retriever in retrievers]
    assert read_collections(settings) == (collection_names[2], collection_names[1:])
    repeated_push = push(retrievers[2], settings, model_name="films")
    assert repeated_push.num_loaded == 0
    assert read_collections(settings) == (collection_names[2], collection_names[1:])
    rollback = push(retrievers[1], settings, model_name="films")
    assert rollback.num_loaded == 0
    assert read_collections(settings) == (collection_names[1], collection_names[1:])


def test_the_collection_of_another_alias_in_the_same_store_is_kept(settings: AnyStore, package: PackageManifest) -> None:
    retriever = load_version(package, 1)
    for alias in ("films", "films_v2"):
        push(retriever, settings.model_copy(update={"alias": alias}), model_name="other")
    push(load_version(package, 2), settings, model_name="films")
    push(load_version(package, 3), settings, model_name="films")
    with settings.connect() as store:
        assert store.aliased_collection("films_v2") == f"films_v2_v1_{retriever.space_id}"
        assert store.count(f"films_v2_v1_{retriever.space_id}") == NUM_ITEMS


def test_a_crash_before_the_switch_keeps_the_alias_and_the_next_push_moves_it(
    settings: AnyStore, package: PackageManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_version, new_version = load_version(package, 1), load_version(package, 2)
    push(old_version, settings, model_name="films")
    connect = type(settings).connect

    @contextmanager
    def connect_and_interrupt_the_switch(self: AnyStore) -> Iterator[VectorStore]:
        with connect(self) as store:
            monkeypatch.setattr(store, "switch", Mock(side_effect=KeyboardInterrupt))
            yield store

    monkeypatch.setattr(type(settings), "connect", connect_and_interrupt_the_switch)
    with pytest.raises(KeyboardInterrupt):
        push(new_version, settings, model_name="films")
    monkeypatch.setattr(type(settings), "connect", connect)
    assert read_collections(settings) == (
        collection_name(old_version),
        [collection_name(old_version), collection_name(new_version)],
    )
    assert push(new_version, settings, model_name="films").num_loaded == 0
    assert read_collections(settings) == (
        collection_name(new_version),
        [collection_name(old_version), collection_name(new_version)],
    )


def test_a_push_loads_the_incomplete_collection_of_an_interrupted_push_again(
    settings: AnyStore, package: PackageManifest
) -> None:
    retriever = load_version(package, 1)
    with settings.connect() as store:
        first_items = next(retriever.item_batches(20)).replace_schema_metadata()
        store.create(collection_name(retriever), first_items.schema)
        store.add(collection_name(retriever), first_items)
        store.finish(collection_name(retriever))
    assert push(retriever, settings, model_name="films").num_loaded == NUM_ITEMS
    assert aliased_collection(settings) == collection_name(retriever)


def test_a_push_adds_the_missing_index_of_an_interrupted_push(package: PackageManifest, tmp_path: Path) -> None:
    import lancedb

    retriever, settings = load_version(package, 1), store_settings("lancedb", tmp_path, index="approximate", min_overlap=0.5)
    with settings.connect() as store:
        items = next(retriever.item_batches(NUM_ITEMS)).replace_schema_metadata()
        store.create(collection_name(retriever), items.schema)
        store.add(collection_name(retriever), items)
    for _ in range(2):  # the second push creates no second index
        assert push(retriever, settings, model_name="films").num_loaded == 0
        (index,) = lancedb.connect(tmp_path / "lancedb").open_table(collection_name(retriever)).list_indices()
        assert index.columns == ["vector"]


def test_a_push_of_wrong_vectors_fails_at_the_golden_queries_and_keeps_the_alias(
    settings: AnyStore, package: PackageManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_version, new_version = load_version(package, 1), load_version(package, 2)
    push(old_version, settings, model_name="films")
    item_batches = new_version.item_batches

    def item_batches_with_reversed_vectors(num_rows: int) -> Iterator[pa.Table]:
        for items in item_batches(num_rows):
            column_index = items.schema.get_field_index("vector")
            yield items.set_column(column_index, items.schema.field("vector"), items["vector"][::-1])

    monkeypatch.setattr(new_version, "item_batches", item_batches_with_reversed_vectors)
    with pytest.raises(StageError) as error_info:
        push(new_version, settings, model_name="films")
    message = str(error_info.value)
    assert f"the collection {collection_name(new_version)} returns " in message and "100.0 % are required" in message
    assert (
        f"the alias films names {collection_name(old_version)}. Remove the cause, and repeat the push with `nightjar push`"
        in message
    )
    assert aliased_collection(settings) == collection_name(old_version)
    monkeypatch.undo()
    assert push(new_version, settings, model_name="films").num_loaded == NUM_ITEMS


def test_a_damaged_collection_is_kept_while_the_alias_names_it(settings: AnyStore, package: PackageManifest) -> None:
    retriever = load_version(package, 1)
    push(retriever, settings, model_name="films")
    with settings.connect() as store:
        store.drop(collection_name(retriever))
        items = next(retriever.item_batches(20)).replace_schema_metadata()
        store.create(collection_name(retriever), items.schema)
        store.add(collection_name(retriever), items)
        store.finish(collection_name(retriever))
        store.switch("films", collection_name(retriever))
    with pytest.raises(StageError, match=r"has 20 items, but the version has 300; the alias names this collection, so it is"):
        push(retriever, settings, model_name="films")
    assert read_collections(settings) == (collection_name(retriever), [collection_name(retriever)])


def test_lancedb_finds_an_alias_among_more_tables_than_it_lists_at_once(
    package: PackageManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lancedb_store, "_TABLES_PER_PAGE", 2)
    settings = store_settings("lancedb", tmp_path)
    other_collections = ["a", "b", "c", "d"]  # with two tables per page, they come before the table of the aliases
    with settings.connect() as store:
        for name in other_collections:
            store.create(name, pa.schema({"item_id": pa.string()}))
    retriever = load_version(package, 1)
    push(retriever, settings, model_name="films")
    assert read_collections(settings) == (collection_name(retriever), [*other_collections, collection_name(retriever)])


@pytest.mark.parametrize("kind", ["lancedb", "milvus"])
def test_an_approximate_index_is_accepted_from_min_overlap_on(kind: str, package: PackageManifest, tmp_path: Path) -> None:
    retriever = load_version(package, 1)
    settings = store_settings(kind, tmp_path, index="approximate", min_overlap=0.5)
    assert 0.5 <= push(retriever, settings, model_name="films").overlap <= 1.0
    assert aliased_collection(settings) == collection_name(retriever)


def test_the_exact_top_scores_equal_the_scores_of_the_sorted_catalogue(package: PackageManifest) -> None:
    retriever = load_version(package, 1)
    query_BD = golden_vectors(retriever)[:3]
    expected_score_BK = -np.sort(-(query_BD @ retriever.item_vectors(np.arange(NUM_ITEMS)).T), axis=1)[:, :7]
    np.testing.assert_allclose(exact_top_scores(retriever, query_BD, k=7), expected_score_BK, rtol=1e-6)


def test_a_failed_push_to_one_store_does_not_stop_the_next_push(package: PackageManifest, tmp_path: Path) -> None:
    (tmp_path / "lancedb").write_text("a file, not a folder")
    stores = (store_settings("lancedb", tmp_path), store_settings("qdrant", tmp_path))
    push_results, alarms = push_to_all(load_version(package, 4), stores, model_name="films")
    assert [push_result.location for push_result in push_results] == [f"qdrant {tmp_path / 'qdrant'}"]
    (alarm,) = alarms
    assert alarm.startswith(f"version 4 was not pushed: lancedb {tmp_path / 'lancedb'}: ")
    assert "the alias films names no collection" in alarm


def test_the_api_key_comes_from_the_environment_and_is_in_no_message(
    package: PackageManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    api_keys = []

    class RefusingHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            api_keys.append(self.headers["api-key"])
            self.send_response(403)
            self.end_headers()
            self.wfile.write(b"forbidden")

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("QDRANT_API_KEY", "t0p-s3cret")
    with HTTPServer(("127.0.0.1", 0), RefusingHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        settings = STORE_ADAPTER.validate_python({"kind": "qdrant", "url": f"http://127.0.0.1:{server.server_port}"})
        with pytest.warns(UserWarning), pytest.raises(StageError) as error_info:  # the library warns about API keys without TLS
            push(load_version(package, 1), settings, model_name="films")
        server.shutdown()
    assert set(api_keys) == {"t0p-s3cret"}
    message = str(error_info.value)
    assert f"qdrant {settings.location.split()[1]}: UnexpectedResponse: " in message and "403" in message
    assert "s3cret" not in message


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


def test_an_error_names_the_missing_library_and_the_extra_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vector_store, "find_spec", lambda library: None)
    with pytest.raises(InputError, match="needs qdrant_client, which is not installed; install nightjar with the extra"):
        DeliveryConfig(stores=(store_settings("qdrant", tmp_path),)).require_libraries()
