"""The record of a run: its start, its end, and figures that remain when its stage folders are removed.

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
from typing import Literal

from pydantic import AwareDatetime, Field, ValidationError

from recsys_core.config import Frozen
from recsys_core.disk import write_text
from recsys_core.errors import NightjarError, printable, redacted
from recsys_core.manifests import (
    STAGES,
    DataReportManifest,
    InteractionsManifest,
    RegistrationManifest,
    read_unchecked_manifest,
)
from tasks.runs.context import Results, RunOptions, StageContext
from tasks.runs.run import Run

LOG = logging.getLogger("nightjar")
RECORD_FILE_NAME = "run.json"
ERROR_LOG_NAME = "error.log"
_MAX_MESSAGE_CHARACTERS = 1_000

RunState = Literal[
    "Running",
    "Promoted",
    "NotPromoted",
    "NotEnoughData",
    "BrokenChampion",
    "DataRejected",
    "DryRun",
    "StoppedEarly",
    "Failed",
    "Interrupted",
]
"""State of a run. States that Prefect also has are named as in Prefect."""


class RunFigures(Frozen):
    """Figures of a run's completed stages. They remain when the files of the stages are removed."""

    stage_seconds: dict[str, float] = Field(default_factory=dict, description="duration of each completed stage")
    events: int | None = Field(None, description="events in all parts of the split")
    users: int | None = Field(None, description="users in the vocabulary")
    validation_users: int | None = Field(None, description="users with a validation event; null if there is no validation part")
    test_users: int | None = Field(None, description="users with a test event")
    items: int | None = Field(None, description="items in the catalogue")
    model_name: str | None = Field(None, description="registered model in MLflow; null before the stage register")
    version: str | None = Field(None, description="registered version; null before the stage register")
    promoted: bool = Field(False, description="whether the registered version became the champion")
    mlflow_run_id: str | None = Field(None, description="MLflow run; null before the stage register")
    metrics: dict[str, float] = Field(
        default_factory=dict,
        description="metrics of the new version's and the champion's recommendations, e.g. served/recall@20",
    )

    @classmethod
    def read(cls, run: Run) -> "RunFigures":
        """Read the figures from the manifests in the folder of `run`, also if retention has removed the stages' files."""
        manifests = (
            read_unchecked_manifest(run.stage_folder(manifest_type), manifest_type) for manifest_type in STAGES.values()
        )
        results = Results(manifest for manifest in manifests if manifest is not None)
        interactions, registration = results.get(InteractionsManifest), results.get(RegistrationManifest)
        data_report = results.get(DataReportManifest)
        data_metrics = {} if data_report is None else data_report.metrics
        return cls(
            stage_seconds={manifest.stage: round(manifest.seconds, 3) for manifest in results},
            events=interactions and interactions.num_events,
            users=interactions and interactions.num_users,
            validation_users=data_metrics.get("validation_users"),
            test_users=data_metrics.get("test_users"),
            items=interactions and interactions.num_items,
            model_name=registration and registration.model_name,
            version=registration and registration.version,
            promoted=registration is not None and registration.promoted,
            mlflow_run_id=registration and registration.mlflow_run_id,
            metrics={} if registration is None else registration.metrics,
        )


class RunRecord(Frozen):
    """run.json: one start of a run. A resumed run replaces the record of its earlier start."""

    format_version: Literal[1] = 1
    pipeline: str = Field(description="name of the pipeline")
    options: RunOptions = Field(description="options of this start, including the reason for which the run was started")
    host: str = Field(description="name of the host of the flow")
    pid: int = Field(description="process id of the flow")
    num_starts: int = Field(1, description="number of starts of the run, including this one; each resume is a start")
    started: AwareDatetime = Field(description="time of this start, UTC")
    ended: AwareDatetime | None = Field(
        None, description="time of the end, UTC; null while the run is running, or if it was killed"
    )
    state: RunState = "Running"
    message: str = Field("", description="why the run ended in this state; without passwords")
    figures: RunFigures = RunFigures()

    @property
    def seconds(self) -> float | None:
        """Time between start and end; None while the run is running, if it was killed, or if the clock was set back."""
        return None if self.ended is None or self.ended < self.started else (self.ended - self.started).total_seconds()

    @classmethod
    def read(cls, run: Run) -> "RunRecord | None":
        """Return the record of `run`; None if the record does not exist or is damaged.

        If the state is Running but the run is not locked, the process was killed, and the state becomes Interrupted. The
        figures of a record without an end describe the stages that are complete now.
        """
        record = cls._read_file(run)
        if record is None or record.state != "Running":
            return record
        if run.is_locked():
            return record.model_copy(update={"figures": RunFigures.read(run)})
        # A run writes its last record before it releases the lock, so this record is there if the run ended in the meantime.
        record = cls._read_file(run)
        if record is None or record.state != "Running":
            return record
        message = f"process {record.pid} on {record.host} ended without a record: it was killed, or the host restarted"
        return record.model_copy(update={"figures": RunFigures.read(run), "state": "Interrupted", "message": message})

    @classmethod
    def _read_file(cls, run: Run) -> "RunRecord | None":
        try:
            return cls.model_validate_json((run.folder / RECORD_FILE_NAME).read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, run: Run) -> None:
        """Replace the record of `run`."""
        write_text(run.folder / RECORD_FILE_NAME, self.model_dump_json(indent=2))


class RunEnding:
    """End state of the body of `record_run`, set by the body or derived from its exception."""

    def __init__(self) -> None:
        self.state: RunState = "Failed"
        self.message = ""

    def set(self, state: RunState, message: str) -> None:
        """Set the state and the message of the record."""
        self.state, self.message = state, message


@contextmanager
def record_run(context: StageContext) -> Iterator[RunEnding]:
    """Write the record of the run before the body, and again after the body returns or raises. The caller holds the run's lock.

    The body sets the state with `RunEnding.set`. An exception is recorded as Failed, or as Interrupted if a signal caused the
    exception. The traceback of an unexpected exception is written to error.log.
    """
    run = context.run
    previous_record = RunRecord.read(run)
    start_record = RunRecord(
        pipeline=context.pipeline,
        options=context.options,
        host=socket.gethostname(),
        pid=os.getpid(),
        num_starts=1 if previous_record is None else previous_record.num_starts + 1,
        started=datetime.now(UTC),
    )
    (run.folder / ERROR_LOG_NAME).unlink(missing_ok=True)
    start_record.write(run)
    ending = RunEnding()
    try:
        yield ending
    except BaseException as error:
        if _is_caused_by_signal(error):
            ending.set("Interrupted", "a signal ended the run: Ctrl-C, SIGTERM or a cancellation")
        else:
            ending.set("Failed", str(error) if isinstance(error, NightjarError) else f"{type(error).__name__}: {error}")
            if not isinstance(error, NightjarError):
                _save_traceback(error, run.folder)
        raise
    finally:
        try:
            _ended_record(start_record, ending).model_copy(update={"figures": RunFigures.read(run)}).write(run)
        except OSError as error:  # e.g. a full disk, which the exception of the body reports
            LOG.warning("could not write %s (%s); the run is listed as interrupted", run.folder / RECORD_FILE_NAME, error)


def _ended_record(start_record: RunRecord, ending: RunEnding) -> RunRecord:
    message = printable(redacted(" ".join(ending.message.split())), max_characters=_MAX_MESSAGE_CHARACTERS)
    return start_record.model_copy(update={"ended": datetime.now(UTC), "state": ending.state, "message": message})


def _is_caused_by_signal(error: BaseException | None) -> bool:
    """Return whether a signal caused `error`. Prefect and libraries may raise another error while they handle it."""
    from prefect.exceptions import ExternalSignal

    error_chain: list[BaseException] = []
    while error is not None and error not in error_chain:
        error_chain.append(error)
        error = error.__cause__ or error.__context__
    return any(isinstance(chained_error, KeyboardInterrupt | ExternalSignal) for chained_error in error_chain)


def _save_traceback(error: BaseException, folder: Path) -> None:
    try:
        write_traceback(error, folder=folder)
    except OSError as write_error:
        LOG.warning("could not write %s (%s)", folder / ERROR_LOG_NAME, write_error)


def write_traceback(error: BaseException, *, folder: Path) -> Path:
    """Write the traceback of an unexpected error to error.log in `folder`; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    log_path = folder / ERROR_LOG_NAME
    log_text = redacted("".join(traceback.format_exception(error)))
    log_path.write_text(log_text, encoding="utf-8", errors="backslashreplace")  # a path may contain surrogates
    return log_path
