"""The training step beside TorchRec's retrieval example, without each patch, by sharding type; writes train.json and train.md.

    make bench-train                      # everything, about 25 minutes
    python -m benchmarks.train --rounds 3 --parts compared
    python -m benchmarks.train --parts patches      # what each of recsys_core/patches brings

Two tables of 1,048,576 x 64, an MLP [128, 64] on each side, binary cross-entropy, two gloo ranks. Our trainer reads what the
ingest made of a parquet log; in `made beforehand` its very batches lie ready. The contestants take turns (benchmarks/turns.py).
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.contestants import (
    CONTESTANTS,
    DIM,
    EXAMPLE,
    LAYERS,
    MADE,
    OURS,
    PATCHES,
    PREPARED,
    ROWS,
    Run,
    started,
    without,
    write_log,
)
from benchmarks.turns import run_window, take_turns
from recsys_core.preflight import installed_versions
from recsys_core.sharding.config import ShardingKind

TURN = {1024: 200, 8192: 50}
"""Batch sizes of the comparison, and steps of a turn: two seconds or so, so that what lay ready before it counts little."""
LARGEST = max(TURN)
KINDS: tuple[ShardingKind, ...] = (
    "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel",
)  # fmt: skip
HERE = Path(__file__).parent
PARTS = ("compared", "patches", "by_kind")


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


def compare(folder: Path, *, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Samples per second of each contestant in each round, after a first one that does not count."""
    found = []
    for batch_size, steps in TURN.items():
        with ExitStack() as stack:
            pipes = {}
            for name in names:
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
        "| batch per rank | | samples/s | to the example | to it prepared as ours | to made beforehand |",
        "|---:|:---|---:|---:|---:|---:|",
    ]
    speeds = {(one["batch_size"], one["name"]): np.array(one["samples_per_s"]) for one in results["compared"]}
    for (batch_size, name), of_one in speeds.items():
        ratios = [_middle(of_one / speeds[batch_size, peer], ".2f") for peer in (EXAMPLE, PREPARED, MADE)]
        lines.append(f"| {batch_size:,} | {name} | {_middle(of_one, ',.0f')} | {' | '.join(ratios)} |")
    lines += [
        "",
        "`example`: the loop of TorchRec's retrieval example on RandomRecDataset (benchmarks/torchrec_loop.py), as torchrun",
        "starts it; then with what nightjar gives the process of a rank (recsys_core/patches): cores of its own, the kernel's",
        "policy for batch work, freed memory kept, and the CPU's features, which FBGEMM otherwise does not see.",
        "`ours`: this project's trainer, from parquet, one drawn negative beside the positives. Ratios are of each round.",
    ]
    if "patches" in results:
        lines += patches_to_markdown(results["patches"])
    if "by_kind" not in results:
        return "\n".join(lines) + "\n"
    lines += [
        "",
        f"By sharding type of the users' table (in a bag where the type pools), batch {LARGEST:,} per rank; the item",
        "table has the same type where rows looked up one by one can, else row_wise. Columns are cut from a width of 128 on:",
        "here the column-wise types leave the tables whole. Four ranks share the cores where there are only two. Milliseconds",
        "of a step and of waiting for data, mean over the ranks (recsys_core/training/step_timer.py):",
        "",
        "| ranks | sharding type | samples/s | step | data |",
        "|---:|:---|---:|---:|---:|",
    ]
    for row in results["by_kind"]:
        times = " | ".join(f"{row['ms_per_step'][name]:.1f}" for name in ("step", "data"))
        lines.append(f"| {row['ranks']} | {row['kind']} | {row['samples_per_s']:,.0f} | {times} |")
    return "\n".join(lines) + "\n"


def patches_to_markdown(compared: list[dict[str, Any]]) -> list[str]:
    """How much longer a step takes without each patch."""
    speeds = {(one["name"], one["batch_size"]): np.array(one["samples_per_s"]) for one in compared}
    lines = [
        "",
        "`ours, fp32` without one patch at a time (recsys_core/patches), in turns as above: how much longer a step takes.",
        "",
        f"| without | {' | '.join(f'batch {batch_size:,}' for batch_size in TURN)} |",
        f"|:---|{'---:|' * len(TURN)}",
    ]
    for patch in PATCHES:
        ratios = [_middle(speeds[OURS, batch_size] / speeds[without(patch), batch_size], ".2f") for batch_size in TURN]
        lines.append(f"| {patch} | {' | '.join(ratios)} |")
    return lines


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
            if part == "by_kind":
                results[part] = by_kind(folder)
            else:
                names = CONTESTANTS if part == "compared" else (OURS, *map(without, PATCHES))
                results[part] = compare(folder, names=names, rounds=wanted.rounds)
            results |= {
                "date": f"{datetime.now(UTC):%Y-%m-%d}",
                "cores": len(os.sched_getaffinity(0)),
                "versions": {name: versions[name] for name in ("torch", "torchrec")},
            }
            file.write_text(json.dumps(results, indent=1) + "\n")
            (HERE / "train.md").write_text(to_markdown(results))


if __name__ == "__main__":
    main()
