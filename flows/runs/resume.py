"""Resumed runs: the check before a resume, and the choice of the unfinished run that a scheduled run resumes."""

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.settings import yaml_loader
from flows.settings.config_file import load_config
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError, shown
from tasks.runs.context import RunOptions
from tasks.runs.run import REDUCED_FILE_NAME, Run
from tasks.runs.run_record import RunRecord
from tasks.runs.workspace import Workspace

LOG = logging.getLogger("nightjar")
MAX_STARTS = 3
"""A scheduled run does not resume a run that was started this many times.

Otherwise, a run that always fails would block all later runs.
"""
IGNORED_STATES = ("StoppedEarly", "DryRun")
"""End states of runs that a person starts to try something. A scheduled run ignores such a run."""


def check_resume(config: PipelineConfig, run: Run) -> None:
    """Raise InputError if `run` does not exist, or if its config.yaml names another pipeline or registered model."""
    if not run.config_file.is_file():
        run_ids = [existing_run.run_id for existing_run in Workspace(run.workspace).runs()]
        raise InputError(
            f"cannot resume {run.run_id}: no such run in {run.folder.parent}; the runs are {', '.join(run_ids) or 'none'}"
        )
    config_identity = _pipeline_identity(config.model_dump(include={"name": True, "registry": {"model_name"}}))
    run_identity = _pipeline_identity(_read_run_config(run))
    for setting, config_value in config_identity.items():
        run_value = run_identity[setting]
        if run_value not in (None, config_value):
            raise InputError(
                f"cannot resume {run.run_id}: {run.config_file} has {setting} {shown(run_value)}, but this config has "
                f"{setting} {shown(config_value)}; resume the run with the config of its own pipeline, or start a new run"
            )


def _read_run_config(run: Run) -> Any:
    try:
        return yaml_loader.load(run.config_file.read_text(encoding="utf-8"), subject=str(run.config_file))
    except (OSError, UnicodeDecodeError, InputError) as error:
        raise InputError(f"cannot resume {run.run_id}: its config cannot be read: {error}; start a new run") from None


def _pipeline_identity(settings: Any) -> dict[str, Any]:
    """Return the settings that identify a pipeline; None for a setting that is missing."""
    top_level_settings = settings if isinstance(settings, dict) else {}
    registry_settings = top_level_settings.get("registry")
    return {
        "name": top_level_settings.get("name"),
        "registry.model_name": registry_settings.get("model_name") if isinstance(registry_settings, dict) else None,
    }


def choose_run_to_resume(config: PipelineConfig) -> str | None:
    """Return the id of the unfinished run that a scheduled run resumes; None to start a new run. Log the choice."""
    run_and_record = find_unfinished_run(config.workspace, pipeline_name=config.name)
    if run_and_record is None:
        return None
    run, record = run_and_record
    age_hours = (datetime.now(UTC) - record.started).total_seconds() / 3_600
    description = (
        f"run {run.run_id} is unfinished: {record.state}, started {age_hours:.1f} h ago ({record.message or 'no message'})"
    )
    reason_for_new_run = _reason_for_new_run(config, run, record)
    if reason_for_new_run is not None:
        LOG.warning("%s; a new run starts, because %s", description, reason_for_new_run)
        return None
    LOG.warning("%s; it is resumed, and stages whose input has changed are repeated", description)
    return run.run_id


def find_unfinished_run(workspace: Path, *, pipeline_name: str) -> tuple[Run, RunRecord] | None:
    """Return the newest run of the pipeline and its record if the run failed or was interrupted; otherwise None.

    Runs of other pipelines, dry runs, and runs that --until stopped early are ignored. The result is also None if
    the data of the newest run was rejected, or if retention has removed the large files of this run.
    """
    for run in reversed(Workspace(workspace).runs()):
        record = RunRecord.read(run)
        if record is None or record.pipeline != pipeline_name or record.state in IGNORED_STATES:
            continue
        is_unfinished = record.state in ("Failed", "Interrupted") and not (run.folder / REDUCED_FILE_NAME).exists()
        return (run, record) if is_unfinished else None
    return None


def _reason_for_new_run(config: PipelineConfig, run: Run, record: RunRecord) -> str | None:
    """Return why a scheduled run may not resume `run`; None if it may resume the run."""
    if config.schedule.unfinished_run == "new":
        return "schedule.unfinished_run is new"
    if record.num_starts >= MAX_STARTS:
        return f"the unfinished run has been started {record.num_starts} times"
    if record.options != RunOptions(reason=record.options.reason):
        return "a person started the unfinished run with options such as --full-retrain"
    if not _is_same_config(config, run):
        return f"the config differs from {run.config_file}"
    return None


def _is_same_config(config: PipelineConfig, run: Run) -> bool:
    """Return whether `run` has the settings of `config`, apart from the groups `schedule` and `retention`."""
    try:
        run_config = load_config(run.config_file)
    except InputError:
        return False
    groups_that_may_differ = {"schedule": config.schedule, "retention": config.retention}
    return run_config.model_copy(update=groups_that_may_differ) == config
