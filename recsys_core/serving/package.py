"""Stage `package`: the model package, a self-contained folder with all files that serving needs.

Shapes: I items, D width of the item vectors, M width of the history factor of the spectral block.
"""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors.torch import load_file

from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.dataset.layout import (
    HISTORY_ARRAYS,
    ITEM_COLUMNS_FILE,
    ITEM_TITLES_FILE,
    array_files,
    row_dtype,
    shard_files,
    vocabulary_file,
)
from recsys_core.errors import InputError, StageError
from recsys_core.manifests import (
    Dataset,
    EvaluationManifest,
    ExportManifest,
    FeaturesManifest,
    IndexManifest,
    InteractionsManifest,
    PackageManifest,
    StageFolder,
    record_file,
)
from recsys_core.models.candidate_model import CandidateModel
from recsys_core.models.config import PackageConfig, Quantization
from recsys_core.models.score_terms import BLOCK_HISTORY_FILE, BLOCK_MAPS_FILE
from recsys_core.models.spec import ModelSpec
from recsys_core.serving.answers import Fallback
from recsys_core.serving.contents import open_contents
from recsys_core.serving.description import (
    CANDIDATE_NAME,
    DESCRIPTION_NAME,
    FORMAT_VERSION,
    FROM_FEATURES,
    FROM_VECTORS,
    GOLDEN_NAME,
    INDEX_NAME,
    ITEMS_NAME,
    SEGMENTS_NAME,
    SOURCES_NAME,
    USERS_CHECKSUMS_NAME,
    USERS_NAME,
    DataWindow,
    PackageDescription,
    QueryFeature,
    metrics_of,
)
from recsys_core.serving.exports.export import write_exports
from recsys_core.serving.golden import write_golden
from recsys_core.serving.items import RESERVED_ITEM_COLUMNS, join_columns, write_items
from recsys_core.serving.popularity.segment_counts import write_segments
from recsys_core.serving.quantise import BlockArrays, build_tower, save_tower, served_tables, user_features
from recsys_core.serving.retriever import Retriever
from recsys_core.serving.users.mapped_file import write_block_checksums
from recsys_core.serving.users.user_table import write_users


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

    - tower.safetensors: the query tower.
    - index.faiss, or index.0.faiss, index.1.faiss, ...: the served index, or its shards.
    - items.parquet: item_id, title, filter columns and vector of each item, in the order of the item rows.
    - users.arrow: ids, features and histories of the users, with the events of all splits; see `UserTable`.
    - users.sha256: checksums of the blocks of users.arrow.
    - popularity.npy int32 [I]: item rows by falling popularity.
    - popularity_share.npy float32 [I]: share of each item in the events before the test split, in the order of popularity.npy.
    - popularity_by.parquet: most popular items by the values of `popularity_by`; see popularity/segment_counts.py.
    - user.<feature>.vocabulary.parquet, context.<feature>.vocabulary.parquet: vocabularies of the features.
    - query.pt2, query.onnx: the query tower in the formats of `exports`.
    - candidate.safetensors, item.<feature>.vocabulary.parquet: the candidate tower, and the vocabularies of its features.
    - item_sources.npy uint8 [I]: which input tables have each item; see `SOURCES_NAME`.
    - golden.json: `GoldenQueries`.
    - package.json: `PackageDescription`.

    users.arrow and users.sha256 are left out with `users: none`.

    Raises:
        StageError: the index has other vectors than the export.
    """
    indexed_vectors, exported_vectors = (_describe_vectors(manifest) for manifest in (index, export))
    if indexed_vectors != exported_vectors:
        raise StageError(
            f"{index.folder}: the index has {indexed_vectors}, but the export {export.folder} has {exported_vectors}; build "
            "the index again"
        )
    interactions, features = dataset.interactions, dataset.features
    stage = StageFolder(
        folder, PackageManifest, inputs=["package", FORMAT_VERSION, config, export, index, interactions, features, evaluation]
    )
    if stage.manifest is not None:
        return stage.manifest
    with stage.writing(min_bytes=_large_file_bytes(index, interactions)) as output_folder:
        package_folder = output_folder / "package"
        package_folder.mkdir()
        spec = ModelSpec.model_validate_json(export.path("model.json").read_bytes())
        space_id = space_id_of(export)
        _write_query_tower(package_folder, spec, export, quantization=config.quantization, space_id=space_id)
        _copy_index(package_folder, index)
        item_columns = _item_columns(dataset)
        write_items(
            package_folder / ITEMS_NAME,
            columns=item_columns,
            item_vector_ID=np.load(export.path("item_vectors.npy"), mmap_mode="r"),
            space_id=space_id,
            precision=config.item_vectors,
        )
        if config.users == "stored":
            _write_users(package_folder, spec, dataset)
        _write_candidate_model(package_folder, spec, export)
        np.save(package_folder / SOURCES_NAME, _item_sources(dataset))
        _write_popularity(package_folder, config, dataset, evaluation)
        description = _description(
            config, spec, export=export, index=index, dataset=dataset, evaluation=evaluation, item_columns=item_columns
        )
        for file_name in description.vocabulary_names:
            assert features is not None  # the spec has features
            shutil.copyfile(features.path(file_name), package_folder / file_name)
        complete_package(package_folder, description)
        return stage.commit(
            size_bytes=sum(path.stat().st_size for path in package_folder.iterdir()),
            served_index=index.served_index,
            quantization=config.quantization,
        )


def _copy_index(package_folder: Path, index: IndexManifest) -> None:
    packaged_names = shard_files(INDEX_NAME, num_shards=_num_shards(index))
    for file_name, packaged_name in zip(_index_file_names(index), packaged_names, strict=True):
        shutil.copyfile(index.path(file_name), package_folder / packaged_name)


def _index_file_names(index: IndexManifest) -> tuple[str, ...]:
    """Return the names of the files of the served index."""
    return shard_files(f"{index.served_index}.faiss", num_shards=_num_shards(index))


def _num_shards(index: IndexManifest) -> int:
    return index.reports[index.served_index].shards


def _large_file_bytes(index: IndexManifest, interactions: InteractionsManifest) -> int:
    """Return the size of the large files: the served index and the histories."""
    history_file_names = [
        file_name for name in HISTORY_ARRAYS for file_name in array_files(name, num_shards=interactions.num_shards)
    ]
    records = [index.files[name] for name in _index_file_names(index)] + [
        interactions.files[name] for name in history_file_names
    ]
    return sum(record.size_bytes for record in records)


def _description(
    config: PackageConfig,
    spec: ModelSpec,
    *,
    export: ExportManifest,
    index: IndexManifest,
    dataset: Dataset,
    evaluation: EvaluationManifest,
    item_columns: pa.Table,
) -> PackageDescription:
    """Return the description of a package, without the records of its files."""
    features, report = dataset.features, index.reports[index.served_index]
    query_features = _query_features(spec, features)
    return PackageDescription(
        model=spec,
        space_id=space_id_of(export),
        similarity=export.similarity,
        quantization=config.quantization,
        index_kind=index.served_index,
        index_parameters=report.parameters,
        index_shards=report.shards,
        dim=export.dim,
        max_k=export.num_items,
        users=config.users,
        fallbacks=_fallbacks(spec, query_features),
        features=query_features,
        item_features={} if features is None else {key: features.features[key] for key in spec.features("item")},
        filter_columns=tuple(name for name in item_columns.column_names if name not in RESERVED_ITEM_COLUMNS),
        has_titles="title" in item_columns.column_names,
        item_vectors=config.item_vectors,
        popularity_by=config.popularity_by,
        exports=config.exports,
        data=DataWindow.of(dataset.interactions),
        metrics=metrics_of(evaluation),
        files={},
    )


def complete_package(folder: Path, description: PackageDescription) -> None:
    """Add the golden queries, the exported query towers and package.json (with checksums) to a folder with all other files."""
    record_by_name = {path.name: record_file(path) for path in sorted(folder.iterdir())}
    contents = open_contents(folder, description.model_copy(update={"files": record_by_name}))
    write_golden(Retriever(contents, version=""), folder / GOLDEN_NAME)
    export_names = write_exports(description.exports, contents, folder=folder)
    record_by_name |= {name: record_file(folder / name) for name in (GOLDEN_NAME, *export_names)}
    description = description.model_copy(update={"files": record_by_name})
    (folder / DESCRIPTION_NAME).write_text(description.model_dump_json(indent=2))


def space_id_of(export: ExportManifest) -> str:
    """Return the id of the vector space of an export: a hash of the layers and tables of both towers."""
    prefixes = ("dense.safetensors", "table_", "block_")
    tensor_file_names = sorted(name for name in export.files if name.startswith(prefixes))
    file_names = [*tensor_file_names, "history_items.npy"]
    checksum_lines = "".join(f"{name} {export.files[name].sha256}\n" for name in file_names)
    return hashlib.sha256(f"{export.similarity}\n{checksum_lines}".encode()).hexdigest()[:16]


def _describe_vectors(manifest: IndexManifest | ExportManifest) -> str:
    return f"{manifest.num_items:,} vectors of width {manifest.dim} for {manifest.similarity} similarity"


def _write_users(folder: Path, spec: ModelSpec, dataset: Dataset) -> None:
    """Write the ids, the histories and the features of the users."""
    interactions, form_by_feature = dataset.interactions, user_features(spec)
    for side, num_rows in (("users", interactions.num_users), ("items", interactions.num_items)):
        if row_dtype(num_rows) is not np.int32:
            raise InputError(
                f"package.users: the data has {num_rows:,} {side}, but {USERS_NAME} stores row numbers with 32 bits, which is "
                f"enough for at most 2,147,483,648 {side}; set package.users to none"
            )
    scratch_path = folder / "histories.npy"
    user_offset, event_item = EventStore.open(interactions).all_histories(scratch_path)
    write_users(
        folder / USERS_NAME,
        user_ids=pq.read_table(interactions.path(vocabulary_file("user")), columns=["id"])["id"].combine_chunks(),
        user_offset=user_offset,
        event_item=event_item,
        features=FeatureStore.read(dataset.features.folder, form_by_feature)
        if dataset.features is not None
        else FeatureStore({}),
    )
    scratch_path.unlink(missing_ok=True)
    write_block_checksums(folder / USERS_NAME, folder / USERS_CHECKSUMS_NAME)


def _write_query_tower(
    folder: Path, spec: ModelSpec, export: ExportManifest, *, quantization: Quantization, space_id: str
) -> None:
    tower = build_tower(
        spec,
        history_items=np.load(export.path("history_items.npy"), mmap_mode="c"),
        tables={name: np.load(export.path(f"table_{name}.npy"), mmap_mode="c") for name in served_tables(spec)},
        dense=load_file(export.path("dense.safetensors")),
        quantization=quantization,
        block=_block_arrays(export),
    )
    save_tower(tower, folder / "tower.safetensors", space_id=space_id)


def _write_popularity(folder: Path, config: PackageConfig, dataset: Dataset, evaluation: EvaluationManifest) -> None:
    """Write the items by popularity and, if the config names a feature, the most popular items for each of its values."""
    shutil.copyfile(evaluation.path("popularity.npy"), folder / "popularity.npy")
    item_by_popularity_I = np.load(folder / "popularity.npy")
    np.save(folder / "popularity_share.npy", _popularity_share(dataset.interactions, item_by_popularity_I))
    if config.popularity_by is not None:
        write_segments(
            folder / SEGMENTS_NAME,
            config.popularity_by,
            interactions=dataset.interactions,
            features=dataset.features,
            item_by_popularity_I=item_by_popularity_I,
            min_events=config.popularity_min_events,
        )


def _write_candidate_model(folder: Path, spec: ModelSpec, export: ExportManifest) -> None:
    tables = {name: np.load(export.path(f"table_{name}.npy"), mmap_mode="c") for name in spec.features("item")}
    item_map = load_file(export.path(BLOCK_MAPS_FILE))["item_map"] if BLOCK_MAPS_FILE in export.files else None
    model = CandidateModel.of(spec, tables=tables, dense=load_file(export.path("dense.safetensors")), item_map=item_map)
    model.save(folder / CANDIDATE_NAME)


def _block_arrays(export: ExportManifest) -> BlockArrays | None:
    """Return the arrays of the spectral block; None if the model has no block."""
    if BLOCK_MAPS_FILE not in export.files:
        return None
    block_maps = load_file(export.path(BLOCK_MAPS_FILE))
    return BlockArrays(
        history_factor_IM=np.load(export.path(BLOCK_HISTORY_FILE), mmap_mode="c"),
        query_map=block_maps["query_map"],
        similar_map=block_maps["similar_map"],
    )


def _item_sources(dataset: Dataset) -> NDArray[np.uint8]:
    """Return which input tables have each item, [I]: the sum of FROM_VECTORS and FROM_FEATURES."""
    vector_row_I = EventStore.open(dataset.interactions).vector_rows("item")
    source_I = np.zeros(dataset.interactions.num_items, np.uint8)
    if vector_row_I is not None:
        source_I[vector_row_I >= 0] += FROM_VECTORS
    if dataset.features is not None and ITEM_COLUMNS_FILE in dataset.features.files:
        source_I[pq.read_table(dataset.features.path(ITEM_COLUMNS_FILE), columns=["row"])["row"].to_numpy()] += FROM_FEATURES
    return source_I


def _fallbacks(spec: ModelSpec, query_features: Mapping[str, QueryFeature]) -> tuple[Fallback, ...]:
    possible_fallbacks: tuple[Fallback | None, ...] = (
        "history" if spec.served_history_length else None,
        "features" if query_features else None,
    )
    return (*(fallback for fallback in possible_fallbacks if fallback is not None), "popularity")


def _item_columns(dataset: Dataset) -> pa.Table:
    """Return the columns of items.parquet except the vectors: item_id and, if there are any, titles and filter columns."""
    columns = pq.read_table(dataset.interactions.path(vocabulary_file("item")), columns=["id"]).rename_columns(["item_id"])
    if dataset.features is None:
        return columns
    file_names = [name for name in (ITEM_TITLES_FILE, ITEM_COLUMNS_FILE) if name in dataset.features.files]
    return join_columns(columns, map(dataset.features.path, file_names))


def _query_features(spec: ModelSpec, features: FeaturesManifest | None) -> dict[str, QueryFeature]:
    """Return the user and context features that the model reads, by key."""
    if features is None:
        return {}
    return {key: QueryFeature.of(key, features) for key in spec.features("query")}


def _popularity_share(interactions: InteractionsManifest, item_by_popularity_I: NDArray[np.int32]) -> NDArray[np.float32]:
    count_I = EventStore.open(interactions).item_counts_before("test")
    share_I: NDArray[np.float32] = (count_I[item_by_popularity_I] / max(1, count_I.sum())).astype(np.float32)
    return share_I
