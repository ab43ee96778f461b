"""Benchmark of the training step: compared with TorchRec's retrieval example, without each patch, and by sharding type.

    make bench-train                      # everything, about 25 minutes; writes train.json and train.md
    python -m benchmarks.train --rounds 3 --parts compared
    python -m benchmarks.train --parts patches      # the effect of each patch of recsys_core/patches

The model has two tables of 1,048,576 x 64, an MLP [128, 64] per tower, and binary cross-entropy as its loss. Two gloo ranks
train the model. nightjar's trainer reads an ingested parquet log. The contestant `ours, prepared batches` trains on batches
that were loaded in advance. The contestants take turns (benchmarks/turns.py).
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
    NUM_ROWS,
    OURS,
    OURS_PREPARED,
    PATCH_NAMES,
    PREPARED_EXAMPLE,
    Contestant,
    name_without,
    running_ranks,
    write_log,
)
from benchmarks.turns import run_window, take_turns
from recsys_core.preflight import installed_versions
from recsys_core.sharding.config import ShardingType

STEPS_BY_BATCH_SIZE = {1024: 200, 8192: 50}
"""Steps per turn by batch size. A turn takes about two seconds, so the batches that are loaded before it have little effect."""
LARGEST_BATCH_SIZE = max(STEPS_BY_BATCH_SIZE)
SHARDING_TYPES: tuple[ShardingType, ...] = (
    "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel",
)  # fmt: skip
FOLDER = Path(__file__).parent
PARTS = ("compared", "patches", "by_kind")


def measure(contestant: Contestant, *, folder: Path) -> dict[str, Any]:
    """Return the measurement of rank 0."""
    with running_ranks(contestant, folder=folder, takes_turns=False) as pipes:
        result: dict[str, Any] = pipes[0].recv()
    print_now(
        f"{contestant.name}, batch {contestant.batch_size}, {contestant.num_ranks} ranks, {contestant.sharding_type}: "
        f"{result['samples_per_s']:,.0f}/s"
    )
    return result


def print_now(line: str) -> None:
    """Print a line and flush stdout, because a pipe is buffered."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def compare(folder: Path, *, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Return the samples per second of each contestant in each round, after a warm-up round."""
    results = []
    for batch_size, steps_per_turn in STEPS_BY_BATCH_SIZE.items():
        with ExitStack() as stack:
            pipes_by_name = {}
            for name in names:
                contestant = Contestant(name, batch_size, warm_up_steps=0, window_steps=steps_per_turn, num_windows=1 + rounds)
                pipes_by_name[name] = stack.enter_context(running_ranks(contestant, folder=folder, takes_turns=True))
                run_window(pipes_by_name[name])  # before the next contestant starts, so that only one runs at a time
            turn_seconds_by_name = take_turns(pipes_by_name, rounds=rounds)
        for name, turn_seconds in turn_seconds_by_name.items():
            speeds = [contestant.num_ranks * batch_size * steps_per_turn / turn_s for turn_s in turn_seconds]
            print_now(f"{name}, batch {batch_size}: {statistics.median(speeds):,.0f}/s")
            results.append({"name": name, "batch_size": batch_size, "samples_per_s": speeds})
    return results


def measure_sharding_types(folder: Path) -> list[dict[str, Any]]:
    """Measure every sharding type with 1, 2 and 4 ranks."""
    results = []
    for num_ranks in (1, 2, 4):
        for sharding_type in SHARDING_TYPES:
            # Few steps, because replicas exchange the gradient of the whole table in every step, which takes seconds.
            step_counts = {"warm_up_steps": 2, "window_steps": 2, "num_windows": 1} if sharding_type == "data_parallel" else {}
            contestant = Contestant(OURS, LARGEST_BATCH_SIZE, num_ranks=num_ranks, sharding_type=sharding_type, **step_counts)
            results.append({"kind": sharding_type, "ranks": num_ranks} | measure(contestant, folder=folder))
    return results


def to_markdown(results: dict[str, Any]) -> str:
    """Return the report."""
    lines = [
        "# The training step",
        "",
        f"Measured on {results['date']} on {results['cores']} cores by `make bench-train` with torch "
        f"{results['versions']['torch']} and torchrec {results['versions']['torchrec']}.",
        f"The model has two tables of {NUM_ROWS:,} rows and {DIM} columns. Each tower has layers of the widths {list(LAYERS)}.",
        "The loss is binary cross-entropy. Two processes (ranks) train the model on CPUs. Each program trained for about two",
        f"seconds per round. There were {len(results['compared'][0]['samples_per_s'])} rounds. A cell has the median over the",
        "rounds, with the quartiles in brackets. The samples of both ranks are added up. Each of the last three columns",
        "divides the program's samples per second by those of the program in the column's title in the same round.",
        "",
        "| batch per rank | program | samples/s | divided by `example` | divided by `example, prepared ranks` "
        "| divided by `ours, prepared batches` |",
        "|---:|:---|---:|---:|---:|---:|",
    ]
    speed_by_program = {
        (result["batch_size"], result["name"]): np.array(result["samples_per_s"]) for result in results["compared"]
    }
    for (batch_size, name), samples_per_s in speed_by_program.items():
        ratios = [
            _quartiles(samples_per_s / speed_by_program[batch_size, reference], ".2f")
            for reference in (EXAMPLE, PREPARED_EXAMPLE, OURS_PREPARED)
        ]
        lines.append(f"| {batch_size:,} | {name} | {_quartiles(samples_per_s, ',.0f')} | {' | '.join(ratios)} |")
    lines += [
        "",
        "- `example` is the training loop of TorchRec's retrieval example on random data (benchmarks/torchrec_loop.py). Its",
        "  processes have the default settings of torchrun.",
        "- `example, prepared ranks` is the same loop in processes with the settings of nightjar's ranks",
        "  (recsys_core/patches). Each rank has fixed cores and the batch scheduling policy of Linux, and FBGEMM uses all CPU",
        "  features.",
        "- `ours` is nightjar's training loop on an ingested log, in fp32 or bf16. All queries of a step share one sampled",
        "  negative.",
        "- `ours, prepared batches` is nightjar's training loop on batches that were loaded in advance.",
    ]
    if "patches" in results:
        lines += patches_to_markdown(results["patches"])
    if "by_kind" not in results:
        return "\n".join(lines) + "\n"
    lines += [
        "",
        f"The next table compares sharding types of the user table, with batches of {LARGEST_BATCH_SIZE:,} per rank. "
        "The user table",
        "is pooled if the type requires it. The item table has the same type, or row_wise if unpooled tables do not support",
        "it. Tables with fewer than 128 columns are not split by columns, so the column-wise types leave the tables whole",
        "here. Four ranks share two cores. The last two columns have the duration of a step and the time in which a step waits",
        "for data, as means over the ranks:",
        "",
        "| ranks | sharding type | samples/s | step, ms | waiting for data, ms |",
        "|---:|:---|---:|---:|---:|",
    ]
    for result in results["by_kind"]:
        times = " | ".join(f"{result['ms_per_step'][name]:.1f}" for name in ("step", "data"))
        lines.append(f"| {result['ranks']} | {result['kind']} | {result['samples_per_s']:,.0f} | {times} |")
    return "\n".join(lines) + "\n"


def patches_to_markdown(comparisons: list[dict[str, Any]]) -> list[str]:
    """Return the table of the step time without each patch, relative to the step time with all patches."""
    speed_by_program = {(result["name"], result["batch_size"]): np.array(result["samples_per_s"]) for result in comparisons}
    lines = [
        "",
        "nightjar changes PyTorch, FBGEMM and the process with several patches (recsys_core/patches). The next table has the",
        "step time of `ours, fp32` without one of these patches, divided by the step time with all patches.",
        "",
        f"| omitted patch | {' | '.join(f'batch of {batch_size:,}' for batch_size in STEPS_BY_BATCH_SIZE)} |",
        f"|:---|{'---:|' * len(STEPS_BY_BATCH_SIZE)}",
    ]
    for patch in PATCH_NAMES:
        ratios = [
            _quartiles(speed_by_program[OURS, batch_size] / speed_by_program[name_without(patch), batch_size], ".2f")
            for batch_size in STEPS_BY_BATCH_SIZE
        ]
        lines.append(f"| {patch} | {' | '.join(ratios)} |")
    return lines


def _quartiles(values: NDArray[np.float64], number_format: str) -> str:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{median:{number_format}} ({low:{number_format}} to {high:{number_format}})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the selected parts, and write train.json and train.md after each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args(arguments)
    results_path = FOLDER / "train.json"
    results: dict[str, Any] = json.loads(results_path.read_text()) if results_path.is_file() else {}
    versions = installed_versions()
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_log(folder)
        for part in options.parts:
            if part == "by_kind":
                results[part] = measure_sharding_types(folder)
            else:
                names = CONTESTANTS if part == "compared" else (OURS, *map(name_without, PATCH_NAMES))
                results[part] = compare(folder, names=names, rounds=options.rounds)
            results |= {
                "date": f"{datetime.now(UTC):%Y-%m-%d}",
                "cores": len(os.sched_getaffinity(0)),
                "versions": {name: versions[name] for name in ("torch", "torchrec")},
            }
            results_path.write_text(json.dumps(results, indent=1) + "\n")
            (FOLDER / "train.md").write_text(to_markdown(results))


if __name__ == "__main__":
    main()
