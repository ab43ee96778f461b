"""Changed packages are rejected with the name of the changed file."""

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from recsys_core.serving.contents import read_package
from recsys_core.serving.description import DESCRIPTION_NAME, description_sha256
from recsys_core.serving.package import build_package
from recsys_core.serving.retriever import Retriever
from tests.recsys_core.serving.conftest import DIM, ITEM_IDS, ITEMS, USER_FEATURES, USERS, Build


@pytest.fixture(scope="module")
def packaged(build: Build) -> PackageManifest:
    return build(index="ivf_flat", quantization="int8", learn_user_embedding=True, features=USER_FEATURES)[1]


@pytest.fixture
def copy(packaged: PackageManifest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packaged.folder / "package", tmp_path / "package"))


def describe(folder: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """Edit package.json and return its new sha256."""
    path = folder / DESCRIPTION_NAME
    described = json.loads(path.read_bytes())
    change(described)
    path.write_text(json.dumps(described))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rehash(folder: Path, name: str) -> str:
    """Update the record of `name` in package.json and return the new sha256 of package.json."""
    record = record_file(folder / name).model_dump()
    return describe(folder, lambda described: described["files"].update({name: record}))


def test_every_file_of_the_package_is_listed_and_needed(packaged: PackageManifest) -> None:
    names = {path.name for path in (packaged.folder / "package").iterdir()}
    contents = read_package(packaged.folder / "package", sha256=description_sha256(packaged))
    assert names == contents.package.file_names | {DESCRIPTION_NAME} == contents.package.files.keys() | {DESCRIPTION_NAME}


def test_a_flipped_bit_or_a_missing_file_is_rejected_by_name(packaged: PackageManifest, copy: Path) -> None:
    for path in sorted(copy.iterdir()):
        content = path.read_bytes()
        for offset in (0, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
            with pytest.raises(StageError, match=path.name):
                read_package(copy, sha256=description_sha256(packaged))
        path.unlink()
        with pytest.raises(StageError, match=path.name):
            read_package(copy, sha256=description_sha256(packaged))
        path.write_bytes(content)
    read_package(copy, sha256=description_sha256(packaged))


def test_a_surplus_file_is_rejected_by_name(packaged: PackageManifest, copy: Path) -> None:
    (copy / "user.more.row.npy").touch()
    with pytest.raises(StageError, match=r"user.more.row.npy: package.json does not list this file"):
        read_package(copy, sha256=description_sha256(packaged))


@pytest.mark.parametrize(
    "change",
    [
        lambda described: described["files"].pop("popularity.npy"),
        lambda described: described["model"]["config"]["history"].update(pooling="sum"),
        lambda described: described.update(similarity="dot"),
    ],
)
def test_an_edited_description_is_rejected_even_if_it_is_valid(
    packaged: PackageManifest, copy: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    describe(copy, change)
    with pytest.raises(StageError, match=r"package.json: the sha256 is \w+, but the file was written with"):
        read_package(copy, sha256=description_sha256(packaged))


def test_a_package_of_another_format_is_rejected_in_one_line_with_both_formats(copy: Path) -> None:
    sha256 = describe(copy, lambda described: described.update(format_version=3, removed_setting=True))
    with pytest.raises(StageError, match=r"^\S+package.json: the package has format 3, .* reads format 7; .* nightjar .*\w$"):
        read_package(copy, sha256=sha256)


def test_updated_records_need_the_new_checksum_of_the_description(packaged: PackageManifest, copy: Path) -> None:
    order = np.load(copy / "popularity.npy")
    np.save(copy / "popularity.npy", order[::-1])
    sha256 = rehash(copy, "popularity.npy")
    with pytest.raises(StageError, match=r"package.json: the sha256 is"):
        read_package(copy, sha256=description_sha256(packaged))
    assert (read_package(copy, sha256=sha256).item_by_popularity_I == order[::-1]).all()


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
        *(
            (name, b"\x93NUMPY garbage" * 9)
            for name in ("tower.safetensors", "index.faiss", "user_ids.parquet", "event_item.npy")
        ),
        ("popularity.npy", _array(np.zeros(ITEMS, np.int32))),
        ("popularity.npy", _array(np.arange(ITEMS, dtype=np.int64))),
        ("popularity_share.npy", _array(np.zeros(ITEMS - 1, np.float32))),
        ("user_offset.npy", _array(np.arange(USERS + 1)[::-1].copy())),
        ("user_offset.npy", _array(np.zeros((USERS + 1, 2), np.int64))),
        ("user.single.row.npy", _array(np.full(USERS, 10_000, np.int32))),
        ("user.list.offset.npy", _array(np.zeros(USERS, np.int64))),
        ("user.number.weight.npy", _array(np.zeros(USERS + 1, np.float32))),
        ("items.parquet", _ids(ITEM_IDS[1:])),
        ("index.faiss", _index(ITEMS - 1, DIM)),
        ("index.faiss", _index(ITEMS, DIM + 4)),
        ("index.faiss", _index(ITEMS, DIM)),
    ],
)
def test_mismatching_contents_are_rejected_by_name_even_if_all_checksums_match(copy: Path, name: str, content: bytes) -> None:
    (copy / name).write_bytes(content)
    with pytest.raises(StageError, match=name):
        read_package(copy, sha256=rehash(copy, name))


def test_an_index_for_another_similarity_is_rejected(copy: Path) -> None:
    index = faiss.IndexIDMap(faiss.IndexFlatL2(DIM))
    index.add_with_ids(np.ones((ITEMS, DIM), np.float32), np.arange(ITEMS))
    faiss.write_index(index, str(copy / "index.faiss"))
    with pytest.raises(StageError, match=r"index.faiss: the file has an index with FAISS metric 1, but the model needs inner"):
        read_package(copy, sha256=rehash(copy, "index.faiss"))


def test_an_index_of_other_vectors_than_the_export_is_not_packaged(packaged: PackageManifest, tmp_path: Path) -> None:
    folder = packaged.folder.parent
    index, export = (
        require_manifest(folder / name, manifest_type)
        for name, manifest_type in (("index", IndexManifest), ("export", ExportManifest))
    )
    other_index = index.model_copy(update={"dim": DIM + 1, "similarity": "dot"})
    stages = {"dataset": None, "evaluation": None}  # the index is checked before they are read
    message = rf"has {ITEMS} vectors of width {DIM + 1} for dot similarity, but the export .* has {ITEMS} vectors of"
    with pytest.raises(StageError, match=message):
        build_package(PackageConfig(), export=export, index=other_index, folder=tmp_path / "package", **stages)  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


def test_events_of_unknown_items_are_rejected(copy: Path) -> None:
    events = np.load(copy / "event_item.npy")
    events[-1] = ITEMS
    np.save(copy / "event_item.npy", events)
    with pytest.raises(StageError, match=f"event_item.npy: the file has rows 0 to {ITEMS}, but the model needs rows 0 to"):
        read_package(copy, sha256=rehash(copy, "event_item.npy"))


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all members of a JSON value."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [leaf for key, member in members for leaf in _leaves(member, (*path, key))]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_description_with_one_changed_value_loads_or_is_rejected_with_a_message(
    packaged: PackageManifest, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("edited")
    for path in (packaged.folder / "package").iterdir():
        (folder / path.name).hardlink_to(path)
    (folder / DESCRIPTION_NAME).unlink()
    described = json.loads((packaged.folder / "package" / DESCRIPTION_NAME).read_bytes())
    *parents, last = data.draw(st.sampled_from(_leaves(described)))
    holder = described
    for key in parents:
        holder = holder[key]
    if data.draw(st.booleans()):
        del holder[last]
    else:
        holder[last] = data.draw(st.sampled_from([None, 0, -1, 7, 10**9, 0.5, "", "hnsw", "none", "sum", "dot", [], {}, True]))
    content = json.dumps(described).encode()
    (folder / DESCRIPTION_NAME).write_bytes(content)
    try:
        loaded = Retriever.load(folder, sha256=hashlib.sha256(content).hexdigest())
    except StageError as error:
        assert str(folder) in str(error)
    else:
        assert len(loaded.recommend([1], k=3)[0][0]) == 3
