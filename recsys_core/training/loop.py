"""The training loop of one rank."""

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer

from recsys_core.data.assembly import Assembler
from recsys_core.data.events import EventStore
from recsys_core.data.features.store import FeatureStore
from recsys_core.data.loader import TrainLoader
from recsys_core.errors import InputError
from recsys_core.manifests import Dataset, require_manifest
from recsys_core.models.sampling import negative_share
from recsys_core.models.task import RetrievalTask
from recsys_core.seeds import step_seed
from recsys_core.training.checkpoint import (
    JOB_COPY,
    PLAN_COPY,
    Best,
    Checkpointer,
    CheckpointManifest,
    checkpoint_name,
    restore,
)
from recsys_core.training.encoding import Encoder
from recsys_core.training.job_spec import TrainJob, TrainResult
from recsys_core.training.metrics_log import Meter, refuse_nan
from recsys_core.training.optimizers import LearningRates, make_optimizer
from recsys_core.training.process_group import Process
from recsys_core.training.sharded_model import first_model
from recsys_core.training.step_timer import StepClock, profiled
from recsys_core.training.validation import Validator
from recsys_core.training.warm_start import fill_from_champion, fill_sums

RESULT_NAME = "result.json"
METRICS_NAME = "metrics.jsonl"
CHECKPOINTS_NAME = "checkpoints"
PROFILE_NAME = "profile"


def run_training(job: TrainJob, *, process: Process) -> None:
    """Trains from the checkpoint of `job` (or from its first model) until it is done; rank 0 writes result.json."""
    dataset = Dataset.open(interactions=job.interactions, embeddings=job.embeddings, features=job.features)
    interactions, features = dataset.interactions, dataset.features
    store = EventStore.open(interactions)
    assembler = Assembler(user=job.spec.user_batch_key, features=None if features is None else FeatureStore.open(features))
    loader = make_loader(job, store=store, assembler=assembler, process=process)
    if len(loader) == 0:
        raise InputError(
            f"{interactions.train_events} training events for {process.world_size} ranks: fewer than one each; "
            "use fewer processes or more data"
        )
    model = first_model(job, store=store, dataset=dataset, process=process)
    training = Training(job, model=model, loader=loader, process=process)
    validation = job.training.validation
    if validation is not None:
        validator = Validator(
            validation,
            spec=job.spec,
            interactions=interactions,
            store=store,
            process=process,
            work=job.work,
            alive=job.work / METRICS_NAME,
        )
        if validator.can_measure:
            training.validator = validator
            training.encoder = Encoder(get_unwrapped_module(model), store, assembler, process)
    training.run()


def generator_of(device: torch.device) -> torch.Generator:
    """What dropout on `device` draws from."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def make_loader(job: TrainJob, *, store: EventStore, assembler: Assembler, process: Process) -> TrainLoader:
    """This rank's batches."""
    history, loss = job.spec.config.history, job.loss
    return TrainLoader(
        store,
        assembler=assembler,
        batch_size=job.training.batch_size,
        rank=process.rank,
        world_size=process.world_size,
        seed=job.training.seed,
        max_history=history.length,
        include_target=history.include_target,
        num_negatives=loss.num_negatives,
        negative_share_I=negative_share(store.item_count, loss.negative_sampling_alpha) if loss.num_negatives else None,
        planned_ranks=job.planned_ranks,
    )


class Training:
    """Steps, epochs, and what happens at the end of each: measured, saved, stopped."""

    validator: Validator | None = None
    encoder: Encoder | None = None

    def __init__(self, job: TrainJob, *, model: DistributedModelParallel, loader: TrainLoader, process: Process) -> None:
        self._job, self._config, self._process = job, job.training, process
        self._model, self._loader = model, loader
        self._optimizer: CombinedOptimizer = make_optimizer(model, spec=job.spec, config=job.training)
        self._total_steps = self._config.epochs * len(loader)
        self._rates = LearningRates(self._optimizer, spec=job.spec, config=job.training, total_steps=self._total_steps)
        # For cached tables too: the prefetching pipeline needs locked cache lines, and does not survive detach().
        self._pipeline = TrainPipelineSparseDist(model, self._optimizer, process.device)
        self._clock = StepClock(job.spec, process=process)
        self._checkpointer = Checkpointer(
            job.work / CHECKPOINTS_NAME,
            fingerprint=job.fingerprint,
            attempt=job.attempt,
            keep=self._config.keep_checkpoints,
            papers={JOB_COPY: job.model_dump_json(indent=2), PLAN_COPY: job.plan.read_text()},
            alive=job.work / METRICS_NAME,
            process=process,
        )
        self._best: Best | None = None
        self._done = self._saved = 0
        self._unfrozen: dict[str, float] = {}
        self._generator = generator_of(process.device)
        task: RetrievalTask = get_unwrapped_module(model)
        self._head = task.head
        self._head.bf16 = self._config.precision == "bf16"

    def run(self) -> None:
        """Goes on from the job's checkpoint to the last epoch, or to where validation no longer gets better."""
        if self._job.resume is not None:
            checkpoint = require_manifest(self._job.resume, CheckpointManifest, verify=False)
            self._done = self._saved = checkpoint.step
            self._best = checkpoint.best
            restore(self._model, self._optimizer, checkpoint=checkpoint.folder)
        elif self._job.warm is not None:
            fill_from_champion(self._model, warm=self._job.warm)
            fill_sums(self._optimizer, spec=self._job.spec, default=self._config.table_optimizer, warm=self._job.warm)
        self._meter = Meter(
            self._job.work / METRICS_NAME, process=self._process, total_steps=self._total_steps, first_step=self._done
        )
        traces = self._job.work / PROFILE_NAME
        with profiled(self._config.profile, folder=traces, process=self._process) as self._after_step:
            while self._done < self._total_steps and not self._has_stalled():
                self._run_epoch(self._done // len(self._loader), start_batch=self._done % len(self._loader))
        if self._saved != self._done:
            self._save()
        self._checkpointer.finish()
        if self._process.is_main:
            self._write_result()

    def _run_epoch(self, epoch: int, *, start_batch: int) -> None:
        """The steps of `epoch` (0-based) from `start_batch` on, then what its end brings."""
        self._model.train()
        self._unfrozen = self._head.set_epoch(epoch + 1)
        batches = self._clock.batches(self._loader.epoch(epoch, start_batch=start_batch))
        for batch in range(start_batch, len(self._loader)):
            self._rates.set_step(self._done)
            # Dropout as a function of (seed, step, rank): nothing to save, and a resumed run draws the same.
            # Of the device's generator alone: torch.manual_seed also notes where it was called from, which takes a millisecond.
            self._generator.manual_seed(step_seed(self._config.seed, step=self._done, rank=self._process.rank))
            with self._clock.step(is_sample=self._done % self._config.log_every_steps == 0):
                loss = self._pipeline.progress(batches)
            self._after_step()
            self._done += 1
            self._count(loss, samples=self._loader.batch_samples(batch) * self._process.world_size, epoch=epoch + 1)
            if batch + 1 == len(self._loader):
                break  # what its end brings is logged in one line with this step, and saved
            is_saved = self._done % self._config.checkpoint_every_steps == 0
            if is_saved or self._done % self._config.log_every_steps == 0:
                self._log(epoch + 1)  # also where it is saved, so that a resumed run has the same means over the same steps
            if is_saved:
                self._save()
        # The lookups belong to the pipeline while it is attached; it has no batch left, so nothing is lost.
        self._pipeline.detach()
        self._end_epoch(epoch + 1)

    def _count(self, loss: Tensor, *, samples: int, epoch: int) -> None:
        # Looking at a number on a GPU waits for it.
        if self._process.device.type == "cpu" or self._done % self._config.log_every_steps == 0:
            refuse_nan(loss, step=self._done, epoch=epoch, model=self._model, spec=self._job.spec, rank=self._process.rank)
        self._meter.add(loss, samples=samples)

    def _end_epoch(self, epoch: int) -> None:
        found: dict[str, float] = {}
        validation = self._config.validation
        is_due = validation is not None and (epoch % validation.every_epochs == 0 or epoch == self._config.epochs)
        if is_due and self.validator is not None and self.encoder is not None:
            found = self.validator.measure(self.encoder)
            name = self.validator.name
            if self._best is None or found[name] > self._best.metrics[name]:
                self._best = Best(step=self._done, metrics=found)
        self._log(epoch, validation=found)
        is_best = self._best is not None and self._best.step == self._done
        if is_best or self._done % self._config.checkpoint_every_steps == 0 or self._done == self._total_steps:
            self._save()

    def _has_stalled(self) -> bool:
        """Whether the last `patience` measurements brought nothing better."""
        validation = self._config.validation
        if self._best is None or validation is None or validation.patience is None or self._done % len(self._loader):
            return False
        epochs_since = (self._done - self._best.step) // len(self._loader)
        return epochs_since >= validation.patience * validation.every_epochs

    def _log(self, epoch: int, *, validation: dict[str, float] | None = None) -> None:
        schedule = self._config.table_optimizer
        rate = schedule.learning_rate * schedule.scale(self._done - 1, total_steps=self._total_steps)
        self._meter.log(
            self._done,
            epoch=epoch,
            learning_rate=rate,
            times=self._clock.take(),
            unfrozen=self._unfrozen,
            validation=validation,
        )

    def _save(self) -> None:
        self._checkpointer.save(self._model, self._optimizer, step=self._done, best=self._best)
        self._saved = self._done

    def _write_result(self) -> None:
        kept = self._done if self._best is None else self._best.step
        epochs = self._done // len(self._loader)
        result = TrainResult(
            steps=self._done,
            epochs=epochs,
            examples=epochs * self._loader.epoch_samples * self._process.world_size,
            final_loss=self._meter.last_loss,
            samples_per_s=self._meter.samples_per_s,
            world_size=self._process.world_size,
            checkpoint=checkpoint_name(kept),
            best_epoch=None if self._best is None else self._best.step // len(self._loader),
            validation={} if self._best is None else self._best.metrics,
        )
        (self._job.work / RESULT_NAME).write_text(result.model_dump_json())
