"""The choice of the temperature with `model.temperature: auto`: one epoch with each candidate, compared by validation."""

import logging
import shutil
from collections.abc import Callable

from pydantic import Field

from recsys_core.config import Frozen
from recsys_core.disk import write_text
from recsys_core.errors import InputError
from recsys_core.training.job import RESULT_FILE, TrainJob, TrainResult
from recsys_core.training.warm.starting_model import Champion

logger = logging.getLogger(__name__)
CANDIDATE_TEMPERATURES = (0.07, 0.1, 0.15, 0.2)
"""Higher temperatures are no candidates: they make the model better after the first epoch, but worse after the last epoch."""
TRIALS_FILE, TRIALS_FOLDER = "temperature.json", "temperature"


class TemperatureTrials(Frozen):
    """The temperature of a training, and the trials that chose it.

    Attributes:
        metric_by_temperature: validation metric after one epoch, by temperature; empty if there was no choice.
    """

    temperature: float
    metric_by_temperature: dict[str, float] = Field(default_factory=dict)

    @classmethod
    def run(
        cls,
        job: TrainJob,
        *,
        champion: Champion | None,
        num_validation_events: int,
        train: Callable[[TrainJob], object],
    ) -> "TemperatureTrials":
        """Return the temperature of `job`. With `auto` and without a champion, train one epoch with each candidate.

        The work folder keeps the complete trials of an interrupted training.

        Args:
            champion: model that the training starts from; its temperature is kept.
            train: trains a job to its end.

        Raises InputError if no validation event can choose the temperature.
        """
        config = job.spec.config
        if config.temperature != "auto":
            return cls(temperature=config.temperature)
        if champion is not None:  # old manifests have no temperature; the settings then have a number
            return cls(temperature=champion.train.temperature or champion.spec.config.start_temperature)
        if job.training.validation is None or num_validation_events == 0:
            raise InputError(
                "model.temperature is auto, which compares temperatures on the validation split, but "
                + ("training.validation is null" if job.training.validation is None else "the split holds no event")
                + "; set model.temperature to a number, such as 0.1, or hold out validation events"
            )
        trials_path = job.work_folder / TRIALS_FILE
        try:
            trials = cls.model_validate_json(trials_path.read_bytes())
        except (FileNotFoundError, ValueError):  # a power failure may cut off a file
            trials = cls(temperature=config.start_temperature)
        for temperature in CANDIDATE_TEMPERATURES:
            if f"{temperature:g}" not in trials.metric_by_temperature:
                trials = trials.with_trial(
                    temperature, metric=_metric_after_one_epoch(job, temperature=temperature, train=train)
                )
                write_text(trials_path, trials.model_dump_json())
        return trials

    def with_trial(self, temperature: float, *, metric: float) -> "TemperatureTrials":
        """Return the trials with one more trial, and with the temperature that has the best metric."""
        metric_by_temperature = self.metric_by_temperature | {f"{temperature:g}": metric}
        best_temperature = max(metric_by_temperature, key=metric_by_temperature.__getitem__)
        return TemperatureTrials(temperature=float(best_temperature), metric_by_temperature=metric_by_temperature)


def _metric_after_one_epoch(job: TrainJob, *, temperature: float, train: Callable[[TrainJob], object]) -> float:
    """Train one epoch in a separate folder; return the validation metric."""
    validation = job.training.validation
    assert validation is not None
    trial_folder = job.work_folder / TRIALS_FOLDER / f"{temperature:g}"
    trial_folder.mkdir(parents=True, exist_ok=True)
    training = job.training.model_copy(update={"epochs": 1, "profile": None})
    spec = job.spec.with_choices(temperature=temperature)
    train(job.model_copy(update={"work_folder": trial_folder, "spec": spec, "training": training}))
    metric_name = f"{validation.metric}@{validation.k}"
    result = TrainResult.model_validate_json((trial_folder / RESULT_FILE).read_bytes())
    if metric_name not in result.validation:
        raise InputError(
            "model.temperature is auto, which compares temperatures on the validation split, but no user in the split has a "
            "target that is new to the user; set model.temperature to a number, such as 0.1"
        )
    shutil.rmtree(trial_folder)
    logger.info("temperature %g: validation %s %.4f after one epoch", temperature, metric_name, result.validation[metric_name])
    return result.validation[metric_name]
