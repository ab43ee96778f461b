"""Stage `package`: the model package, a self-contained folder with all files that serving needs.

Shapes: I items.
"""

import shutil
from pathlib import Path
from typing import Final, Literal, Self

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import TypeAdapter, model_validator
from safetensors.torch import load_file

from recsys_core.config import Frozen
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import ARRAYS_BY_FORM
from recsys_core.dataset.layout import HISTORY_FILES, vocabulary_file
from recsys_core.errors import StageError
from recsys_core.manifests import (
    Dataset,
    EvaluationManifest,
    ExportManifest,
    FileRecord,
    IndexManifest,
    InteractionsManifest,
    PackageManifest,
    StageFolder,
    fingerprint_of,
    record_file,
)
from recsys_core.models.config import PackageConfig, Quantization
from recsys_core.models.spec import ModelSpec
from recsys_core.retrieval.kinds import AnyIndexKind
from recsys_core.serving.quantise import build_tower, save_tower, served_tables, user_features

DESCRIPTION_NAME = "package.json"
FORMAT_VERSION: Final = 5
_INDEX_KIND: TypeAdapter[AnyIndexKind] = TypeAdapter(AnyIndexKind)


class PackageDescription(Frozen):
    """package.json: the model, the index, and the size and checksum of every other file."""

    format_version: Literal[5] = FORMAT_VERSION
    model: ModelSpec
    similarity: Literal["cosine", "dot"]
    quantization: Quantization
    index_kind: str
    index_parameters: dict[str, int]
    files: dict[str, FileRecord]

    @property
    def index(self) -> AnyIndexKind:
        """Kind of the index, with the settings with which it was built."""
        return _INDEX_KIND.validate_python({"kind": self.index_kind} | self.index_parameters)

    @model_validator(mode="after")
    def _index_is_valid(self) -> Self:
        _ = self.index  # raises ValidationError
        return self


def build_package(
    config: PackageConfig,
    *,
    export: ExportManifest,
    index: IndexManifest,
    dataset: Dataset,
    evaluation: EvaluationManifest,
    folder: Path,
) -> PackageManifest:
    """Write folder/package/.

    Files:

    - tower.safetensors: the query tower. index.faiss: the served index.
    - item_ids.parquet, user_ids.parquet: column `id`, in the order of the rows.
    - user_offset.npy, event_item.npy: the events of each user from training, validation and test.
    - popularity.npy int32 [I]: item rows by falling popularity.
    - popularity_share.npy float32 [I]: share of each item in the events before the test split, in the order of popularity.npy.
    - user.<feature>.*.npy: user features in the format of FeaturesManifest.
    - package.json: `PackageDescription`.

    Raises:
        StageError: the index has other vectors than the export.
    """
    indexed, exported = ((stage.num_items, stage.dim, stage.similarity) for stage in (index, export))
    if indexed != exported:
        raise StageError(
            f"{index.folder}: the index has {_describe_vectors(*indexed)}, but the export {export.folder} has "
            f"{_describe_vectors(*exported)}; build the index again"
        )
    interactions, features = dataset.interactions, dataset.features
    fingerprint = fingerprint_of("package", FORMAT_VERSION, config, export, index, interactions, features, evaluation)
    stage = StageFolder(folder, PackageManifest, fingerprint=fingerprint)
    if stage.manifest is not None:
        return stage.manifest
    large_files = (
        index.files[f"{index.served_index}.faiss"],
        *(interactions.files[file_name] for file_name in HISTORY_FILES),
    )
    with stage.writing(min_bytes=sum(record.size_bytes for record in large_files)) as output_folder:
        package_folder = output_folder / "package"
        package_folder.mkdir()
        spec = ModelSpec.model_validate_json(export.path("model.json").read_bytes())
        tower = build_tower(
            spec,
            history_items=np.load(export.path("history_items.npy"), mmap_mode="c"),
            tables={
                table_name: np.load(export.path(f"table_{table_name}.npy"), mmap_mode="c") for table_name in served_tables(spec)
            },
            dense=load_file(export.path("dense.safetensors")),
            quantization=config.quantization,
        )
        save_tower(tower, package_folder / "tower.safetensors")
        shutil.copyfile(index.path(f"{index.served_index}.faiss"), package_folder / "index.faiss")
        for file_name in HISTORY_FILES:
            shutil.copyfile(interactions.path(file_name), package_folder / file_name)
        for side in ("item", "user"):
            ids = pq.read_table(interactions.path(vocabulary_file(side)), columns=["id"])
            pq.write_table(ids, package_folder / f"{side}_ids.parquet")
        for file_name in feature_files(spec):
            assert features is not None  # the spec has features
            shutil.copyfile(features.path(file_name), package_folder / file_name)
        shutil.copyfile(evaluation.path("popularity.npy"), package_folder / "popularity.npy")
        item_by_popularity_I = np.load(package_folder / "popularity.npy")
        np.save(package_folder / "popularity_share.npy", _popularity_share(interactions, item_by_popularity_I))

        record_by_name = {path.name: record_file(path) for path in sorted(package_folder.iterdir())}
        description = PackageDescription(
            model=spec,
            similarity=export.similarity,
            quantization=config.quantization,
            index_kind=index.served_index,
            index_parameters=index.reports[index.served_index].parameters,
            files=record_by_name,
        )
        (package_folder / DESCRIPTION_NAME).write_text(description.model_dump_json(indent=2))
        return stage.commit(
            size_bytes=sum(path.stat().st_size for path in package_folder.iterdir()),
            served_index=index.served_index,
            quantization=config.quantization,
        )


def _describe_vectors(num_items: int, dim: int, similarity: str) -> str:
    """Describe item vectors in a message."""
    return f"{num_items:,} vectors of width {dim} for {similarity} similarity"


def description_sha256(package: PackageManifest) -> str:
    """Return the sha256 of package.json."""
    return package.files[f"package/{DESCRIPTION_NAME}"].sha256


def package_files(spec: ModelSpec) -> set[str]:
    """Return the names of the files of a package except package.json."""
    arrays = (*HISTORY_FILES, "popularity.npy", "popularity_share.npy")
    return {"tower.safetensors", "index.faiss", "item_ids.parquet", "user_ids.parquet", *arrays, *feature_files(spec)}


def feature_files(spec: ModelSpec) -> list[str]:
    """Return the file names of the arrays that hold the user features."""
    return [
        f"{feature_name}.{array_name}.npy"
        for feature_name, form in user_features(spec).items()
        for array_name in ARRAYS_BY_FORM[form]
    ]


def _popularity_share(interactions: InteractionsManifest, item_by_popularity_I: NDArray[np.int32]) -> NDArray[np.float32]:
    count_I = EventStore.open(interactions).item_counts_before("test")
    share_I: NDArray[np.float32] = (count_I[item_by_popularity_I] / max(1, count_I.sum())).astype(np.float32)
    return share_I
