"""MLflow runs of a tuning study: a parent run for the study, and a nested run for each trial."""

import time

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus, ViewType
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME

from tasks.registry.mlflow_client import call_or_warn
from tasks.registry.tracking import as_metrics, log_metrics, log_params, open_run
from tasks.runs.context import StageContext
from tasks.tuning.study import FinishedTrial, Study, TrialEnding

TRIAL_TAG = "nightjar.trial"
ENDING_TAG = "nightjar.ending"
REASON_TAG = "nightjar.reason"
STATUS_BY_ENDING: dict[TrialEnding, int] = {
    "complete": RunStatus.FINISHED,
    "pruned": RunStatus.KILLED,
    "failed": RunStatus.FAILED,
}
_MAX_REASON_LENGTH = 500
_MAX_TRIALS = 10_000


def log_study(context: StageContext, study: Study, *, is_done: bool) -> None:
    """Log the finished trials that are not in MLflow yet. If the study is done, also log its files and its best trial.

    If MLflow does not work, a warning is logged, and the next call logs the missing trials.
    """

    def log(client: MlflowClient) -> None:
        parent_run_id, best_trial = open_run(client, context), study.best_trial
        client.update_run(parent_run_id, status=RunStatus.to_string(RunStatus.RUNNING))
        log_params(client, parent_run_id, config_file=study.config_file)
        _log_trials(client, parent_run_id, study)
        if not is_done:
            return
        if best_trial is not None and best_trial.value is not None:
            log_metrics(client, parent_run_id, as_metrics({f"validation/best/{study.metric}": best_trial.value}))
            client.set_tag(parent_run_id, TRIAL_TAG, str(best_trial.number))
        for path in (study.config_file, study.history_file, *([study.best_file] if best_trial else [])):
            client.log_artifact(parent_run_id, str(path))
        client.set_terminated(parent_run_id, RunStatus.to_string(RunStatus.FINISHED if best_trial else RunStatus.FAILED))

    call_or_warn(log, workspace=context.run.workspace, warning="could not log the trials to MLflow; tuning continues")


def _log_trials(client: MlflowClient, parent_run_id: str, study: Study) -> None:
    experiment_id = client.get_run(parent_run_id).info.experiment_id
    filter_string = f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent_run_id}'"
    nested_runs = client.search_runs([experiment_id], filter_string, ViewType.ACTIVE_ONLY, max_results=_MAX_TRIALS)
    info_by_trial = {run.data.tags[TRIAL_TAG]: run.info for run in nested_runs}
    for trial in study.finished_trials:
        run_info = info_by_trial.get(str(trial.number))
        if run_info is not None and run_info.status != RunStatus.to_string(RunStatus.RUNNING):
            continue
        now_ms = int(time.time() * 1000)
        if run_info is None:
            tags = {MLFLOW_PARENT_RUN_ID: parent_run_id, MLFLOW_RUN_NAME: f"trial-{trial.number}", TRIAL_TAG: str(trial.number)}
            run_info = client.create_run(experiment_id, start_time=now_ms - int(trial.seconds * 1000), tags=tags).info
        _log_trial(client, run_info.run_id, trial, metric=study.metric, now_ms=now_ms)


def _log_trial(client: MlflowClient, run_id: str, trial: FinishedTrial, *, metric: str, now_ms: int) -> None:
    metric_name = f"validation/{metric.replace('@', '_at_')}"
    epoch_metrics = [Metric(metric_name, value, now_ms, epoch) for epoch, value in sorted(trial.epochs.items())]
    best_metrics = [] if trial.value is None else as_metrics({f"validation/best/{metric}": trial.value})
    params = [Param(setting, str(value)) for setting, value in trial.settings.items()]
    client.log_batch(run_id, metrics=[*epoch_metrics, *best_metrics], params=params)
    client.set_tag(run_id, ENDING_TAG, trial.ending)
    client.set_tag(run_id, REASON_TAG, trial.reason[:_MAX_REASON_LENGTH])
    client.set_terminated(run_id, RunStatus.to_string(STATUS_BY_ENDING[trial.ending]))
