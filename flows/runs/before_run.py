"""Checks before a run: its input files, the run to resume, and the unfinished run that a scheduled run resumes."""

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from flows.settings.config_file import load_config
from flows.settings.environment import require_writable
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import InputError, counted, shown
from recsys_core.ingest.features.config import FeaturesConfig
from recsys_core.ingest.features.feature_schema import check_feature_vectors, open_feature_tables
from recsys_core.ingest.first_row_group import check_shared_ids, check_time_unit, stored_vector_dim
from recsys_core.ingest.log.log_schema import InteractionsInput, open_interactions
from recsys_core.ingest.vectors.vector_schema import VectorFiles, open_embeddings
from recsys_core.models.tables.table_config import check_width
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
"""End states of runs that a person started as an experiment. Such runs do not count as unfinished."""


def check_inputs(config: PipelineConfig) -> dict[str, str]:
    """Check footers and one row group of each input; raise InputError if one is invalid. Return one line per input, by name."""
    require_writable(config.workspace)
    config.delivery.require_libraries()
    config.package.require_libraries()
    if config.input_config.log_vectors is not None:
        config.input_config.log_vectors.require_libraries()
    log_config = config.interactions_with_context
    log = open_interactions(log_config, allowed_data_root=config.allowed_data_root)
    check_time_unit(log_config, log.sources_by_split["train"])
    embeddings = open_embeddings(config.embeddings, allowed_data_root=config.allowed_data_root)
    num_rows = sum(source.record.num_rows for source in log.sources)
    summary_by_input = {
        "interactions": f"{counted(num_rows, 'row')} in {counted(len(log.sources), log_config.source_noun)}, "
        f"users {log.user_id_type}, items {log.item_id_type}"
    }
    for vector_files in embeddings:
        summary_by_input[vector_files.setting] = _check_vectors(vector_files, log=log, config=config)
    log_vectors = config.input_config.log_vectors
    if log_vectors is not None:
        summary_by_input["embeddings from the log"] = (
            f"{log_vectors.method}, {log_vectors.dim} numbers for each item of a training event"
        )
    id_column_by_table = {"item": log_config.item_column, "user": log_config.user_column}
    check_shared_ids(log_config, log.sources, embeddings, id_column_by_table=id_column_by_table)
    if config.features is not None:
        summary_by_input["features"] = _check_features(config.features, log=log, embeddings=embeddings, config=config)
    return summary_by_input


def _check_vectors(vector_files: VectorFiles, *, log: InteractionsInput, config: PipelineConfig) -> str:
    """Raise InputError if the ids or the width of vectors do not fit the model. Return one line about the vectors."""
    table_name = vector_files.config.table
    expected_id_type = {"item": log.item_id_type, "user": log.user_id_type}.get(table_name, vector_files.id_type)
    if vector_files.id_type != expected_id_type:
        raise InputError(
            f"{vector_files.setting}: the ids of the vectors are {vector_files.id_type}, but the ids of the log's "
            f"{table_name}s are {expected_id_type}; write both with the same type"
        )
    dim = stored_vector_dim(vector_files)
    if dim is not None:
        check_width(dim, config.tables[table_name].dim if table_name in config.tables else None, table=table_name)
    width_text = f"{dim} numbers each" if dim else "lengths differ in the first rows"
    num_files = len(vector_files.sources)
    return f"{counted(vector_files.num_rows, 'vector')} of {table_name} in {counted(num_files, 'file')}, {width_text}"


def _check_features(
    features_config: FeaturesConfig, *, log: InteractionsInput, embeddings: Sequence[VectorFiles], config: PipelineConfig
) -> str:
    """Raise InputError if a feature table does not fit the log or the vectors. Return one line about all features."""
    feature_tables = open_feature_tables(
        features_config,
        user_id_type=log.user_id_type,
        item_id_type=log.item_id_type,
        context_sources=log.sources,
        allowed_data_root=config.allowed_data_root,
    )
    check_feature_vectors(
        feature_tables, id_type_by_table={vector_files.config.table: vector_files.id_type for vector_files in embeddings}
    )
    return ", ".join(
        f"{len(table.features)} of {'the context' if table.owner_kind == 'context' else f'{table.owner_kind}s'}"
        for table in feature_tables
    )


def check_resume(config: PipelineConfig, run: Run) -> None:
    """Raise InputError if `run` does not exist, or if its config.yaml names another pipeline or registered model."""
    if not run.config_file.is_file():
        run_ids = [existing_run.run_id for existing_run in Workspace(run.workspace).runs()]
        raise InputError(
            f"cannot resume {run.run_id}: no such run in {run.folder.parent}; the runs are {', '.join(run_ids) or 'none'}"
        )
    try:
        run_config = load_config(run.config_file)
    except InputError as error:
        raise InputError(f"cannot resume {run.run_id}: its config cannot be read: {error}; start a new run") from None
    for setting, run_value, config_value in (
        ("name", run_config.name, config.name),
        ("registry.model_name", run_config.registry.model_name, config.registry.model_name),
    ):
        if run_value != config_value:
            raise InputError(
                f"cannot resume {run.run_id}: {run.config_file} has {setting} {shown(run_value)}, but this config has "
                f"{setting} {shown(config_value)}; resume the run with the config of its own pipeline, or start a new run"
            )


def choose_run_to_resume(config: PipelineConfig) -> str | None:
    """Return the id of the unfinished run that a scheduled run resumes; None if a new run starts. Log the choice."""
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
    """Return why a scheduled run must not resume `run`; None if it can resume the run."""
    if config.schedule.unfinished_run == "new":
        return "schedule.unfinished_run is new"
    if record.num_starts >= MAX_STARTS:
        return f"the unfinished run has been started {counted(record.num_starts, 'time')}"
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
