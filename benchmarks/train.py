"""Benchmark of the training step: compared with TorchRec's retrieval example, without each patch, and by sharding type.

    make bench-train                      # everything, about 25 minutes; writes train.json and train.md
    python -m benchmarks.train --rounds 3 --parts compared
    python -m benchmarks.train --parts patches      # the effect of each patch of recsys_core/patches

Two tables of 1,048,576 x 64, an MLP [128, 64] per tower, binary cross-entropy, two gloo ranks. nightjar's trainer reads an
ingested parquet log. `ours, prepared batches` trains on the same batches, loaded in advance. The contestants take turns
(benchmarks/turns.py).
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
    OURS,
    PATCHES,
    PREPARED,
    PREPARED_BATCHES,
    ROWS,
    Run,
    started,
    without,
    write_log,
)
from benchmarks.turns import run_window, take_turns
from recsys_core.preflight import installed_versions
from recsys_core.sharding.config import ShardingType

TURN = {1024: 200, 8192: 50}
"""Batch size -> steps per turn. A turn takes about two seconds, so batches prefetched before it have little effect."""
LARGEST = max(TURN)
KINDS: tuple[ShardingType, ...] = (
    "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel",
)  # fmt: skip
HERE = Path(__file__).parent
PARTS = ("compared", "patches", "by_kind")


def measure(run: Run, *, folder: Path) -> dict[str, Any]:
    """Return the measurement of rank 0."""
    with started(run, folder=folder, is_paced=False) as pipes:
        result: dict[str, Any] = pipes[0].recv()
    say(f"{run.name}, batch {run.batch_size}, {run.ranks} ranks, {run.kind}: {result['samples_per_s']:,.0f}/s")
    return result


def say(line: str) -> None:
    """Print a line and flush, so that it also appears at once in a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def compare(folder: Path, *, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Return the samples per second of each contestant in each round, after a warm-up round."""
    results = []
    for batch_size, steps in TURN.items():
        with ExitStack() as stack:
            pipes = {}
            for name in names:
                run = Run(name, batch_size, warm_up=0, window=steps, windows=1 + rounds)
                pipes[name] = stack.enter_context(started(run, folder=folder, is_paced=True))
                run_window(pipes[name])  # before the next contestant starts, so that only one runs at a time
            seconds = take_turns(pipes, rounds=rounds)
        for name, turn_seconds in seconds.items():
            speeds = [run.ranks * batch_size * steps / turn for turn in turn_seconds]
            say(f"{name}, batch {batch_size}: {statistics.median(speeds):,.0f}/s")
            results.append({"name": name, "batch_size": batch_size, "samples_per_s": speeds})
    return results


def by_kind(folder: Path) -> list[dict[str, Any]]:
    """Measure every sharding type with 1, 2 and 4 ranks."""
    results = []
    for ranks in (1, 2, 4):
        for kind in KINDS:
            # Replicas exchange the gradient of the whole table in every step, which takes seconds.
            steps = {"warm_up": 2, "window": 2, "windows": 1} if kind == "data_parallel" else {}
            run = Run("ours, fp32", LARGEST, ranks=ranks, kind=kind, **steps)
            results.append({"kind": kind, "ranks": ranks} | measure(run, folder=folder))
    return results


def to_markdown(results: dict[str, Any]) -> str:
    """Return the report."""
    lines = [
        "# The training step",
        "",
        f"Measured on {results['date']} on {results['cores']} cores by `make bench-train`: "
        f"torch {results['versions']['torch']}, torchrec {results['versions']['torchrec']}. "
        f"Two tables of {ROWS:,} x {DIM}, MLP {list(LAYERS)}, BCE, "
        f"2 gloo ranks. Samples/s over both ranks. All contestants were started and ran in turns of about two seconds, in "
        f"{len(results['compared'][0]['samples_per_s'])} rounds: medians, and in brackets the quartiles.",
        "",
        "| batch per rank | | samples/s | to the example | to the prepared example | to prepared batches |",
        "|---:|:---|---:|---:|---:|---:|",
    ]
    speeds = {(row["batch_size"], row["name"]): np.array(row["samples_per_s"]) for row in results["compared"]}
    for (batch_size, name), samples_per_s in speeds.items():
        ratios = [_quartiles(samples_per_s / speeds[batch_size, peer], ".2f") for peer in (EXAMPLE, PREPARED, PREPARED_BATCHES)]
        lines.append(f"| {batch_size:,} | {name} | {_quartiles(samples_per_s, ',.0f')} | {' | '.join(ratios)} |")
    lines += [
        "",
        "`example` is the loop of TorchRec's retrieval example on RandomRecDataset (benchmarks/torchrec_loop.py), started as",
        "by torchrun. The prepared example also has the process settings of nightjar's ranks (recsys_core/patches): pinned",
        "cores, the batch scheduling policy, and the CPU features that FBGEMM does not detect by itself.",
        "`ours` is nightjar's trainer on an ingested parquet log, with one drawn negative in addition to the positives. Ratios",
        "are computed per round.",
    ]
    if "patches" in results:
        lines += patches_to_markdown(results["patches"])
    if "by_kind" not in results:
        return "\n".join(lines) + "\n"
    lines += [
        "",
        f"By sharding type of the user table, batch {LARGEST:,} per rank. The user table is pooled if the type requires it.",
        "The item table has the same type, or row_wise if unpooled tables do not support it. Tables narrower than 128 are not",
        "split by columns, so the column-wise types leave the tables whole here. Four ranks share two cores. Milliseconds of a",
        "step and of waiting for data, means over the ranks (recsys_core/training/step_timer.py):",
        "",
        "| ranks | sharding type | samples/s | step | data |",
        "|---:|:---|---:|---:|---:|",
    ]
    for row in results["by_kind"]:
        times = " | ".join(f"{row['ms_per_step'][name]:.1f}" for name in ("step", "data"))
        lines.append(f"| {row['ranks']} | {row['kind']} | {row['samples_per_s']:,.0f} | {times} |")
    return "\n".join(lines) + "\n"


def patches_to_markdown(compared: list[dict[str, Any]]) -> list[str]:
    """Return the table of the step time without each patch, relative to the step time with all patches."""
    speeds = {(row["name"], row["batch_size"]): np.array(row["samples_per_s"]) for row in compared}
    lines = [
        "",
        "Step time of `ours, fp32` without one patch of recsys_core/patches, relative to the step time with all patches:",
        "",
        f"| without | {' | '.join(f'batch {batch_size:,}' for batch_size in TURN)} |",
        f"|:---|{'---:|' * len(TURN)}",
    ]
    for patch in PATCHES:
        ratios = [_quartiles(speeds[OURS, batch_size] / speeds[without(patch), batch_size], ".2f") for batch_size in TURN]
        lines.append(f"| {patch} | {' | '.join(ratios)} |")
    return lines


def _quartiles(values: NDArray[np.float64], form: str) -> str:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{median:{form}} ({low:{form}} to {high:{form}})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the selected parts, and write train.json and train.md after each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args(arguments)
    file = HERE / "train.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    versions = installed_versions()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_log(folder)
        for part in options.parts:
            if part == "by_kind":
                results[part] = by_kind(folder)
            else:
                names = CONTESTANTS if part == "compared" else (OURS, *map(without, PATCHES))
                results[part] = compare(folder, names=names, rounds=options.rounds)
            results |= {
                "date": f"{datetime.now(UTC):%Y-%m-%d}",
                "cores": len(os.sched_getaffinity(0)),
                "versions": {name: versions[name] for name in ("torch", "torchrec")},
            }
            file.write_text(json.dumps(results, indent=1) + "\n")
            (HERE / "train.md").write_text(to_markdown(results))


if __name__ == "__main__":
    main()
