"""The spread of the metric between seeds of the training, which a bootstrap over the users does not see."""

import json
from statistics import NormalDist, fmean, stdev

from prefect import flow

from flows.nightly import nightly_retrain
from flows.prefect_runs import tag_flow_run
from flows.settings.pipeline import PipelineConfig
from recsys_core.config import Frozen
from recsys_core.errors import StageError
from recsys_core.manifests import EvaluationManifest, read_unchecked_manifest
from tasks.progress.reporting import LOG
from tasks.runs.run import Run
from tasks.runs.workspace import Workspace

FOLDER_NAME, RESULT_FILE = "gate-noise", "gate-noise.json"
"""Folder in the workspace, which is a workspace of its own, and the file in it with the result."""


class GateNoise(Frozen):
    """Spread of the metric of the gate between trainings that differ in the seed alone.

    Attributes:
        value_by_seed: metric on the test split, by seed of the training.
    """

    metric: str
    value_by_seed: dict[int, float]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return fmean(self.value_by_seed.values())

    @property
    def relative_sd(self) -> float:
        """Standard deviation between the seeds divided by the mean."""
        return stdev(self.value_by_seed.values()) / self.mean if self.mean else 0.0

    def chance_of_drop(self, margin: float) -> float:
        """Return the probability that one of two equal trainings is worse than the other by more than the relative `margin`.

        >>> round(GateNoise(metric="recall@20", value_by_seed={1: 0.19, 2: 0.21}).chance_of_drop(0.05), 3)
        0.309
        """
        return 1 - NormalDist().cdf(margin / (2**0.5 * self.relative_sd)) if self.relative_sd else 0.0


@flow(name="gate-noise", flow_run_name="{config.name} with {num_seeds} seeds")
def measure_gate_noise(config: PipelineConfig, num_seeds: int) -> GateNoise:
    """Train and evaluate with `num_seeds` seeds, each from scratch. Complete stages of an interrupted measurement are kept.

    Raises:
        StageError: a training did not reach its evaluation.
    """
    tag_flow_run(config.name)
    folder, metric = config.workspace.absolute() / FOLDER_NAME, config.registry.metric
    values: dict[int, float] = {}
    with Run("data", workspace=config.workspace.absolute(), parent=FOLDER_NAME).lock():
        for seed in range(config.training.seed, config.training.seed + num_seeds):
            training = config.training.model_copy(update={"seed": seed, "warm_start": None})
            run = Workspace(folder).run(f"seed-{seed}")
            LOG.info("training.seed %d", seed)
            state = nightly_retrain(
                config.model_copy(update={"workspace": folder, "training": training}),
                run_id=run.run_id,
                until="evaluate",
                return_state=True,
            )
            evaluation = read_unchecked_manifest(run.stage_folder(EvaluationManifest), EvaluationManifest)
            if evaluation is None:
                raise StageError(f"the training with seed {seed} ended as {state.name}: {state.message}")
            values[seed] = evaluation.metrics[f"test/{metric}"]
        noise = GateNoise(metric=metric, value_by_seed=values)
        (folder / RESULT_FILE).write_text(json.dumps(noise.model_dump(mode="json"), indent=2) + "\n")
    return noise
