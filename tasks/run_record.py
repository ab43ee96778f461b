"""The record of a run: who started it, how it ended, and the figures that outlive its stage folders.

A run writes <run>/run.json when it starts and again when it ends. A process that is killed leaves the state Running in the
file; such a record is read as Interrupted once the run's lock is free.
"""

import logging
import os
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, cast

from pydantic import AwareDatetime, Field, ValidationError

from recsys_core.atomic import write_text
from recsys_core.config import Frozen
from recsys_core.errors import NightjarError, printable, redacted
from recsys_core.manifests import InteractionsManifest, Manifest, RegistrationManifest, read_manifest
from tasks.run import STAGES, Run, RunOptions, StageName

LOG = logging.getLogger("nightjar")
RECORD_NAME = "run.json"
ERROR_LOG_NAME = "error.log"
_MESSAGE_CHARACTERS = 1_000

RunState = Literal[
    "Running", "Promoted", "NotPromoted", "BrokenChampion", "DataRejected", "DryRun", "StoppedEarly", "Failed", "Interrupted"
]
"""State of a run. Where Prefect has the same state, the names are equal."""


class RunFigures(Frozen):
    """Figures of a run's completed stages. They are still there when the files of the stages are removed."""

    stage_seconds: dict[StageName, float] = Field(default_factory=dict, description="duration of each completed stage")
    events: int | None = Field(None, description="events in all parts of the split")
    users: int | None = Field(None, description="users of the vocabulary")
    items: int | None = Field(None, description="items of the catalogue")
    model_name: str | None = Field(None, description="registered model in MLflow; null before the stage register")
    version: str | None = Field(None, description="registered version; null before the stage register")
    promoted: bool = Field(False, description="whether the registered version became the champion")
    mlflow_run_id: str | None = Field(None, description="MLflow run; null before the stage register")
    metrics: dict[str, float] = Field(
        default_factory=dict, description="metrics of the new version and the champion as served, e.g. served/recall@20"
    )

    @classmethod
    def read(cls, run: Run) -> "RunFigures":
        """Read the figures from the manifests in the folder of `run`, also if retention has removed the stages' files."""
        loaded = {stage: read_manifest(run.stage_folder(stage), STAGES[stage]) for stage in STAGES}
        manifests: dict[StageName, Manifest] = {stage: manifest for stage, manifest in loaded.items() if manifest is not None}
        log = cast(InteractionsManifest | None, manifests.get("ingest_interactions"))
        version = cast(RegistrationManifest | None, manifests.get("register"))
        return cls(
            stage_seconds={stage: round(manifest.seconds, 3) for stage, manifest in manifests.items()},
            events=log and log.train_events + log.validation_events + log.test_events,
            users=log and log.num_users,
            items=log and log.num_items,
            model_name=version and version.model_name,
            version=version and version.version,
            promoted=version is not None and version.promoted,
            mlflow_run_id=version and version.mlflow_run_id,
            metrics={} if version is None else version.metrics,
        )


class RunRecord(Frozen):
    """run.json: one start of a run. A resumed run replaces the record of its earlier start."""

    format_version: Literal[1] = 1
    pipeline: str = Field(description="name of the pipeline")
    options: RunOptions = Field(description="options of this start, with the reason that a person gave")
    host: str = Field(description="name of the host of the flow")
    pid: int = Field(description="process id of the flow")
    num_starts: int = Field(1, description="number of starts of the run, with this one; each resume is a start")
    started: AwareDatetime = Field(description="time of this start, UTC")
    ended: AwareDatetime | None = Field(None, description="time of the end, UTC; null while the run works or if it was killed")
    state: RunState = "Running"
    message: str = Field("", description="why the run ended in this state; without passwords")
    figures: RunFigures = RunFigures()

    @property
    def seconds(self) -> float | None:
        """Duration of this start; None while the run works, and if it was killed."""
        return None if self.ended is None else (self.ended - self.started).total_seconds()

    @classmethod
    def read(cls, run: Run) -> "RunRecord | None":
        """Read the record of `run`; None if there is none, or if it is damaged.

        A record in the state Running whose run is not locked belongs to a killed process: it is returned as Interrupted. The
        figures of a record without an end are those of the stages that are complete by now.
        """
        try:
            record = cls.model_validate_json((run.folder / RECORD_NAME).read_bytes())
        except (OSError, ValidationError):
            return None
        if record.state != "Running":
            return record
        record = record.model_copy(update={"figures": RunFigures.read(run)})
        if run.is_locked():
            return record
        message = f"process {record.pid} on {record.host} ended without a record: it was killed, or the host restarted"
        return record.model_copy(update={"state": "Interrupted", "message": message})

    def write(self, run: Run) -> None:
        """Replace the record of `run`."""
        write_text(run.folder / RECORD_NAME, self.model_dump_json(indent=2))


class Ending:
    """How the body of `record_run` ends: set by the body, or derived from its exception."""

    def __init__(self) -> None:
        self.state: RunState = "Failed"
        self.message = ""

    def set(self, state: RunState, message: str) -> None:
        """Set the state and the message of the record."""
        self.state, self.message = state, message


@contextmanager
def record_run(run: Run, *, pipeline: str) -> Iterator[Ending]:
    """Write the record of `run` before and after the body, however the body ends; the run must be locked.

    The body calls `set` of the yielded Ending. An exception is recorded as Failed, or as Interrupted if a signal caused it. The
    traceback of an unexpected exception is written to error.log.
    """
    earlier_start = RunRecord.read(run)
    start = RunRecord(
        pipeline=pipeline,
        options=run.options,
        host=socket.gethostname(),
        pid=os.getpid(),
        num_starts=1 if earlier_start is None else earlier_start.num_starts + 1,
        started=datetime.now(UTC),
    )
    (run.folder / ERROR_LOG_NAME).unlink(missing_ok=True)
    start.write(run)
    ending = Ending()
    try:
        yield ending
    except BaseException as error:
        if _is_signal(error):
            ending.set("Interrupted", "a signal ended the run: Ctrl-C, SIGTERM or a cancellation")
        else:
            ending.set("Failed", str(error) if isinstance(error, NightjarError) else f"{type(error).__name__}: {error}")
            _save_unexpected(error, run.folder)
        raise
    finally:
        try:
            _end(start, ending).model_copy(update={"figures": RunFigures.read(run)}).write(run)
        except OSError as error:  # for example a full disk, which is reported by the exception of the body
            LOG.warning("could not write %s (%s); the run is listed as interrupted", run.folder / RECORD_NAME, error)


def _end(start: RunRecord, ending: Ending) -> RunRecord:
    message = printable(redacted(" ".join(ending.message.split())), at_most=_MESSAGE_CHARACTERS)
    return start.model_copy(update={"ended": datetime.now(UTC), "state": ending.state, "message": message})


def _is_signal(error: BaseException | None) -> bool:
    """Return whether a signal caused `error`. Prefect and libraries raise other errors while they handle its exception."""
    from prefect.exceptions import ExternalSignal

    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return any(isinstance(link, KeyboardInterrupt | ExternalSignal) for link in chain)


def _save_unexpected(error: BaseException, folder: Path) -> None:
    if not isinstance(error, NightjarError):
        try:
            write_traceback(error, folder=folder)
        except OSError as write_error:
            LOG.warning("could not write %s (%s)", folder / ERROR_LOG_NAME, write_error)


def write_traceback(error: BaseException, *, folder: Path) -> Path:
    """Write the traceback of an unexpected error to error.log in `folder`; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    log_file = folder / ERROR_LOG_NAME
    log_file.write_text(redacted("".join(traceback.format_exception(error))))
    return log_file
