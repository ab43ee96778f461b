"""Changed packages are rejected with the name of the changed file."""

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
from hypothesis import given, settings
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
from tests.recsys_core.serving.conftest import DIM, ITEM_IDS, NUM_ITEMS, NUM_USERS, USER_FEATURES, USER_IDS, Build


@pytest.fixture(scope="module")
def package_manifest(build: Build) -> PackageManifest:
    return build(index="ivf_flat", quantization="int8", learn_user_embedding=True, features=USER_FEATURES)[1]


@pytest.fixture
def copy(package_manifest: PackageManifest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(package_manifest.folder / "package", tmp_path / "package"))


def describe(folder: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """Edit package.json and return its new sha256."""
    path = folder / DESCRIPTION_NAME
    description = json.loads(path.read_bytes())
    change(description)
    path.write_text(json.dumps(description))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rehash(folder: Path, name: str) -> str:
    """Update the record of `name` in package.json and return the new sha256 of package.json."""
    record = record_file(folder / name).model_dump()
    return describe(folder, lambda description: description["files"].update({name: record}))


def test_every_file_of_the_package_is_listed_and_needed(package_manifest: PackageManifest) -> None:
    names = {path.name for path in (package_manifest.folder / "package").iterdir()}
    contents = read_package(package_manifest.folder / "package", sha256=description_sha256(package_manifest))
    assert names == contents.package.file_names | {DESCRIPTION_NAME} == contents.package.files.keys() | {DESCRIPTION_NAME}


def test_a_flipped_bit_or_a_missing_file_is_rejected_by_name(package_manifest: PackageManifest, copy: Path) -> None:
    for path in sorted(copy.iterdir()):
        content = path.read_bytes()
        for offset in (0, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
            with pytest.raises(StageError, match=path.name):
                read_package(copy, sha256=description_sha256(package_manifest))
        path.unlink()
        with pytest.raises(StageError, match=path.name):
            read_package(copy, sha256=description_sha256(package_manifest))
        path.write_bytes(content)
    read_package(copy, sha256=description_sha256(package_manifest))


def test_a_surplus_file_is_rejected_by_name(package_manifest: PackageManifest, copy: Path) -> None:
    (copy / "user.more.row.npy").touch()
    with pytest.raises(StageError, match=r"user.more.row.npy: package.json does not list this file"):
        read_package(copy, sha256=description_sha256(package_manifest))


@pytest.mark.parametrize(
    "change",
    [
        lambda description: description["files"].pop("popularity.npy"),
        lambda description: description["model"]["config"]["history"].update(pooling="sum"),
        lambda description: description.update(similarity="dot"),
    ],
)
def test_an_edited_description_is_rejected_even_if_it_is_valid(
    package_manifest: PackageManifest, copy: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    describe(copy, change)
    with pytest.raises(StageError, match=r"package.json: the sha256 is \w+, but the file was written with"):
        read_package(copy, sha256=description_sha256(package_manifest))


def test_a_package_of_another_format_is_rejected_in_one_line_with_both_formats(copy: Path) -> None:
    sha256 = describe(copy, lambda description: description.update(format_version=3, removed_setting=True))
    with pytest.raises(StageError, match=r"^\S+package.json: the package has format 3, .* reads format 7; .* nightjar .*\w$"):
        read_package(copy, sha256=sha256)


def test_updated_records_need_the_new_checksum_of_the_description(package_manifest: PackageManifest, copy: Path) -> None:
    order = np.load(copy / "popularity.npy")
    np.save(copy / "popularity.npy", order[::-1])
    sha256 = rehash(copy, "popularity.npy")
    with pytest.raises(StageError, match=r"package.json: the sha256 is"):
        read_package(copy, sha256=description_sha256(package_manifest))
    assert (read_package(copy, sha256=sha256).popularity.item_row_I == order[::-1]).all()


def _array(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def _ids(ids: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"item_id": ids}), file)
    return file.getvalue()


def _index(items: int, dim: int) -> bytes:
    index = faiss.IndexFlatIP(dim)
    index.add(np.ones((items, dim), np.float32))
    return faiss.serialize_index(index).tobytes()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, b"") for name in ("tower.safetensors", "index.faiss", "items.parquet", "popularity.npy")),
        *((name, b"\x93NUMPY garbage" * 9) for name in ("tower.safetensors", "index.faiss", "users.arrow")),
        ("popularity.npy", _array(np.zeros(NUM_ITEMS, np.int32))),
        ("popularity.npy", _array(np.arange(NUM_ITEMS, dtype=np.int64))),
        ("popularity_share.npy", _array(np.zeros(NUM_ITEMS - 1, np.float32))),
        ("items.parquet", _ids(ITEM_IDS[1:])),
        ("index.faiss", _index(NUM_ITEMS - 1, DIM)),
        ("index.faiss", _index(NUM_ITEMS, DIM + 4)),
        ("index.faiss", _index(NUM_ITEMS, DIM)),
    ],
)
def test_mismatching_contents_are_rejected_by_name_even_if_all_checksums_match(copy: Path, name: str, content: bytes) -> None:
    (copy / name).write_bytes(content)
    with pytest.raises(StageError, match=name):
        read_package(copy, sha256=rehash(copy, name))


def test_an_index_for_another_similarity_is_rejected(copy: Path) -> None:
    index = faiss.IndexIDMap(faiss.IndexFlatL2(DIM))
    index.add_with_ids(np.ones((NUM_ITEMS, DIM), np.float32), np.arange(NUM_ITEMS))
    faiss.write_index(index, str(copy / "index.faiss"))
    with pytest.raises(StageError, match=r"index.faiss: the file has an index with FAISS metric 1, but the model needs inner"):
        read_package(copy, sha256=rehash(copy, "index.faiss"))


def test_an_index_of_other_vectors_than_the_export_is_not_packaged(package_manifest: PackageManifest, tmp_path: Path) -> None:
    folder = package_manifest.folder.parent
    index, export = (
        require_manifest(folder / name, manifest_type)
        for name, manifest_type in (("index", IndexManifest), ("export", ExportManifest))
    )
    other_index = index.model_copy(update={"dim": DIM + 1, "similarity": "dot"})
    stages = {"dataset": None, "evaluation": None}  # the index is checked before they are read
    message = rf"has {NUM_ITEMS} vectors of width {DIM + 1} for dot similarity, but the export .* has {NUM_ITEMS} vectors of"
    with pytest.raises(StageError, match=message):
        build_package(PackageConfig(), export=export, index=other_index, folder=tmp_path / "package", **stages)  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


def test_the_whole_file_of_the_users_can_be_verified(copy: Path) -> None:
    verify_users(copy)
    content = bytearray((copy / "users.arrow").read_bytes())
    content[-300] ^= 1
    (copy / "users.arrow").write_bytes(content)
    with pytest.raises(StageError, match=r"users.arrow: the file was changed after it was written"):
        verify_users(copy)
    (copy / "users.arrow").unlink()
    with pytest.raises(StageError, match=r"package: cannot be verified \(FileNotFoundError"):
        verify_users(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.slice(1), rf"the file has {NUM_USERS - 1} rows of user_id int64, .* needs {NUM_USERS} rows"),
        (lambda table: table.drop_columns(["user.list"]), "needs 40 rows .*user.list large_list"),
        (lambda table: table.append_column("user.more", table["user_id"]), "the file has 40 rows .*user.more int64"),
        (
            lambda table: _replaced(table, "history", pa.array([[NUM_ITEMS]] * NUM_USERS, pa.large_list(pa.int32()))),
            "but .* 0 to 299",
        ),
        (lambda table: _replaced(table, "user.single", pa.array([10_000] * NUM_USERS, pa.int32())), "but the model needs 0 to"),
        (lambda table: _replaced(table, "bucket_rows", pa.array([[-1]] * NUM_USERS, pa.list_(pa.int32()))), "values -1 to -1"),
        (lambda table: _replaced(table, "user.number.weight", pa.array([1.0] * NUM_USERS)), "user.number.weight double"),
    ],
)
def test_users_of_another_model_are_rejected(copy: Path, change: Callable[[pa.Table], pa.Table], message: str) -> None:
    with pa.memory_map(str(copy / "users.arrow")) as file:
        changed = change(pa.ipc.open_file(file).read_all())
        with pa.OSFile(str(copy / "changed.arrow"), "wb") as sink, pa.ipc.new_file(sink, changed.schema) as writer:
            writer.write_table(changed.combine_chunks())
    (copy / "changed.arrow").replace(copy / "users.arrow")
    write_block_checksums(copy / "users.arrow", copy / "users.sha256")
    for name in ("users.arrow", "users.sha256"):
        sha256 = rehash(copy, name)
    with pytest.raises(StageError, match=f"users.arrow: .*{message}"):
        Retriever.load(copy, sha256=sha256, verify=False).recommend(USER_IDS)


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


def test_a_shard_of_the_index_that_is_missing_or_of_another_index_is_rejected(build: Build, tmp_path: Path) -> None:
    world, package = build(index="ivf_flat", index_shards=3)
    copy = Path(shutil.copytree(package.folder / "package", tmp_path / "package"))
    query_BD = np.random.default_rng(0).normal(size=(5, DIM)).astype(np.float32)
    _, row_BN = search_exhaustively(Retriever.load(copy)._index, query_BD, kind=IvfFlat(), depth=9)
    assert np.array_equal(row_BN, np.argsort(-query_BD @ world.item_vectors.T, axis=1)[:, :9])
    sha256 = rehash(copy, "index.1.faiss")
    first = (copy / "index.0.faiss").read_bytes()
    (copy / "index.0.faiss").write_bytes((copy / "index.1.faiss").read_bytes())
    with pytest.raises(StageError, match=r"index\.0\.faiss: the file has .* the file was changed"):
        read_package(copy, sha256=sha256)
    with pytest.raises(StageError, match=r"differs|answer"):
        Retriever.load(copy, sha256=rehash(copy, "index.0.faiss"))
    (copy / "index.0.faiss").write_bytes(first)
    rehash(copy, "index.0.faiss")
    with pytest.raises(StageError, match=r"index\.2\.faiss: package.json lists it, but the model does not use it"):
        read_package(copy, sha256=describe(copy, lambda description: description.update(index_shards=2)))


def test_an_index_is_mapped_and_returns_the_results_of_a_copy_in_memory(build: Build) -> None:
    for kind in get_args(get_args(AnyIndexKind)[0]):
        _, package = build(index=kind.model_fields["kind"].default)
        path = package.folder / "package" / "index.faiss"
        index = Retriever.load(package.folder)._index
        assert str(path) in Path("/proc/self/maps").read_text(), kind
        query_BD = np.random.default_rng(0).normal(size=(5, DIM)).astype(np.float32)
        for mapped, expected in zip(index.search(query_BD, 7), faiss.read_index(str(path)).search(query_BD, 7), strict=True):
            assert (mapped == expected).all(), kind


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all members of a JSON value."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [leaf for key, member in members for leaf in _leaves(member, (*path, key))]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_description_with_one_changed_value_loads_or_is_rejected_with_a_message(
    package_manifest: PackageManifest, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("edited")
    for path in (package_manifest.folder / "package").iterdir():
        (folder / path.name).hardlink_to(path)
    (folder / DESCRIPTION_NAME).unlink()
    description = json.loads((package_manifest.folder / "package" / DESCRIPTION_NAME).read_bytes())
    *parents, last = data.draw(st.sampled_from(_leaves(description)))
    holder = description
    for key in parents:
        holder = holder[key]
    if data.draw(st.booleans()):
        del holder[last]
    else:
        holder[last] = data.draw(st.sampled_from([None, 0, -1, 7, 10**9, 0.5, "", "hnsw", "none", "sum", "dot", [], {}, True]))
    content = json.dumps(description).encode()
    (folder / DESCRIPTION_NAME).write_bytes(content)
    try:
        loaded = Retriever.load(folder, sha256=hashlib.sha256(content).hexdigest())
    except StageError as error:
        assert str(folder) in str(error)
    else:
        assert len(loaded.recommend([1], k=3)[0][0]) == 3


def test_a_package_does_not_depend_on_the_number_of_shards(tmp_path: Path) -> None:
    one, several = (build_pipeline(tmp_path / f"{shards}", shards=shards).package_folder for shards in (1, 7))
    names = {path.name for path in one.iterdir()} - {"package.json"}
    assert "users.arrow" in names and names == {path.name for path in several.iterdir()} - {"package.json"}
    for name in names:
        assert (one / name).read_bytes() == (several / name).read_bytes(), name
