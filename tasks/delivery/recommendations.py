"""Recommendations for many users: read from parquet, written to parquet, with bounded memory.

Shapes: B rows of a batch, L recommended items of a batch.
"""

import json
import re
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.dataset.jagged import chunk_slices
from recsys_core.disk import explain_disk_full
from recsys_core.errors import InputError, shown_names
from recsys_core.parquet.columns import require_same_type_in_files
from recsys_core.parquet.local_copies import decode_ahead, local_files, read_batches
from recsys_core.parquet.sources import open_sources
from recsys_core.serving.answers import FALLBACKS, Recommendations
from recsys_core.serving.description import QUERY_COLUMNS
from recsys_core.serving.queries import SearchOptions
from recsys_core.serving.retriever import Retriever

SUMMARY_FILE_NAME = "_recommendations.json"
MAX_BATCH_ROWS = 1 << 14
MAX_BATCH_ITEMS = 1 << 22
"""Largest number of recommended items in memory."""
PART_ROWS = 1 << 20
"""When an output file has at least this many rows, the next file begins."""

_PART_NAME_PATTERN = re.compile(r"part-[0-9]{5,}\.parquet")

OnProgress = Callable[[int, int], None]
"""Function that is called with the number of answered rows and the number of all rows."""


class BatchSummary(NamedTuple):
    """Content of _recommendations.json.

    Attributes:
        columns: columns of the input that were read.
        num_rows_by_fallback: number of rows by fallback, see `answers.FALLBACKS`; the key for no fallback is "model".
        settings: settings with which the recommendations were written.
        num_bytes_by_file: size of each parquet file.
    """

    version: str
    space_id: str
    k: int
    num_rows: int
    columns: list[str]
    num_rows_by_fallback: dict[str, int]
    settings: dict[str, Any]
    num_bytes_by_file: dict[str, int]

    @property
    def text(self) -> str:
        """The content in one sentence."""
        return (
            f"at most {self.k:,} items for each of {self.num_rows:,} users by version {self.version}; "
            f"{self.num_rows_by_fallback['popularity']:,} users got the most popular items"
        )


class _InputBatch(NamedTuple):
    """Some rows of the input.

    Attributes:
        columns: Arrow columns by name.
        location: file and row numbers, for messages.
        user_id_type: type of the column user_id in the output, into which the ids of all files fit; None: as in the input.
    """

    columns: dict[str, pa.Array]
    location: str
    user_id_type: pa.DataType | None = None

    def output_columns(self) -> dict[str, pa.Array]:
        """Return the input column that is copied to the output: user_id, if the input has it."""
        if (user_ids := self.columns.get("user_id")) is None:
            return {}
        return {"user_id": user_ids if self.user_id_type is None else user_ids.cast(self.user_id_type)}


def write_recommendations(
    retriever: Retriever,
    user_paths: Sequence[str],
    *,
    folder: Path,
    k: int,
    options: SearchOptions,
    settings: Mapping[str, Any],
    on_progress: OnProgress = lambda num_done, num_rows: None,
) -> BatchSummary:
    """Write the recommendations for each row of parquet files, in the same order, to a folder of parquet files.

    The columns of the output are user_id (if the input has it), item_ids, scores, fallback and num_unknown_items. The folder
    also gets _recommendations.json. The folder is complete or does not exist; earlier recommendations in it are replaced. The
    caller ensures that no other process writes the same folder.

    Args:
        user_paths: paths or globs of parquet files with the column user_id, the column history (a list of item ids), or feature
            columns of the model. Other columns are not read. Without paths: all users of the model.
        k, options: see Retriever.recommend.
        settings: all settings that change the recommendations, as JSON values; `is_written` compares them.

    Raises:
        InputError: a file, a column, a value or an option is invalid; the message names the file and its rows. Also if
            `folder` has other files, or if `user_paths` is empty and the model has no users.
    """
    if not user_paths and not len(retriever.user_ids):
        raise InputError(
            f"version {retriever.version} stores no users; set delivery.recommendations.user_paths to files with the histories"
        )
    with _replacement_folder(folder) as new_folder, explain_disk_full(folder.parent):
        # Copies of remote files are in the new folder too, so that they are removed with it if the process is killed.
        columns, num_rows, batches = _read_users(retriever, user_paths, batch_rows=_batch_rows(k), scratch_folder=new_folder)
        num_rows_by_code = np.zeros(len(FALLBACKS), np.int64)
        num_done = 0
        with closing(batches), _PartWriter(new_folder) as part_writer:
            for batch in batches:
                recommendations = _recommend(retriever, batch, k=k, options=options)
                part_writer.write(_as_table(recommendations, input_columns=batch.output_columns()))
                num_rows_by_code += np.bincount(recommendations.fallback_code_B, minlength=len(FALLBACKS))
                num_done += len(recommendations)
                on_progress(num_done, num_rows)
        fallback_names = [fallback or "model" for fallback in FALLBACKS]
        summary = BatchSummary(
            version=retriever.version,
            space_id=retriever.space_id,
            k=k,
            num_rows=num_done,
            columns=columns,
            num_rows_by_fallback=dict(zip(fallback_names, num_rows_by_code.tolist(), strict=True)),
            settings=dict(settings),
            num_bytes_by_file=_num_bytes_by_file(new_folder),
        )
        (new_folder / SUMMARY_FILE_NAME).write_text(json.dumps(summary._asdict(), indent=2))
    return summary


def is_written(folder: Path, *, version: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a folder has all recommendations of this version with these settings."""
    try:
        summary = BatchSummary(**json.loads((folder / SUMMARY_FILE_NAME).read_bytes()))
    except (OSError, ValueError, TypeError):  # no file, or a file of an earlier nightjar
        return False
    is_complete = summary.num_bytes_by_file == _num_bytes_by_file(folder)
    return is_complete and (summary.version, summary.settings) == (version, dict(settings))


def _num_bytes_by_file(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.glob("*.parquet"))}


@contextmanager
def _replacement_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` after the block. After an error, `folder` is as before.

    Raises InputError if `folder` has files that are not recommendations.
    """
    new_folder, old_folder = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("new", "old"))
    _clean_up(folder, new_folder, old_folder)  # in case an earlier process was killed
    _require_replaceable(folder)
    new_folder.mkdir(parents=True)
    try:
        yield new_folder
        if folder.exists():
            folder.rename(old_folder)
        new_folder.rename(folder)
    finally:
        _clean_up(folder, new_folder, old_folder)


def _clean_up(folder: Path, new_folder: Path, old_folder: Path) -> None:
    """Restore the folder if a replacement stopped between its two renames; remove what is left of a replacement."""
    if old_folder.exists() and not folder.exists():
        old_folder.rename(folder)
    for leftover_folder in (new_folder, old_folder):
        shutil.rmtree(leftover_folder, ignore_errors=True)


def _require_replaceable(folder: Path) -> None:
    """Raise InputError if the folder has files that are not recommendations."""
    is_missing_or_empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if folder.is_symlink() or not (is_missing_or_empty or (folder / SUMMARY_FILE_NAME).is_file()):
        raise InputError(f"{folder}: exists, and is not a folder of recommendations; choose another folder")
    file_names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    other_file_names = [name for name in file_names if name != SUMMARY_FILE_NAME and not _PART_NAME_PATTERN.fullmatch(name)]
    if other_file_names:
        raise InputError(
            f"{folder}: has other files than recommendations, such as {other_file_names[0]!r}, which would be deleted; move "
            "them to another folder"
        )


def _read_users(
    retriever: Retriever, user_paths: Sequence[str], *, batch_rows: int, scratch_folder: Path
) -> tuple[list[str], int, Generator[_InputBatch]]:
    """Return the columns that are read, the number of rows, and the batches."""
    if not user_paths:
        return ["user_id"], len(retriever.user_ids), _known_user_batches(retriever, batch_rows=batch_rows)
    sources = open_sources(user_paths, setting="users")
    model_columns = [*QUERY_COLUMNS, *retriever.request_features.columns]
    columns = [name for name in model_columns if any(name in source.schema.names for source in sources)]
    if not columns:
        raise InputError(
            f"{sources[0].name}: has the columns {shown_names(sources[0].schema.names)}, but none that the model reads: "
            f"{shown_names(model_columns)}"
        )
    for name in columns:
        require_same_type_in_files(sources, name, setting="users")
    user_id_type = (
        _output_user_id_type([source.schema.field("user_id").type for source in sources]) if "user_id" in columns else None
    )

    def read_input_batches() -> Generator[_InputBatch]:
        with local_files(sources, columns=columns, scratch_folder=scratch_folder) as paths:
            for source, path in zip(sources, paths, strict=True):
                first_row = 0
                for batch in decode_ahead(read_batches(source, path, columns=columns, batch_rows=batch_rows)):
                    last_row = first_row + batch.num_rows - 1
                    batch_columns = {name: batch.column(name) for name in columns}
                    location = f"{source.name}, rows {first_row:,} to {last_row:,}"
                    yield _InputBatch(batch_columns, location, user_id_type)
                    first_row = last_row + 1

    return columns, sum(source.record.num_rows for source in sources), read_input_batches()


def _output_user_id_type(input_types: Sequence[pa.DataType]) -> pa.DataType | None:
    """Return the type to which user ids of the `input_types` are cast; None if they are not cast."""
    if len(set(input_types)) == 1:
        return None
    if pa.types.is_integer(input_types[0]):
        return pa.int64()  # the retriever rejects larger ids
    return pa.float64() if pa.types.is_floating(input_types[0]) else None


def _batch_rows(k: int) -> int:
    return max(1, min(MAX_BATCH_ROWS, MAX_BATCH_ITEMS // max(1, k)))


def _known_user_batches(retriever: Retriever, *, batch_rows: int) -> Generator[_InputBatch]:
    for row_slice in chunk_slices(len(retriever.user_ids), length=batch_rows):
        user_rows = np.arange(row_slice.start, row_slice.stop)
        yield _InputBatch({"user_id": _id_column(retriever.user_ids.ids(user_rows))}, "the users of the model")


def _recommend(retriever: Retriever, batch: _InputBatch, *, k: int, options: SearchOptions) -> Recommendations:
    user_ids: Any = batch.columns.get("user_id")
    if user_ids is not None:
        is_int64 = user_ids.type == pa.int64() and not user_ids.null_count
        user_ids = user_ids.to_numpy() if is_int64 else user_ids.to_pylist()
    values_by_column = {name: column.to_pylist() for name, column in batch.columns.items() if name != "user_id"}
    histories = values_by_column.pop("history", None)
    try:
        return retriever.recommend(user_ids, k, histories=histories, features=values_by_column or None, **options)
    except InputError as error:
        raise InputError(f"{batch.location}: {error}") from None


def _as_table(recommendations: Recommendations, *, input_columns: Mapping[str, pa.Array]) -> pa.Table:
    offset = pa.array(recommendations.offset, pa.int32())  # a batch has fewer than 2**31 items
    columns = {
        **input_columns,
        "item_ids": pa.ListArray.from_arrays(offset, _id_column(recommendations.item_id_L)),
        "scores": pa.ListArray.from_arrays(offset, pa.array(recommendations.score_L)),
        "fallback": _fallback_column(recommendations.fallback_code_B),
        "num_unknown_items": pa.array(recommendations.num_unknown_items_B),
    }
    return pa.table(columns)


def _id_column(ids: NDArray[Any]) -> pa.Array:
    return pa.array(ids, pa.string() if ids.dtype == object else pa.int64())


def _fallback_column(code_B: NDArray[np.int8]) -> pa.DictionaryArray:
    """Return the name of the fallback of each row; null for no fallback."""
    return pa.DictionaryArray.from_arrays(pa.array(code_B - 1, pa.int8(), mask=code_B == 0), pa.array(FALLBACKS[1:]))


class _PartWriter:
    """Writer of files part-00000.parquet, part-00001.parquet and so on, with about PART_ROWS rows each."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._num_parts, self._num_rows = folder, 0, 0
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> "_PartWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write(self, table: pa.Table) -> None:
        """Append rows to the current part. If the part is then full, close it."""
        if self._writer is None:
            part_path = self._folder / f"part-{self._num_parts:05}.parquet"
            self._writer = pq.ParquetWriter(part_path, table.schema, compression="zstd", write_page_checksum=True)
            self._num_parts, self._num_rows = self._num_parts + 1, 0
        self._writer.write_table(table.cast(self._writer.schema))
        self._num_rows += table.num_rows
        if self._num_rows >= PART_ROWS:
            self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
