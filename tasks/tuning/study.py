"""Hyperparameter search: an Optuna study in a sqlite file.

An interrupted trial is resumed under its number, and every trial has a sampler with its own seed. An interrupted study
therefore tries the same settings as a study that is not interrupted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import optuna
from matplotlib.ticker import MaxNLocator
from optuna.trial import FrozenTrial, TrialState

from recsys_core import plots
from recsys_core.config import Frozen
from recsys_core.manifests import create_own_folder
from recsys_core.seeds import trial_seed
from tasks.tuning.config import RangeConfig, TuningConfig, label_of

TrialEnding = Literal["complete", "pruned", "failed"]
STATE_BY_ENDING: dict[TrialEnding, TrialState] = {
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}


class TrialResult(Frozen):
    """Result of a trial.

    Attributes:
        value: metric of the best epoch; None if no epoch was validated.
        reason: why the trial failed.
    """

    ending: TrialEnding
    value: float | None = None
    seconds: float
    reason: str = ""


class FinishedTrial(TrialResult):
    """A finished trial: its number, its settings, and the metric by epoch (1-based)."""

    number: int
    settings: dict[str, Any]
    epochs: dict[int, float]


@dataclass(frozen=True)
class RunningTrial:
    """A running trial: its settings, and the Optuna trial that it reports to."""

    settings: dict[str, Any]
    optuna_trial: optuna.Trial
    reported_epochs: frozenset[int]
    """Epochs that were reported before an interruption. Optuna would warn about a second report."""

    @property
    def number(self) -> int:
        """Number of the trial in the study, from 0."""
        return self.optuna_trial.number

    def report(self, epoch: int, value: float) -> None:
        """Record the metric after `epoch`."""
        if epoch not in self.reported_epochs:
            self.optuna_trial.report(value, epoch)

    def raise_if_pruned(self) -> None:
        """Raise optuna.TrialPruned if the metric is below the median of the complete trials at the same epoch."""
        if self.optuna_trial.should_prune():
            raise optuna.TrialPruned


class Study:
    """All trials of one search for the highest metric. `folder` contains study.db, the reports and the trials."""

    def __init__(self, config: TuningConfig, *, folder: Path, metric: str, run_id: str) -> None:
        """Open the study in `folder`, or create it. `run_id` becomes the name of the MLflow run of a new study."""
        create_own_folder(folder)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.folder, self.metric, self.name = folder, metric, folder.name
        self.config_file = folder / "config.yaml"
        self.best_file = folder / "best.yaml"
        self.history_file = folder / "history.png"
        self._config = config
        self._study = optuna.create_study(
            storage=f"sqlite:///{folder / 'study.db'}",
            study_name=self.name,
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=config.startup_trials),
        )
        if "run_id" not in self._study.user_attrs:
            self._study.set_user_attr("run_id", run_id)

    @property
    def run_id(self) -> str:
        """Name of the study's MLflow run."""
        return str(self._study.user_attrs["run_id"])

    @property
    def finished_trials(self) -> list[FinishedTrial]:
        """The finished trials by number."""
        return [
            self._finished_trial(trial)
            for trial in self._study.get_trials(deepcopy=False, states=tuple(STATE_BY_ENDING.values()))
        ]

    @property
    def best_trial(self) -> FinishedTrial | None:
        """The complete trial with the highest metric, the first one if several are equal; None if no trial is complete."""
        return next((trial for trial in sort_best_first(self.finished_trials) if trial.ending == "complete"), None)

    def start_trial(self) -> RunningTrial:
        """Resume the trial that was interrupted, or start a new one."""
        interrupted_trials = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        trial_number = interrupted_trials[0].number if interrupted_trials else len(self._study.get_trials(deepcopy=False))
        self._study.sampler = optuna.samplers.TPESampler(seed=trial_seed(self._config.seed, trial=trial_number))
        optuna_trial = optuna.Trial(self._study, interrupted_trials[0]._trial_id) if interrupted_trials else self._study.ask()
        return RunningTrial(
            settings={name: _suggest(optuna_trial, name, value_range) for name, value_range in self._config.ranges.items()},
            optuna_trial=optuna_trial,
            reported_epochs=frozenset(interrupted_trials[0].intermediate_values if interrupted_trials else ()),
        )

    def finish_trial(self, trial: RunningTrial, result: TrialResult) -> None:
        """Record how a trial ended."""
        trial.optuna_trial.set_user_attr("result", result.model_dump(mode="json"))
        value = result.value if result.ending == "complete" else None
        self._study.tell(trial.optuna_trial, value, state=STATE_BY_ENDING[result.ending])

    def plot_history(self) -> None:
        """Write a plot of the metric by trial, and of the best metric so far, to `history_file`."""
        figure, axes = plots.new_figure(title=f"Tuning study {self.name}")
        values_by_ending: dict[TrialEnding, dict[int, float]] = {"complete": {}, "pruned": {}, "failed": {}}
        for trial in self.finished_trials:
            if trial.value is not None:
                values_by_ending[trial.ending][trial.number] = trial.value
        axes.scatter(
            [*values_by_ending["complete"]], [*values_by_ending["complete"].values()], s=18, color=plots.BLUE, label="complete"
        )
        axes.scatter(
            [*values_by_ending["pruned"]], [*values_by_ending["pruned"].values()], s=18, color=plots.GREY, label="pruned"
        )
        best_so_far = [*accumulate(values_by_ending["complete"].values(), max)]
        axes.step([*values_by_ending["complete"]], best_so_far, where="post", color=plots.GREEN, label="best so far")
        axes.set_xlabel("trial number")
        axes.set_ylabel(f"{self.metric} on the validation split")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        plots.legend_above(axes)
        plots.save_png(figure, self.history_file)

    def _finished_trial(self, frozen_trial: FrozenTrial) -> FinishedTrial:
        settings = {
            setting_name: _choice_with_label(self._config.ranges[setting_name], stored_value)
            for setting_name, stored_value in frozen_trial.params.items()
        }
        return FinishedTrial(
            number=frozen_trial.number,
            settings=settings,
            epochs=frozen_trial.intermediate_values,
            **frozen_trial.user_attrs["result"],
        )


def sort_best_first(trials: Sequence[FinishedTrial]) -> list[FinishedTrial]:
    """Return complete trials in descending order of the metric, then pruned trials, then failed trials."""
    return sorted(trials, key=lambda trial: ([*STATE_BY_ENDING].index(trial.ending), -(trial.value or 0.0), trial.number))


def _suggest(optuna_trial: optuna.Trial, setting_name: str, value_range: RangeConfig) -> Any:
    """Return the value of the setting in a trial; draw the value if the trial does not have one yet."""
    if value_range.choices is not None:  # the study stores labels, because Optuna cannot store a list
        return _choice_with_label(
            value_range, optuna_trial.suggest_categorical(setting_name, [*map(label_of, value_range.choices)])
        )
    assert value_range.low is not None and value_range.high is not None
    if isinstance(value_range.low, int):
        return optuna_trial.suggest_int(
            setting_name, value_range.low, int(value_range.high), log=value_range.log, step=int(value_range.step or 1)
        )
    return optuna_trial.suggest_float(
        setting_name, value_range.low, value_range.high, log=value_range.log, step=value_range.step
    )


def _choice_with_label(value_range: RangeConfig, stored_value: Any) -> Any:
    """Return the choice whose label is `stored_value`, or `stored_value` itself if the range has no choices."""
    if value_range.choices is None:
        return stored_value
    return {label_of(choice): choice for choice in value_range.choices}[stored_value]
