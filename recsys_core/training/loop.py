"""The training loop of one rank: resume or warm start, epochs, validation, checkpoints, early stopping.

Shapes: I items.
"""

from contextlib import nullcontext

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer

from recsys_core.dataset.batch import Assembler
from recsys_core.dataset.events import EventStore
from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.dataset.loader import ExampleSource, RankShare, TrainLoader
from recsys_core.errors import InputError
from recsys_core.launching.heartbeat import MIN_TIMEOUT_S, UNMEASURED_TIMEOUT_S, HeartbeatWriter
from recsys_core.launching.rank import Process
from recsys_core.manifests import require_manifest
from recsys_core.models.loss.catalogue import catalogue_share
from recsys_core.models.loss.objective import negative_share
from recsys_core.models.task import RetrievalTask
from recsys_core.seeds import step_seed
from recsys_core.sharding.config import PLAN_NAME
from recsys_core.training.checkpoint import BestValidation, Checkpointer, CheckpointManifest, checkpoint_name, restore
from recsys_core.training.export.encoding import Encoder
from recsys_core.training.job import (
    CHECKPOINTS_FOLDER,
    JOB_FILE,
    METRICS_FILE,
    PROFILE_FOLDER,
    RESULT_FILE,
    TrainJob,
    TrainResult,
)
from recsys_core.training.metrics_log import MetricsLog, make_profiler, raise_if_not_finite
from recsys_core.training.model.averaging import WeightAverage
from recsys_core.training.model.optimizers import LearningRates, make_optimizer, set_completed_steps
from recsys_core.training.model.sharded_model import initial_model
from recsys_core.training.validation import Validator
from recsys_core.training.warm.warm_start import load_champion_accumulators, load_champion_weights


def run_training(job: TrainJob, *, process: Process) -> None:
    """Collective. Train the model of `job` and write metrics.jsonl, checkpoints and result.json to its work folder.

    Raises InputError if there are fewer training events than ranks.
    """
    dataset = job.open_dataset()
    store = EventStore.open(dataset.interactions)
    feature_store = None if dataset.features is None else FeatureStore.open(dataset.features)
    assembler = Assembler(user_batch_key=job.spec.user_batch_key, features=feature_store)
    loader = make_loader(job, store=store, assembler=assembler, process=process)
    if len(loader) == 0:
        raise InputError(
            f"{dataset.interactions.num_train_events} training events are too few for {process.world_size} ranks: each "
            "rank needs at least one event; use fewer ranks or more data"
        )
    model = initial_model(job, store=store, dataset=dataset, process=process)
    validator = None
    if job.training.validation is not None:
        encoder = Encoder(get_unwrapped_module(model), store, assembler, process)
        validator = Validator(
            job.training.validation,
            encoder=encoder,
            interactions=dataset.interactions,
            work_folder=job.work_folder,
            heartbeat_path=job.heartbeat_path,
        )
    trainer = Trainer(job, model=model, loader=loader, validator=validator, process=process)
    with trainer.profiler or nullcontext():
        while not trainer.is_finished:
            trainer.train_epoch()
            trainer.end_epoch()
    trainer.finish()


def make_loader(job: TrainJob, *, store: EventStore, assembler: Assembler, process: Process) -> TrainLoader:
    """Return the loader of this rank's batches."""
    loss_config = job.loss
    return TrainLoader(
        ExampleSource(
            store,
            assembler,
            max_history=job.spec.history_length,
            include_target=job.spec.config.history.include_target,
            max_known_negatives=loss_config.explicit_negatives,
            user_exponent=loss_config.user_exponent,
        ),
        batch_size=job.training.batch_size,
        rank_share=RankShare(process.rank, process.world_size, job.num_planned_ranks),
        seed=job.training.seed,
        num_negatives=loss_config.num_sampled_negatives,
        negative_share_I=negative_share(store.train_count_I, loss_config.negative_sampling_alpha)
        if loss_config.num_sampled_negatives
        else None,
        catalogue_row_N=catalogue_share(store.train_count_I, rank=process.rank, world_size=process.world_size)
        if loss_config.negatives == "all"
        else None,
    )


class Trainer:
    """The state of one training on one rank. The constructor is collective, and loads the checkpoint or the champion.

    Attributes:
        step: number of completed steps.
        saved_step: value of `step` at the newest checkpoint.
        best_validation: the best validation so far; None before the first validation.
        trained_share_by_table: for each gradually unfrozen table, the share of its rows that the current epoch trains.
    """

    def __init__(
        self,
        job: TrainJob,
        *,
        model: DistributedModelParallel,
        loader: TrainLoader,
        validator: Validator | None,
        process: Process,
    ) -> None:
        self.job, self.config, self.process = job, job.training, process
        self.model, self.loader, self.validator = model, loader, validator
        self.steps_per_epoch = len(loader)
        self.total_steps = self.config.epochs * self.steps_per_epoch
        task: RetrievalTask = get_unwrapped_module(model)
        self.head = task.head
        self.head.uses_bf16 = self.config.precision == "bf16"
        self.trained_share_by_table: dict[str, float] = {}
        self.optimizer = make_optimizer(model, spec=job.spec, config=self.config)
        self.learning_rates = LearningRates(self.optimizer, spec=job.spec, config=self.config, total_steps=self.total_steps)
        # TorchRec's prefetching pipeline for cached tables is not used: it locks cache lines, so it fails after detach().
        self.pipeline = TrainPipelineSparseDist(model, self.optimizer, process.device)
        self.dropout_generator = default_generator(process.device)
        # A timeout derived from earlier steps may be too short for torch.profiler, which writes its trace between two steps.
        min_timeout_s = MIN_TIMEOUT_S if self.config.profile is None else UNMEASURED_TIMEOUT_S
        self.heartbeat = HeartbeatWriter(job.heartbeat_path, is_main=process.is_main, min_timeout_s=min_timeout_s)
        num_averaged_epochs = self.config.averaged_epochs
        self.average = WeightAverage(model, num_epochs=num_averaged_epochs) if num_averaged_epochs > 1 else None
        self.step, self.best_validation = load_state(job, model=model, optimizer=self.optimizer, average=self.average)
        self.saved_step = self.step
        self.checkpointer = Checkpointer(
            job.work_folder / CHECKPOINTS_FOLDER,
            fingerprint=job.fingerprint,
            attempt_number=job.attempt,
            keep_checkpoints=self.config.keep_checkpoints,
            text_by_extra_file={JOB_FILE: job.model_dump_json(indent=2), PLAN_NAME: job.plan_path.read_text()},
            heartbeat=self.heartbeat,
            process=process,
        )
        self.metrics_log = MetricsLog(
            job.work_folder / METRICS_FILE,
            spec=job.spec,
            process=process,
            total_steps=self.total_steps,
            num_completed_steps=self.step,
        )
        self.profiler = make_profiler(
            self.config.profile,
            num_steps=self.total_steps - self.step,
            folder=job.work_folder / PROFILE_FOLDER,
            process=process,
        )

    @property
    def is_finished(self) -> bool:
        """Whether the last epoch is complete, or the last `patience` validations brought no improvement."""
        if self.step >= self.total_steps:
            return True
        validation = self.config.validation
        if (
            self.best_validation is None
            or validation is None
            or validation.patience is None
            or self.step % self.steps_per_epoch
        ):
            return False
        num_epochs_since_best = (self.step - self.best_validation.step) // self.steps_per_epoch
        return num_epochs_since_best >= validation.patience * validation.every_epochs

    def train_epoch(self) -> None:
        """Collective. Train the remaining steps of the epoch; write log lines and checkpoints between the steps.

        `end_epoch` writes the log line and the checkpoint after the last step, because both include the validation.
        """
        config = self.config
        epoch_index, first_batch_index = divmod(self.step, self.steps_per_epoch)  # both start from 0
        self.model.train()
        set_completed_steps(self.model, num_steps=self.step)
        self.trained_share_by_table = self.head.set_epoch(epoch_index + 1)
        interval_start = self._begin_steps()
        batches = self.metrics_log.measured_batches(self.loader.epoch(epoch_index, start_batch=first_batch_index))
        for batch_index in range(first_batch_index, self.steps_per_epoch):
            self.learning_rates.set_step(self.step)
            # Dropout is a function of (seed, step, rank), so a resumed run draws the same masks. Only the device's generator is
            # seeded: torch.manual_seed also records its call stack, which takes a millisecond.
            self.dropout_generator.manual_seed(step_seed(config.seed, step=self.step, rank=self.process.rank))
            with self.metrics_log.timed_step():
                loss = self.pipeline.progress(batches)
            if self.profiler is not None:
                self.profiler.step()
            self.step += 1
            is_save_due = self.step % config.checkpoint_every_steps == 0
            is_epoch_complete = batch_index + 1 == self.steps_per_epoch
            # A line is also written before each checkpoint, so that a resumed training writes the same lines.
            is_line_due = is_save_due or is_epoch_complete or self.step % config.log_every_steps == 0
            if self.process.device.type == "cpu" or is_line_due:  # on a GPU, reading the loss waits for the device
                raise_if_not_finite(
                    loss, step=self.step, epoch=epoch_index + 1, model=self.model, spec=self.job.spec, rank=self.process.rank
                )
            self.metrics_log.add_step(loss, num_samples=self.loader.num_batch_queries(batch_index) * self.process.world_size)
            if is_line_due and not is_epoch_complete:
                self._write_log_line(epoch_index + 1)
                self._end_steps(interval_start)
                if is_save_due:
                    self._save()
                interval_start = self._begin_steps()
        # The pipeline replaces the forward methods of the tables, but validation needs the original methods. Here the pipeline
        # can be detached, because it has no unfinished batch.
        self.pipeline.detach()
        self._end_steps(interval_start)

    def _begin_steps(self) -> tuple[int, float]:
        """Send a heartbeat; return the step and the time at which the interval until the next heartbeat starts."""
        return self.step, self.heartbeat.begin("steps")

    def _end_steps(self, interval_start: tuple[int, float]) -> None:
        """Record the duration of the interval, unless it is short, for example the first interval after a resume.

        The timeout is a multiple of the recorded duration, so a short interval would make it too short for later intervals.
        """
        start_step, start_time = interval_start
        config = self.config
        if self.step - start_step >= min(config.log_every_steps, config.checkpoint_every_steps, self.steps_per_epoch):
            self.heartbeat.end("steps", start_time=start_time)

    def end_epoch(self) -> None:
        """Collective. Average the weights, validate if a validation is due, and write a log line.

        Save a checkpoint if one is due, and always after the last epoch and after the best epoch so far.
        """
        epoch = self.step // self.steps_per_epoch
        if self.average is None:
            metrics = self._validate(epoch)
        else:
            self.average.add_epoch(epoch)
            with self.average.in_model():
                metrics = self._validate(epoch)
        self._write_log_line(epoch, validation=metrics)
        is_best_epoch = self.best_validation is not None and self.best_validation.step == self.step
        if is_best_epoch or self.step == self.total_steps or self.step % self.config.checkpoint_every_steps == 0:
            self._save()

    def finish(self) -> None:
        """Collective. Save the last step and wait for the checkpoints; rank 0 writes result.json."""
        if self.saved_step != self.step:
            self._save()
        self.checkpointer.finish()
        if self.process.is_main:
            self._write_result()

    def _validate(self, epoch: int) -> dict[str, float]:
        """Validate, update `best_validation` and return the metrics; return {} if no validation is due after `epoch`."""
        if self.validator is None or not self.validator.has_users:
            return {}
        if epoch % self.validator.config.every_epochs != 0 and epoch != self.config.epochs:
            return {}
        start_time = self.heartbeat.begin("validation")
        metrics, metric_name = self.validator.measure(), self.validator.metric_name
        self.heartbeat.end("validation", start_time=start_time)
        if self.best_validation is None or metrics[metric_name] > self.best_validation.metrics[metric_name]:
            self.best_validation = BestValidation(step=self.step, metrics=metrics)
        return metrics

    def _write_log_line(self, epoch: int, *, validation: dict[str, float] | None = None) -> None:
        table_optimizer = self.config.table_optimizer
        self.metrics_log.write_line(
            self.step,
            epoch=epoch,
            learning_rate=table_optimizer.learning_rate * table_optimizer.scale(self.step - 1, total_steps=self.total_steps),
            trained_share_by_table=self.trained_share_by_table,
            validation=validation or {},
        )

    def _save(self) -> None:
        self.checkpointer.save(self.model, self.optimizer, step=self.step, best=self.best_validation, average=self.average)
        self.saved_step = self.step

    def _write_result(self) -> None:
        num_epochs = self.step // self.steps_per_epoch
        result = TrainResult(
            num_steps=self.step,
            num_epochs=num_epochs,
            num_examples=num_epochs * self.loader.num_epoch_queries * self.process.world_size,
            final_loss=self.metrics_log.last_loss,
            samples_per_s=self.metrics_log.samples_per_s,
            world_size=self.process.world_size,
            checkpoint=checkpoint_name(self.step if self.best_validation is None else self.best_validation.step),
            best_epoch=None if self.best_validation is None else self.best_validation.step // self.steps_per_epoch,
            validation={} if self.best_validation is None else self.best_validation.metrics,
        )
        (self.job.work_folder / RESULT_FILE).write_text(result.model_dump_json())


def load_state(
    job: TrainJob, *, model: DistributedModelParallel, optimizer: CombinedOptimizer, average: WeightAverage | None
) -> tuple[int, BestValidation | None]:
    """Collective. Restore the checkpoint of `job`. Without a checkpoint, load the champion of `job`, if any.

    Returns:
        (number of completed steps, best validation so far).
    """
    if job.resume_folder is not None:
        checkpoint = require_manifest(job.resume_folder, CheckpointManifest, verify=False)
        restore(model, optimizer, checkpoint=checkpoint.folder, average=average)
        return checkpoint.step, checkpoint.best
    if job.warm_start is not None:
        load_champion_weights(model, warm_start=job.warm_start)
        load_champion_accumulators(optimizer, spec=job.spec, warm_start=job.warm_start)
    return 0, None


def default_generator(device: torch.device) -> torch.Generator:
    """Return the random generator from which dropout on `device` draws."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
