"""LogEngine: the steps of the log ingest that a database executes, from reading the files to sorting the events.

The other steps are the same for all engines: opening the files, reusing parts, reporting errors, and writing the event store
and the manifest. Each id of a user or item has a code, which identifies the id in the parts, and a row in the vocabulary.

Shapes: R rows of a vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.manifests import IdType, InteractionsManifest, LogPart, SourceFile
from recsys_core.parquet.sources import Source


@dataclass(frozen=True)
class LogFiles:
    """The files of the log, whose footers and pages have been checked, or the tables of the log, but never both."""

    sources: Sequence[Source]
    paths: Sequence[Path]
    """A local file for each source, with the columns of the config except hive keys. For a table: its first rows."""
    type_by_column: Mapping[str, pa.DataType]
    """Type of each column of the config. The row checks of a column depend on its type."""


@dataclass(frozen=True)
class FileStatistics:
    """Counts and value ranges of one file of the log."""

    num_rows: int = 0
    num_bad_rows: int = 0
    """Number of rows that fail at least one check."""
    num_bad_rows_by_check: Mapping[str, int] = field(default_factory=dict)
    """Number of rows that fail each check, by the name of the check. Checks that no row fails are left out."""
    bounds_by_role: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest value of the good rows, by role of the column: position, label or weight."""
    num_events: int = 0
    """Number of good rows that reach the label threshold."""


@dataclass(frozen=True)
class LogCounts:
    """Counts of the filtered and split log. If num_read_events is 0, the other fields have their defaults."""

    num_read_events: int
    """Number of events of the current files, before the filters."""
    num_removed_by_reason: Mapping[str, int] = field(default_factory=dict)
    """Number of removed events by filter, without zeros. `bot_users` is the number of users that the bot filter removed."""
    num_events_by_split: tuple[int, ...] = ()
    """Number of events of each split, by its code."""
    sides_with_one_id: frozenset[str] = frozenset()
    """Contains "user" if all events have the same user, and "item" if all events have the same item."""
    time_span_us: tuple[int, int] | None = None
    """Times of the first and the last event; None for a log without event times."""
    test_days: float | None = None
    """Length of the test period; None for other splits than by time."""


@dataclass(frozen=True)
class Vocabulary:
    """The ids of the users or items, in the order of their rows."""

    side: str
    ids: pa.ChunkedArray
    vector_row_R: NDArray[np.int64]
    """Row of the id's pretrained vector, -1 for an id without a vector."""

    def __len__(self) -> int:
        return len(self.ids)


class LogEngine(Protocol):
    """One ingest of the log. The class of an engine comes from config.engine.engine_class().

    The methods are called in this order; methods with `side` are called first for "user", then for "item".
    """

    @classmethod
    def open(
        cls,
        config: InteractionsConfig,
        *,
        id_types: Mapping[str, IdType],
        continued_manifest: InteractionsManifest | None,
        spill_folder: Path,
    ) -> AbstractContextManager[Self]:
        """Open the engine for one ingest.

        Args:
            id_types: type of the ids by side.
            continued_manifest: manifest of the previous run, whose codes and rows are continued; None for empty vocabularies.
            spill_folder: folder for temporary files.
        """

    @property
    def version(self) -> str:
        """Name and version of the engine. A part that another version wrote is not reused."""

    def read_part(self, files: LogFiles, *, part_path: Path) -> Sequence[FileStatistics]:
        """Check the rows of new files, give codes to new ids, and write the good rows to a part; see LogPart.

        Rows below the label threshold are not events, and are written only with config.explicit_negatives. The codes of new ids
        follow the codes of earlier runs: the most frequent id first, and equally frequent ids sorted by id. The method is not
        called if all files are in parts of the previous run.

        Returns:
            The statistics of each file.

        Raises:
            InputError: a row is bad (see `reject_bad_log`), or the content of a file contradicts its footer.
        """

    def load(self, parts: Sequence[LogPart], *, folder: Path, split_code_by_file: Mapping[SourceFile, int]) -> LogCounts:
        """Read the events of the parts, apply config.filter, and split the remaining events by config.split.

        Args:
            folder: folder that contains the files of the parts.
            split_code_by_file: code of the split of each current input file; the events of other files are ignored.
        """

    def assign_rows(self, side: str, *, vector_ids_path: Path | None) -> Vocabulary:
        """Assign rows: ids with a row in the previous run keep it, and new ids follow in the order of their codes.

        An id has a row if it has an event, had a row in the previous run, or is an item with a pretrained vector.

        Args:
            vector_ids_path: parquet file with the column `id`, one row per pretrained vector; None if there are no vectors.
        """

    def sorted_events(self) -> Iterator[pa.RecordBatch]:
        """Yield all events with the rows of their ids, in the columns and the order that `EventWriter.write_events` needs."""

    def sorted_negatives(self) -> tuple[int, Iterator[pa.RecordBatch]]:
        """Return the number of known negatives, and their batches as `EventWriter.write_negatives` needs them.

        A known negative is a pair of a user with events and an item of the vocabulary. Its position and split come from the
        pair's first row below the threshold. With `leave_last_out`, a row at or after the user's validation or test
        event belongs to the split of this event. A pair is left out if the user has an event with the item in the same or
        an earlier split. The method is called only with config.explicit_negatives.
        """

    def write_codes(self, side: str, path: Path) -> None:
        """Write every id that was ever read to a parquet file: columns `id` and `row`, in the order of the codes."""
