"""The training step beside TorchRec's retrieval example, and by sharding type; writes benchmarks/train.json and train.md.

    make bench-train                      # everything, about 15 minutes
    python -m benchmarks.train --rounds 3 --parts compared

Two tables of 1,048,576 x 64, an MLP [128, 64] on each side, binary cross-entropy, two gloo ranks. Our trainer reads what the
ingest made of a parquet log; in `made beforehand` its very batches lie ready. The contestants take turns (benchmarks/turns.py).
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from itertools import chain, count, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import distributed as dist

from benchmarks import torchrec_loop
from benchmarks.turns import Turns, run_window, take_turns
from recsys_core.data.assembly import Assembler
from recsys_core.data.batch import Batch
from recsys_core.data.events import EventStore
from recsys_core.data.loader import TrainLoader
from recsys_core.data.log.config import GivenSplit, InteractionsConfig
from recsys_core.data.log.ingest import ingest_interactions
from recsys_core.manifests import InteractionsManifest, require_manifest
from recsys_core.models.config import HistoryConfig, TowerConfig, TwoTowerConfig
from recsys_core.models.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables import TableConfig
from recsys_core.preflight import installed_versions
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, ShardingKind, TableConstraint
from recsys_core.sharding.planner import plan_sharding
from recsys_core.sharding.sharders import ROW_LOOKUP_KINDS
from recsys_core.training.allocator import keep_freed_memory
from recsys_core.training.config import TrainingConfig
from recsys_core.training.job import Progress, TrainJob
from recsys_core.training.loop import METRICS_NAME, Training, make_loader
from recsys_core.training.process import Process
from recsys_core.training.scheduling import keep_to_own_cores, let_running_threads_go_on
from recsys_core.training.start import first_model

ROWS, DIM, LAYERS = 1 << 20, 64, (128, 64)
EVENTS = 3 << 20
TURN = {1024: 200, 8192: 50}
"""Batch sizes of the comparison, and steps of a turn: two seconds or so, so that what lay ready before it counts little."""
WARM_UP, WINDOW, WINDOWS = 20, 20, 3
"""Steps that are not counted, steps that are timed together, and how often, where sharding types are measured."""
BEST_KIND: ShardingKind = "table_wise"
"""Of both tables in the comparison: what the example's planner chooses too."""
KINDS: tuple[ShardingKind, ...] = (
    "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel",
)  # fmt: skip
HERE = Path(__file__).parent
PARTS = ("compared", "by_kind")
EXAMPLE, SCHEDULED, MADE = "example", "example, scheduled as ours", "ours, made beforehand"
CONTESTANTS = (EXAMPLE, SCHEDULED, "ours, fp32", MADE, "ours, bf16")
LARGEST = max(TURN)
Paced = Callable[[Iterable[Any]], Iterator[Any]]
_CONTEXT = multiprocessing.get_context("spawn")


class Run(NamedTuple):
    """One contestant. kind: of the user table (a bag of one where it has to be), and of the item table where it can have it."""

    name: str
    batch_size: int
    ranks: int = 2
    kind: ShardingKind = BEST_KIND
    warm_up: int = WARM_UP
    window: int = WINDOW
    windows: int = WINDOWS

    @property
    def steps(self) -> int:
        """All."""
        return self.warm_up + self.windows * self.window


def write_log(folder: Path) -> InteractionsManifest:
    """Pairs drawn alike from all users and items, each of which occurs, as parquet; and what the ingest makes of them."""
    rng = np.random.default_rng(0)
    more = EVENTS - ROWS
    user = np.concatenate([rng.permutation(ROWS), rng.integers(0, ROWS, more)])
    item = np.concatenate([rng.permutation(ROWS), rng.integers(0, ROWS, more)])
    table = pa.table({"user_id": user, "item_id": item})
    pq.write_table(table, folder / "log.parquet")
    pq.write_table(table.slice(0, 1_000), folder / "test.parquet")  # asked for by the split, never looked at
    split = GivenSplit(test=(str(folder / "test.parquet"),), validation_share=0.0)
    config = InteractionsConfig(paths=(str(folder / "log.parquet"),), split=split)
    return ingest_interactions(config, embeddings=None, folder=folder / "interactions")


class Steps:
    """An epoch of as many batches as are wanted: from the loader, or made beforehand."""

    def __init__(self, loader: TrainLoader, *, steps: int, made: bool, paced: Paced | None) -> None:
        self._loader, self._steps, self._paced = loader, steps, paced
        self.epoch_samples = steps * loader.batch_samples(0)
        self._made = [loader.make(0, step) for step in range(min(steps, len(loader)))] if made else None

    def __len__(self) -> int:
        return self._steps

    def batch_samples(self, batch: int) -> int:
        """Queries of each batch: every epoch's last one is whole too."""
        return self._loader.batch_samples(0)

    def epoch(self, epoch: int, *, start_batch: int) -> Iterator[Batch]:
        """The batches."""
        batches = chain.from_iterable(self._epochs())
        yield from islice(batches, self._steps) if self._paced is None else self._paced(batches)

    def _epochs(self) -> Iterator[Iterable[Batch]]:
        for epoch in count():
            yield self._loader.epoch(epoch) if self._made is None else self._made


def ours(run: Run, *, folder: Path, process: Process, paced: Paced | None) -> dict[str, Any]:
    """Samples per second over the counted windows, and the mean of their times."""
    keep_freed_memory()  # so does every rank too
    interactions = require_manifest(folder / "interactions", InteractionsManifest, verify=False)
    model = TwoTowerConfig(
        embedding_dim=DIM,
        similarity="dot",
        temperature=1.0,
        user_id=True,
        history=HistoryConfig(length=0, last_item=False),
        query=TowerConfig(layers=LAYERS, residual=False, dropout=0.0),
        candidate=TowerConfig(layers=LAYERS, residual=False, dropout=0.0),
    )
    loss = LossConfig(kind="bce", negatives=1)
    pools = run.kind not in ROW_LOOKUP_KINDS
    spec = ModelSpec.of(
        model, interactions=interactions, loss=loss, tables={"user": TableConfig(lookup="bag" if pools else "row")}
    )
    training = TrainingConfig(
        epochs=1, batch_size=run.batch_size, validation=None, log_every_steps=run.window, checkpoint_every_steps=10**9,
        precision="bf16" if "bf16" in run.name else "fp32",
    )  # fmt: skip
    cluster = ClusterConfig(device="cpu", processes_per_node=run.ranks)
    item = "row_wise" if pools else run.kind
    tables = {"user": TableConstraint(sharding_types=(run.kind,)), "item": TableConstraint(sharding_types=(item,))}
    work = folder / run.name
    if process.leads:
        plan_sharding(
            ShardingConfig(cluster=cluster, tables=tables), model=spec, batch_size=run.batch_size, folder=work / "plan"
        )
    dist.barrier()
    job = TrainJob(
        work=work, fingerprint="bench", spec=spec, loss=loss, training=training, interactions=interactions.folder,
        embeddings=None, features=None, plan=work / "plan" / "plan.json",
    )  # fmt: skip
    store = EventStore.open(interactions)
    loader = make_loader(job, store=store, assembler=Assembler(user=job.spec.user_in, features=None), process=process)
    short: Any = Steps(loader, steps=run.steps, made="made" in run.name, paced=paced)
    sharded = first_model(job, store=store, interactions=interactions, features=None, process=process)
    trainer = Training(job, model=sharded, loader=short, process=process)
    trainer._save = lambda: None  # type: ignore[method-assign]  # a checkpoint of random rows is of no interest here
    trainer.run()
    if not process.leads:
        return {}
    lines = [Progress.model_validate_json(line) for line in (work / METRICS_NAME).read_text().splitlines()]
    counted = [line for line in lines if line.step > run.warm_up]
    times = {name: statistics.fmean(line.ms_per_step[name] for line in counted) for name in counted[0].ms_per_step}
    return {"samples_per_s": statistics.harmonic_mean([line.samples_per_s for line in counted]), "ms_per_step": times}


def _rank(run: Run, rank: int, folder: Path, pipe: Connection, is_paced: bool) -> None:
    torch.set_num_threads(1)  # torchrun's own default too
    if run.name != EXAMPLE:
        # As every rank does that nightjar starts on a CPU.
        keep_to_own_cores(rank=rank, ranks=run.ranks)
        let_running_threads_go_on()
    store = f"file://{folder / run.name}.group"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=run.ranks, timeout=timedelta(minutes=10))
    paced = Turns(pipe, window=run.window, windows=run.windows).paced if is_paced else None
    if run.name.startswith(EXAMPLE):
        assert paced is not None
        os.environ |= {"LOCAL_WORLD_SIZE": str(run.ranks), "LOCAL_RANK": str(rank)}
        torchrec_loop.train(rows=ROWS, dim=DIM, layers=list(LAYERS), batch_size=run.batch_size, paced=paced)
    else:
        process = Process(rank=rank, world_size=run.ranks, device=torch.device("cpu"))
        answer = ours(run, folder=folder, process=process, paced=paced)
        if rank == 0 and not is_paced:
            pipe.send(answer)
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def started(run: Run, *, folder: Path, is_paced: bool) -> Iterator[list[Connection]]:
    """The ranks of one contestant, by a pipe to each; they are done when it is left."""
    pipes, ranks = [], []
    for rank in range(run.ranks):
        here, there = _CONTEXT.Pipe()
        ranks.append(_CONTEXT.Process(target=_rank, args=(run, rank, folder, there, is_paced)))
        ranks[-1].start()
        there.close()  # so that a rank's end is seen
        pipes.append(here)
    try:
        yield pipes
    finally:
        for process in ranks:
            process.join()
    shutil.rmtree(folder / run.name, ignore_errors=True)
    (folder / f"{run.name}.group").unlink(missing_ok=True)


def measure(run: Run, *, folder: Path) -> dict[str, Any]:
    """Rank 0's answer."""
    with started(run, folder=folder, is_paced=False) as pipes:
        found: dict[str, Any] = pipes[0].recv()
    say(f"{run.name}, batch {run.batch_size}, {run.ranks} ranks, {run.kind}: {found['samples_per_s']:,.0f}/s")
    return found


def say(line: str) -> None:
    """At once, also into a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def compare(folder: Path, *, rounds: int) -> list[dict[str, Any]]:
    """Samples per second of each contestant in each round, after a first one that does not count."""
    found = []
    for batch_size, steps in TURN.items():
        with ExitStack() as stack:
            pipes = {}
            for name in CONTESTANTS:
                run = Run(name, batch_size, warm_up=0, window=steps, windows=1 + rounds)
                pipes[name] = stack.enter_context(started(run, folder=folder, is_paced=True))
                run_window(pipes[name])  # before the next one starts, so that none runs beside another
            seconds = take_turns(pipes, rounds=rounds)
        for name, of_one in seconds.items():
            speeds = [run.ranks * batch_size * steps / one for one in of_one]
            say(f"{name}, batch {batch_size}: {statistics.median(speeds):,.0f}/s")
            found.append({"name": name, "batch_size": batch_size, "samples_per_s": speeds})
    return found


def by_kind(folder: Path) -> list[dict[str, Any]]:
    """Every sharding type at 1, 2 and 4 ranks; four share two cores on a machine that has no more."""
    found = []
    for ranks in (1, 2, 4):
        for kind in KINDS:
            # Replicas send all of a table's gradient in every step, which takes seconds.
            few = {"warm_up": 2, "window": 2, "windows": 1} if kind == "data_parallel" else {}
            run = Run("ours, fp32", LARGEST, ranks=ranks, kind=kind, **few)
            found.append({"kind": kind, "ranks": ranks} | measure(run, folder=folder))
    return found


def to_markdown(results: dict[str, Any]) -> str:
    """Both tables."""
    lines = [
        "# The training step",
        "",
        f"Made on {results['date']} on {results['cores']} cores by `make bench-train`: torch {results['versions']['torch']}, "
        f"torchrec {results['versions']['torchrec']}. Two tables of {ROWS:,} x {DIM}, MLP {list(LAYERS)}, BCE, "
        f"2 gloo ranks. Samples/s over both ranks. All contestants were up and ran one at a time, about two seconds in each of "
        f"{len(results['compared'][0]['samples_per_s'])} rounds: medians, and between which values half of the rounds lie.",
        "",
        "| batch per rank | | samples/s | to the example | to it scheduled as ours | to made beforehand |",
        "|---:|:---|---:|---:|---:|---:|",
    ]
    speeds = {(one["batch_size"], one["name"]): np.array(one["samples_per_s"]) for one in results["compared"]}
    for (batch_size, name), of_one in speeds.items():
        ratios = [_middle(of_one / speeds[batch_size, peer], ".2f") for peer in (EXAMPLE, SCHEDULED, MADE)]
        lines.append(f"| {batch_size:,} | {name} | {_middle(of_one, ',.0f')} | {' | '.join(ratios)} |")
    lines += [
        "",
        "`example`: the loop of TorchRec's retrieval example on RandomRecDataset (benchmarks/torchrec_loop.py), as torchrun",
        "starts it; then with what nightjar's launcher gives a rank, cores of its own and the kernel's policy for batch work.",
        "`ours`: this project's trainer, from parquet, one drawn negative beside the positives. Ratios are of each round.",
    ]
    if "by_kind" not in results:
        return "\n".join(lines) + "\n"
    lines += [
        "",
        f"By sharding type of the users' table (in a bag where the type pools), batch {LARGEST:,} per rank; the item",
        "table has the same type where rows looked up one by one can, else row_wise. Columns are cut from a width of 128 on:",
        "here the column-wise types leave the tables whole. Four ranks share the cores where there are only two. Milliseconds",
        "of a step, mean over the ranks",
        "(recsys_core/training/clock.py):",
        "",
        "| ranks | sharding type | samples/s | data | comms | compute | optimizer |",
        "|---:|:---|---:|---:|---:|---:|---:|",
    ]
    for row in results["by_kind"]:
        times = " | ".join(f"{row['ms_per_step'][name]:.1f}" for name in ("data", "comms", "compute", "optimizer"))
        lines.append(f"| {row['ranks']} | {row['kind']} | {row['samples_per_s']:,.0f} | {times} |")
    return "\n".join(lines) + "\n"


def _middle(values: NDArray[np.float64], form: str) -> str:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{median:{form}} ({low:{form}} to {high:{form}})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    wanted = parser.parse_args(arguments)
    file = HERE / "train.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    versions = installed_versions()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_log(folder)
        for part in wanted.parts:
            results[part] = compare(folder, rounds=wanted.rounds) if part == "compared" else by_kind(folder)
            results |= {
                "date": f"{datetime.now(UTC):%Y-%m-%d}",
                "cores": len(os.sched_getaffinity(0)),
                "versions": {name: versions[name] for name in ("torch", "torchrec")},
            }
            file.write_text(json.dumps(results, indent=1) + "\n")
            (HERE / "train.md").write_text(to_markdown(results))


if __name__ == "__main__":
    main()
