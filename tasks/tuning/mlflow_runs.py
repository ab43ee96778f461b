"""The MLflow side of a tuning: one run for the study, and nested in it one for each trial."""

import time
from collections.abc import Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus, ViewType
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME

from tasks.registry.mlflow_client import call_or_warn
from tasks.registry.tracking import as_metrics, log_metrics, log_params, open_run
from tasks.run import Run
from tasks.tuning.study import Ending, Tried

TRIAL_TAG = "nightjar.trial"
ENDING_TAG = "nightjar.ending"
REASON_TAG = "nightjar.reason"
STATUS: dict[Ending, int] = {"complete": RunStatus.FINISHED, "pruned": RunStatus.KILLED, "failed": RunStatus.FAILED}
_REASON_CHARACTERS = 500
_MOST_TRIALS = 10_000


def deliver_study(
    run: Run, tried: Sequence[Tried], *, metric: str, best: Tried | None, config_file: Path, files: Sequence[Path], done: bool
) -> None:
    """The finished trials that MLflow does not have yet; `done`: also `files`, and the study's run ends.

    metric: the name of what was measured; run: of the study. An outage costs a warning; the next call makes up for it.
    """

    def deliver(client: MlflowClient) -> None:
        parent = open_run(client, run)
        client.update_run(parent, status=RunStatus.to_string(RunStatus.RUNNING))
        log_params(client, parent, config_file=config_file)
        deliver_trials(client, parent, tried, metric=metric)
        if not done:
            return
        if best is not None and best.value is not None:
            log_metrics(client, parent, as_metrics({f"validation/best/{metric}": best.value}))
            client.set_tag(parent, TRIAL_TAG, str(best.number))
        for file in files:
            client.log_artifact(parent, str(file))
        client.set_terminated(parent, RunStatus.to_string(RunStatus.FINISHED if best else RunStatus.FAILED))

    call_or_warn(deliver, workspace=run.workspace, warning="could not log the trials to MLflow; tuning continues")


def deliver_trials(client: MlflowClient, parent: str, tried: Sequence[Tried], *, metric: str) -> None:
    """A run below `parent` for each trial without a finished one."""
    experiment_id = client.get_run(parent).info.experiment_id
    nested = f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent}'"
    found = client.search_runs([experiment_id], nested, ViewType.ACTIVE_ONLY, max_results=_MOST_TRIALS)
    there = {child.data.tags[TRIAL_TAG]: child.info for child in found}
    for trial in tried:
        child = there.get(str(trial.number))
        if child is not None and child.status != RunStatus.to_string(RunStatus.RUNNING):
            continue
        now_ms = int(time.time() * 1000)
        if child is None:
            tags = {MLFLOW_PARENT_RUN_ID: parent, MLFLOW_RUN_NAME: f"trial-{trial.number}", TRIAL_TAG: str(trial.number)}
            child = client.create_run(experiment_id, start_time=now_ms - int(trial.seconds * 1000), tags=tags).info
        name = f"validation/{metric.replace('@', '_at_')}"
        curve = [Metric(name, value, now_ms, epoch) for epoch, value in sorted(trial.epochs.items())]
        top = [] if trial.value is None else as_metrics({f"validation/best/{metric}": trial.value})
        params = [Param(setting, str(value)) for setting, value in trial.settings.items()]
        client.log_batch(child.run_id, metrics=[*curve, *top], params=params)
        client.set_tag(child.run_id, ENDING_TAG, trial.ending)
        client.set_tag(child.run_id, REASON_TAG, trial.reason[:_REASON_CHARACTERS])
        client.set_terminated(child.run_id, RunStatus.to_string(STATUS[trial.ending]))
