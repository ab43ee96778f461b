"""The files of a package: each is listed and needed, and an error about a changed file names it."""

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.errors import StageError
from recsys_core.manifests import ExportManifest, IndexManifest, PackageManifest, record_file, require_manifest
from recsys_core.models.config import PackageConfig
from recsys_core.retrieval.ivf import IvfFlat
from recsys_core.retrieval.kinds import AnyIndexKind
from recsys_core.retrieval.search import search_exhaustively
from recsys_core.serving.contents import read_package
from recsys_core.serving.description import DESCRIPTION_NAME, description_sha256, verify_users
from recsys_core.serving.package import build_package
from recsys_core.serving.retriever import Retriever
from recsys_core.serving.users.mapped_file import write_block_checksums
from tests.recsys_core.refresh.small_pipeline import build_pipeline
from tests.recsys_core.serving.conftest import DIM, ITEM_IDS, NUM_ITEMS, NUM_USERS, USER_FEATURES, USER_IDS, ModelBuilder


@pytest.fixture(scope="module")
def package_manifest(build_packaged_model: ModelBuilder) -> PackageManifest:
    return build_packaged_model(
        index_kind="ivf_flat", quantization="int8", learn_user_embedding=True, features=USER_FEATURES
    ).package


@pytest.fixture
def package_copy(package_manifest: PackageManifest, tmp_path: Path) -> Path:
    """A copy of the package folder, which a test may change."""
    return Path(shutil.copytree(package_manifest.folder / "package", tmp_path / "package"))


def edit_description(folder: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """Edit package.json and return its new sha256."""
    path = folder / DESCRIPTION_NAME
    description = json.loads(path.read_bytes())
    change(description)
    path.write_text(json.dumps(description))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def update_record(folder: Path, name: str) -> str:
    """Update the size and checksum of the file `name` in package.json. Return the new sha256 of package.json."""
    record = record_file(folder / name).model_dump()
    return edit_description(folder, lambda description: description["files"].update({name: record}))


def test_every_file_of_the_package_is_listed_and_needed(package_manifest: PackageManifest) -> None:
    names = {path.name for path in (package_manifest.folder / "package").iterdir()}
    contents = read_package(package_manifest.folder / "package", sha256=description_sha256(package_manifest))
    assert names == contents.package.file_names | {DESCRIPTION_NAME} == contents.package.files.keys() | {DESCRIPTION_NAME}


def test_an_error_about_a_flipped_bit_or_a_missing_file_names_the_file(
    package_manifest: PackageManifest, package_copy: Path
) -> None:
    for path in sorted(package_copy.iterdir()):
        content = path.read_bytes()
        for offset in (0, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
            with pytest.raises(StageError, match=path.name):
                read_package(package_copy, sha256=description_sha256(package_manifest))
        path.unlink()
        with pytest.raises(StageError, match=path.name):
            read_package(package_copy, sha256=description_sha256(package_manifest))
        path.write_bytes(content)
    read_package(package_copy, sha256=description_sha256(package_manifest))


def test_an_error_about_a_surplus_file_names_the_file(package_manifest: PackageManifest, package_copy: Path) -> None:
    (package_copy / "user.more.row.npy").touch()
    with pytest.raises(StageError, match=r"user.more.row.npy: package.json does not list this file"):
        read_package(package_copy, sha256=description_sha256(package_manifest))


@pytest.mark.parametrize(
    "change",
    [
        lambda description: description["files"].pop("popularity.npy"),
        lambda description: description["model"]["config"]["history"].update(pooling="sum"),
        lambda description: description.update(similarity="dot"),
    ],
    ids=["without a file", "other pooling", "other similarity"],
)
def test_an_edited_description_is_rejected_even_if_it_is_valid(
    package_manifest: PackageManifest, package_copy: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    edit_description(package_copy, change)
    with pytest.raises(StageError, match=r"package.json: the sha256 is \w+, but the file was written with"):
        read_package(package_copy, sha256=description_sha256(package_manifest))


def test_an_error_about_another_format_is_one_line_with_both_formats(package_copy: Path) -> None:
    sha256 = edit_description(package_copy, lambda description: description.update(format_version=3, removed_setting=True))
    with pytest.raises(StageError, match=r"^\S+package.json: the package has format 3, .* reads format 8; .* nightjar .*\w$"):
        read_package(package_copy, sha256=sha256)


def test_a_package_with_updated_records_loads_only_with_the_new_checksum_of_its_description(
    package_manifest: PackageManifest, package_copy: Path
) -> None:
    item_row_I = np.load(package_copy / "popularity.npy")
    np.save(package_copy / "popularity.npy", item_row_I[::-1])
    sha256 = update_record(package_copy, "popularity.npy")
    with pytest.raises(StageError, match=r"package.json: the sha256 is"):
        read_package(package_copy, sha256=description_sha256(package_manifest))
    assert (read_package(package_copy, sha256=sha256).popularity.item_row_I == item_row_I[::-1]).all()


def _npy_content(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def _items_content(ids: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"item_id": ids}), file)
    return file.getvalue()


def _index_content(num_items: int, dim: int) -> bytes:
    index = faiss.IndexFlatIP(dim)
    index.add(np.ones((num_items, dim), np.float32))
    return faiss.serialize_index(index).tobytes()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, b"") for name in ("tower.safetensors", "index.faiss", "items.parquet", "popularity.npy")),
        *((name, b"\x93NUMPY garbage" * 9) for name in ("tower.safetensors", "index.faiss", "users.arrow")),
        ("popularity.npy", _npy_content(np.zeros(NUM_ITEMS, np.int32))),
        ("popularity.npy", _npy_content(np.arange(NUM_ITEMS, dtype=np.int64))),
        ("popularity_share.npy", _npy_content(np.zeros(NUM_ITEMS - 1, np.float32))),
        ("items.parquet", _items_content(ITEM_IDS[1:])),
        ("index.faiss", _index_content(NUM_ITEMS - 1, DIM)),
        ("index.faiss", _index_content(NUM_ITEMS, DIM + 4)),
        ("index.faiss", _index_content(NUM_ITEMS, DIM)),  # of another kind than the configured one
    ],
)
def test_contents_that_do_not_fit_together_are_rejected_even_with_valid_checksums(
    package_copy: Path, name: str, content: bytes
) -> None:
    (package_copy / name).write_bytes(content)
    with pytest.raises(StageError, match=name):
        read_package(package_copy, sha256=update_record(package_copy, name))


def test_an_index_for_another_similarity_is_rejected(package_copy: Path) -> None:
    index = faiss.IndexIDMap(faiss.IndexFlatL2(DIM))
    index.add_with_ids(np.ones((NUM_ITEMS, DIM), np.float32), np.arange(NUM_ITEMS))
    faiss.write_index(index, str(package_copy / "index.faiss"))
    with pytest.raises(StageError, match=r"index.faiss: the file has an index with FAISS metric 1, but the model needs inner"):
        read_package(package_copy, sha256=update_record(package_copy, "index.faiss"))


def test_an_index_of_other_vectors_than_the_export_is_not_packaged(package_manifest: PackageManifest, tmp_path: Path) -> None:
    folder = package_manifest.folder.parent
    index_manifest, export_manifest = (
        require_manifest(folder / name, manifest_type)
        for name, manifest_type in (("index", IndexManifest), ("export", ExportManifest))
    )
    other_index_manifest = index_manifest.model_copy(update={"dim": DIM + 1, "similarity": "dot"})
    unread_stages = {"dataset": None, "evaluation": None}  # the error is raised before they are read
    message = rf"has {NUM_ITEMS} vectors of width {DIM + 1} for dot similarity, but the export .* has {NUM_ITEMS} vectors of"
    with pytest.raises(StageError, match=message):
        build_package(
            PackageConfig(), export=export_manifest, index=other_index_manifest, folder=tmp_path / "package", **unread_stages
        )  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


def test_verify_users_rejects_a_changed_and_a_missing_user_file(package_copy: Path) -> None:
    verify_users(package_copy)
    content = bytearray((package_copy / "users.arrow").read_bytes())
    content[-300] ^= 1
    (package_copy / "users.arrow").write_bytes(content)
    with pytest.raises(StageError, match=r"users.arrow: the file was changed after it was written"):
        verify_users(package_copy)
    (package_copy / "users.arrow").unlink()
    with pytest.raises(StageError, match=r"package: cannot be verified \(FileNotFoundError"):
        verify_users(package_copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.slice(1), rf"the file has {NUM_USERS - 1} rows of user_id int64, .* needs {NUM_USERS} rows"),
        (lambda table: table.drop_columns(["user.list"]), "needs 40 rows .*user.list large_list"),
        (lambda table: table.append_column("user.more", table["user_id"]), "the file has 40 rows .*user.more int64"),
        (
            lambda table: _with_column(table, "history", pa.array([[NUM_ITEMS]] * NUM_USERS, pa.large_list(pa.int32()))),
            "but .* 0 to 299",
        ),
        (
            lambda table: _with_column(table, "user.single", pa.array([10_000] * NUM_USERS, pa.int32())),
            "but the model needs 0 to",
        ),
        (
            lambda table: _with_column(table, "bucket_rows", pa.array([[-1]] * NUM_USERS, pa.list_(pa.int32()))),
            "values -1 to -1",
        ),
        (lambda table: _with_column(table, "user.number.weight", pa.array([1.0] * NUM_USERS)), "user.number.weight double"),
    ],
)
def test_a_user_file_of_another_model_is_rejected(
    package_copy: Path, change: Callable[[pa.Table], pa.Table], message: str
) -> None:
    with pa.memory_map(str(package_copy / "users.arrow")) as file:
        users = change(pa.ipc.open_file(file).read_all())
        with pa.OSFile(str(package_copy / "changed.arrow"), "wb") as sink, pa.ipc.new_file(sink, users.schema) as writer:
            writer.write_table(users.combine_chunks())
    (package_copy / "changed.arrow").replace(package_copy / "users.arrow")
    write_block_checksums(package_copy / "users.arrow", package_copy / "users.sha256")
    for name in ("users.arrow", "users.sha256"):
        sha256 = update_record(package_copy, name)
    with pytest.raises(StageError, match=f"users.arrow: .*{message}"):
        Retriever.load(package_copy, sha256=sha256, verify=False).recommend(USER_IDS)


def _with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


def test_an_index_is_rejected_if_a_shard_repeats_another_shard_or_is_not_used(
    build_packaged_model: ModelBuilder, tmp_path: Path
) -> None:
    exported_model, package = build_packaged_model(index_kind="ivf_flat", num_index_shards=3)
    package_copy = Path(shutil.copytree(package.folder / "package", tmp_path / "package"))
    query_BD = np.random.default_rng(0).normal(size=(5, DIM)).astype(np.float32)
    _, row_BK = search_exhaustively(Retriever.load(package_copy)._index, query_BD, kind=IvfFlat(), depth=9)
    assert np.array_equal(row_BK, np.argsort(-query_BD @ exported_model.item_vectors.T, axis=1)[:, :9])
    sha256 = update_record(package_copy, "index.1.faiss")
    content_of_shard_0 = (package_copy / "index.0.faiss").read_bytes()
    (package_copy / "index.0.faiss").write_bytes((package_copy / "index.1.faiss").read_bytes())
    with pytest.raises(StageError, match=r"index\.0\.faiss: the file has .* the file was changed"):
        read_package(package_copy, sha256=sha256)
    with pytest.raises(StageError, match=r"differs|answer"):
        Retriever.load(package_copy, sha256=update_record(package_copy, "index.0.faiss"))
    (package_copy / "index.0.faiss").write_bytes(content_of_shard_0)
    update_record(package_copy, "index.0.faiss")
    with pytest.raises(StageError, match=r"index\.2\.faiss: package.json lists it, but the model does not use it"):
        read_package(
            package_copy, sha256=edit_description(package_copy, lambda description: description.update(index_shards=2))
        )


def test_a_mapped_index_returns_the_results_of_an_index_in_memory(build_packaged_model: ModelBuilder) -> None:
    for kind_class in get_args(get_args(AnyIndexKind)[0]):
        _, package = build_packaged_model(index_kind=kind_class.model_fields["kind"].default)
        path = package.folder / "package" / "index.faiss"
        index = Retriever.load(package.folder)._index
        assert str(path) in Path("/proc/self/maps").read_text(), kind_class
        query_BD = np.random.default_rng(0).normal(size=(5, DIM)).astype(np.float32)
        expected_arrays = faiss.read_index(str(path)).search(query_BD, 7)
        for mapped_array, expected_array in zip(index.search(query_BD, 7), expected_arrays, strict=True):
            assert (mapped_array == expected_array).all(), kind_class


def test_a_package_with_a_huge_number_of_shards_is_rejected_before_the_names_of_the_shards_are_made(package_copy: Path) -> None:
    sha256 = edit_description(package_copy, lambda description: description.update(index_shards=10**9))
    with pytest.raises(StageError, match=r"(?s)package\.json: .*index_shards.*less than or equal to 1024"):
        read_package(package_copy, sha256=sha256)


def _member_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path (keys and indices) of each member of a JSON value, at any depth. path: the path of `value` itself."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    nested_paths = [nested for key, member in members for nested in _member_paths(member, (*path, key))]
    return [path, *nested_paths] if path else nested_paths


@given(st.data())
def test_a_package_with_one_changed_description_value_answers_or_an_error_names_its_folder(
    package_manifest: PackageManifest, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("edited")
    for path in (package_manifest.folder / "package").iterdir():
        (folder / path.name).hardlink_to(path)
    (folder / DESCRIPTION_NAME).unlink()
    description = json.loads((package_manifest.folder / "package" / DESCRIPTION_NAME).read_bytes())
    *parent_keys, last_key = data.draw(st.sampled_from(_member_paths(description)))
    parent = description
    for key in parent_keys:
        parent = parent[key]
    if data.draw(st.booleans()):
        del parent[last_key]
    else:
        parent[last_key] = data.draw(
            st.sampled_from([None, 0, -1, 7, 10**9, 0.5, "", "hnsw", "none", "sum", "dot", [], {}, True])
        )
    content = json.dumps(description).encode()
    (folder / DESCRIPTION_NAME).write_bytes(content)
    try:
        retriever = Retriever.load(folder, sha256=hashlib.sha256(content).hexdigest())
    except StageError as error:
        assert str(folder) in str(error)
    else:
        assert len(retriever.recommend([1], k=3)[0].item_ids) == 3


def test_a_package_does_not_depend_on_the_number_of_log_shards(tmp_path: Path) -> None:
    folder, sharded_folder = (
        build_pipeline(tmp_path / str(num_shards), shards=num_shards).package_folder for num_shards in (1, 7)
    )
    file_names = {path.name for path in folder.iterdir()} - {"package.json"}
    assert "users.arrow" in file_names and file_names == {path.name for path in sharded_folder.iterdir()} - {"package.json"}
    for name in file_names:
        assert (folder / name).read_bytes() == (sharded_folder / name).read_bytes(), name
