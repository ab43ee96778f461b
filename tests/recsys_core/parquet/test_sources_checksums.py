"""A file is compared with the sha256 file next to it when it is first read."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from recsys_core.ingest.features.config import FeaturesConfig
from recsys_core.ingest.features.ingest import ingest_features
from recsys_core.ingest.vectors.config import EmbeddingsConfig
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from recsys_core.manifests import Dataset, InteractionsManifest
from recsys_core.units import DAY_US
from tests.recsys_core.ingest.interaction_logs import ingest
from tests.recsys_core.ingest.parquet_files import refusal, write

SPLIT = {"kind": "time", "test_days": 1, "validation_days": 1}


def with_sidecar(path: str, *, line: str = "{digest}  {name}\n") -> str:
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    Path(f"{path}.sha256").write_text(line.format(digest=digest, name=Path(path).name))
    return path


def log_of(folder: Path, day: int = 0) -> str:
    days = [day + one for one in range(4)]
    return write(folder / f"day-{day}.parquet", user_id=[1, 2, 1, 2], item_id=[1, 2, 1, 2], t=[one * DAY_US for one in days])


def read_log(folder: Path, **settings: Any) -> InteractionsManifest:
    return ingest(folder / "stage", str(folder / "log"), split=SPLIT, checksums="sidecar", **settings)


def read_vectors(folder: Path) -> object:
    config = EmbeddingsConfig(paths=(str(folder / "log"),), vector_column="v", checksums="sidecar")
    return ingest_embeddings([config], folder=folder / "stage")


def read_features(folder: Path) -> object:
    table = {"paths": str(folder / "log"), "id_column": "item_id", "features": [{"name": "t"}], "checksums": "sidecar"}
    (folder / "plain").mkdir(exist_ok=True)
    log = ingest(folder / "interactions", log_of(folder / "plain"), split=SPLIT)
    config = FeaturesConfig.model_validate({"items": table})
    return ingest_features(config, dataset=Dataset(log), previous=None, memory_limit="1GB", threads=1, folder=folder / "stage")


READERS: list[tuple[Callable[[Path], object], dict[str, Any]]] = [
    (read_log, {}),
    (read_vectors, {"item_id": [1, 2], "v": [[1.0, 2.0], [2.0, 1.0]]}),
    (read_features, {"item_id": [1, 2], "t": [1, 2]}),
]


@pytest.mark.parametrize(("read", "columns"), READERS, ids=["log", "vectors", "features"])
def test_a_file_without_a_sidecar_or_with_another_sha256_is_rejected_by_name_and_both_values(
    tmp_path: Path, read: Callable[[Path], object], columns: dict[str, Any]
) -> None:
    path = write(tmp_path / "log" / "a.parquet", **columns) if columns else log_of(tmp_path / "log")
    with refusal(f"{path}.sha256: cannot be read", "write this file with sha256sum, or set checksums to pages"):
        read(tmp_path)
    Path(f"{path}.sha256").write_text("0" * 64 + "  a.parquet\n")
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    with refusal(f"{path}: its sha256 is {digest}, but {'0' * 64} in {path}.sha256"):
        read(tmp_path)
    with_sidecar(path)
    read(tmp_path)


@pytest.mark.parametrize("line", ["{digest}", "{digest} *{name}\n", "\\{digest}  a\\nb\n", "{digest}\n\n"])
def test_a_sidecar_is_what_sha256sum_writes(tmp_path: Path, line: str) -> None:
    with_sidecar(log_of(tmp_path / "log"), line=line)
    assert read_log(tmp_path).files_read == 1


@pytest.mark.parametrize("line", ["", "hello", "{digest}  a\n{digest}  b\n", "{digest}0  a", "sha256:{digest}"])
def test_a_sidecar_that_holds_no_sha256_is_named(tmp_path: Path, line: str) -> None:
    path = with_sidecar(log_of(tmp_path / "log"), line=line)
    with refusal(f"{path}.sha256: contains ", "expected one line of 64 hexadecimal digits"):
        read_log(tmp_path)


def test_a_glob_passes_over_sidecars(tmp_path: Path) -> None:
    with_sidecar(log_of(tmp_path / "log"))
    assert ingest(tmp_path / "stage", str(tmp_path / "log" / "*"), split=SPLIT).files_read == 1


def test_the_manifest_records_which_files_have_page_checksums(tmp_path: Path) -> None:
    plain = log_of(tmp_path / "log")
    pq.write_table(pq.read_table(log_of(tmp_path, 4)), tmp_path / "log" / "b.parquet", write_page_checksum=True)
    manifest = ingest(tmp_path / "stage", str(tmp_path / "log"), split=SPLIT)
    assert {file.source.path: file.has_checksums for part in manifest.parts for file in part.files} == {
        plain: False,
        str(tmp_path / "log" / "b.parquet"): True,
    }
