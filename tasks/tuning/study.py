"""The search for settings: Optuna's study in a sqlite file, what it tries next, and what has been found.

A trial that was interrupted is gone on with under its number, and each trial draws from a random state of its own: a study
that was interrupted ends as it would have.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import optuna
from matplotlib.ticker import MaxNLocator
from optuna.trial import FrozenTrial, TrialState

from recsys_core import plots
from recsys_core.config import Frozen
from recsys_core.manifests import own
from recsys_core.seeds import trial_seed
from tasks.tuning.config import RangeConfig, TuningConfig, label_of

Ending = Literal["complete", "pruned", "failed"]
STATES: dict[Ending, TrialState] = {
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}


class Result(Frozen):
    """How one trial ended. value: the metric of its best epoch; None where none was measured."""

    ending: Ending
    value: float | None = None
    seconds: float
    reason: str = ""


class Tried(Result):
    """A finished trial. `epochs`: the metric by epoch (1-based)."""

    number: int
    settings: dict[str, Any]
    epochs: dict[int, float]


class Attempt:
    """A trial on its way: its number (0-based), the settings it tries, and where it tells how it goes."""

    def __init__(self, trial: optuna.Trial, *, ranges: dict[str, RangeConfig], known_epochs: set[int]) -> None:
        self.trial, self.number = trial, trial.number
        self.settings = {name: suggest(trial, name, wish) for name, wish in ranges.items()}
        self._known_epochs = known_epochs

    def report(self, epoch: int, value: float) -> None:
        """Takes the metric after `epoch`."""
        if epoch not in self._known_epochs:  # told before the interruption
            self.trial.report(value, epoch)

    def require_hope(self) -> None:
        """Raises optuna.TrialPruned if the median of the complete trials was better after as many epochs."""
        if self.trial.should_prune():
            raise optuna.TrialPruned


def suggest(trial: optuna.Trial, name: str, wish: RangeConfig) -> Any:
    """The value that `trial` has, or draws, for the setting `name`."""
    if wish.choices is not None:  # by label: Optuna stores no lists
        return {label_of(choice): choice for choice in wish.choices}[
            trial.suggest_categorical(name, [*map(label_of, wish.choices)])
        ]
    assert wish.low is not None and wish.high is not None
    if isinstance(wish.low, int):
        return trial.suggest_int(name, wish.low, int(wish.high), log=wish.log, step=int(wish.step or 1))
    return trial.suggest_float(name, wish.low, wish.high, log=wish.log, step=wish.step)


class Study:
    """All trials of one search; the higher the metric, the better. `folder` holds study.db and what is written about it."""

    def __init__(self, config: TuningConfig, *, folder: Path, metric: str, run_id: str) -> None:
        """Opens the study in `folder`, or makes it. run_id: of the MLflow run of a new study."""
        own(folder)
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # the terminal is ours
        self.folder, self.metric, self.name = folder, metric, folder.name
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
    def config_file(self) -> Path:
        """The config that the study was last started with."""
        return self.folder / "config.yaml"

    @property
    def best_file(self) -> Path:
        """The best settings so far, to be pasted into a config."""
        return self.folder / "best.yaml"

    @property
    def history_file(self) -> Path:
        """The picture of `plot_history`."""
        return self.folder / "history.png"

    @property
    def run_id(self) -> str:
        """Name of the study's MLflow run."""
        return str(self._study.user_attrs["run_id"])

    @property
    def tried(self) -> list[Tried]:
        """The finished trials, in order."""
        return [self._as_tried(trial) for trial in self._study.get_trials(deepcopy=False, states=tuple(STATES.values()))]

    @property
    def best(self) -> Tried | None:
        """The complete trial with the highest metric, the earliest of equals."""
        return next((trial for trial in best_first(self.tried) if trial.ending == "complete"), None)

    def next(self) -> Attempt:
        """The trial that an earlier process left unfinished, or a new one."""
        left = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        number = left[0].number if left else len(self._study.get_trials(deepcopy=False))
        self._study.sampler = optuna.samplers.TPESampler(seed=trial_seed(self._config.seed, trial=number))
        trial = optuna.Trial(self._study, left[0]._trial_id) if left else self._study.ask()
        known = set(left[0].intermediate_values) if left else set()
        return Attempt(trial, ranges=self._config.ranges, known_epochs=known)

    def end(self, attempt: Attempt, result: Result) -> None:
        """Writes down how a trial ended."""
        attempt.trial.set_user_attr("result", result.model_dump(mode="json"))
        value = result.value if result.ending == "complete" else None
        self._study.tell(attempt.trial, value, state=STATES[result.ending])

    def _as_tried(self, trial: FrozenTrial) -> Tried:
        labels = {
            name: {label_of(choice): choice for choice in wish.choices}
            for name, wish in self._config.ranges.items()
            if wish.choices is not None
        }
        settings = {name: labels[name][value] if name in labels else value for name, value in trial.params.items()}
        return Tried(number=trial.number, settings=settings, epochs=trial.intermediate_values, **trial.user_attrs["result"])


def best_first(tried: Sequence[Tried]) -> list[Tried]:
    """Complete trials by falling metric, then the pruned ones, then the failed ones."""
    return sorted(tried, key=lambda trial: ([*STATES].index(trial.ending), -(trial.value or 0.0), trial.number))


def plot_history(study: Study, *, path: Path) -> Path:
    """Write a PNG of the metric by trial and of the best metric so far. Return `path`."""
    figure, axes = plots.new_figure(title=f"Tuning study {study.name}")
    points: dict[Ending, list[tuple[int, float]]] = {"complete": [], "pruned": [], "failed": []}
    for trial in study.tried:
        if trial.value is not None:
            points[trial.ending].append((trial.number, trial.value))
    colours: dict[Ending, str] = {"complete": plots.BLUE, "pruned": plots.GREY}
    for ending, colour in colours.items():
        axes.scatter([x for x, _ in points[ending]], [y for _, y in points[ending]], s=18, color=colour, label=ending)
    best_so_far = [*accumulate((value for _, value in points["complete"]), max)]
    axes.step([x for x, _ in points["complete"]], best_so_far, where="post", color=plots.GREEN, label="best so far")
    axes.set_xlabel("trial number")
    axes.set_ylabel(f"{study.metric} on the validation split")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plots.legend_above(axes)
    return plots.save_png(figure, path)
