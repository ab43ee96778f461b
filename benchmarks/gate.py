"""Benchmark of the champion gate: error rates over simulated runs, and the duration of the bootstrap.

    make bench-gate              # writes benchmarks/gate.json and gate.md

Each test user of a simulated run has a hit or no hit with the champion, and with the new version. The recall of the champion is
0.2. With an equally good version, 4.5 % of the users gain a hit and 4.5 % lose one, as with two trainings on the same data.
"""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys_core.comparison.bootstrap import resample_means
from recsys_core.comparison.rules import Outcome, PairedBootstrap

RECALL, FLIP_RATE = 0.2, 0.045
"""Recall of the champion, and share of the users who gain a hit with an equally good version. The same share loses a hit."""
NUM_RUNS, NUM_TIMED_USERS = 500, 100_000
RULE = PairedBootstrap(num_resamples=2_000)
DROPS, NUM_USERS = (0.0, 0.02, 0.05, 0.1), (1_000, 5_000, 20_000)
OUTCOMES: tuple[Outcome, ...] = ("accepted", "rejected", "not_enough_data")
FOLDER = Path(__file__).parent


def simulated_run(
    generator: np.random.Generator, *, relative_drop: float, num_users: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the hits of the users with the new version and with the champion, [U] each.

    Args:
        relative_drop: relative drop of the expected recall.
    """
    champion_U = generator.random(num_users) < RECALL
    loses_U = generator.random(num_users) < FLIP_RATE / RECALL + relative_drop
    gains_U = generator.random(num_users) < FLIP_RATE / (1 - RECALL)
    return np.where(champion_U, ~loses_U, gains_U).astype(np.float64), champion_U.astype(np.float64)


def outcome_rates(rule: PairedBootstrap, *, relative_drop: float, num_users: int, num_runs: int) -> dict[Outcome, float]:
    """Return the share of each outcome over simulated runs."""
    generator = np.random.default_rng(0)
    outcomes = [
        rule.compare(*simulated_run(generator, relative_drop=relative_drop, num_users=num_users), baseline="").outcome
        for _ in range(num_runs)
    ]
    return {outcome: outcomes.count(outcome) / num_runs for outcome in OUTCOMES}


def bootstrap_seconds(num_users: int, *, are_hits: bool) -> float:
    """Return the duration of 10,000 resamples of two metrics. are_hits: the values are 0 or 1; otherwise all differ."""
    value_UM = np.random.default_rng(0).random((num_users, 2))
    start_s = time.perf_counter()
    resample_means((value_UM < RECALL).astype(np.float64) if are_hits else value_UM, num_resamples=10_000)
    return time.perf_counter() - start_s


def measure() -> dict[str, Any]:
    """Return the rates of the outcomes, and the durations of the bootstrap."""
    rates = [
        {"relative_drop": drop, "num_users": num_users}
        | outcome_rates(RULE, relative_drop=drop, num_users=num_users, num_runs=NUM_RUNS)
        for drop in DROPS
        for num_users in NUM_USERS
    ]
    duration_s_by_kind = {
        kind: bootstrap_seconds(NUM_TIMED_USERS, are_hits=are_hits)
        for kind, are_hits in (("hits", True), ("distinct values", False))
    }
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}", "num_runs": NUM_RUNS, "rates": rates, "bootstrap_s": duration_s_by_kind}


def to_markdown(result: dict[str, Any]) -> str:
    """Return the report."""
    num_runs = result["num_runs"]
    rows = [
        f"| {100 * row['relative_drop']:g} % | {row['num_users']:,} | "
        + " | ".join(f"{100 * row[outcome]:.1f} %" for outcome in OUTCOMES)
        + " |"
        for row in result["rates"]
    ]
    lines = [
        "# Champion gate",
        "",
        f"Measured on {result['date']} by `make bench-gate`. The table has the share of each outcome of the rule",
        f"`paired_bootstrap` with its default settings over {num_runs} simulated runs. The champion has the recall {RECALL:g}.",
        f"With an equally good version, {100 * FLIP_RATE:g} % of the users gain a hit and {100 * FLIP_RATE:g} % lose one.",
        "",
        "| drop of the new version | test users | promoted | not promoted | not enough data |",
        "|---:|---:|---:|---:|---:|",
        *rows,
        "",
        f"A version that is worse by the margin, {100 * RULE.max_relative_drop:g} %, is promoted in about 5 % of the runs with",
        "any number of users.",
        "",
        f"| values of {NUM_TIMED_USERS:,} users | 10,000 resamples, s |",
        "|---|---:|",
        *(f"| {kind} | {duration_s:.2f} |" for kind, duration_s in result["bootstrap_s"].items()),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, and write gate.json and gate.md."""
    result = measure()
    (FOLDER / "gate.json").write_text(json.dumps(result, indent=2) + "\n")
    (FOLDER / "gate.md").write_text(to_markdown(result))


if __name__ == "__main__":
    main()
