"""Seconds and anonymous memory of one piece of work in a process of its own."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_S = 0.005


def in_fresh_process(module: str, *arguments: str) -> dict[str, Any]:
    """The answer of `python -m module arguments`, which ends in one line of JSON."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measured(work: Callable[[], object]) -> dict[str, Any]:
    """Seconds, and RssAnon of /proc/self/status before the start and at its highest; pages of mapped files are not in it."""
    start_bytes = _anon_bytes()
    peak, over = [start_bytes], threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            peak.append(_anon_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    started = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - started
    over.set()
    sampler.join()
    del kept
    return {"seconds": seconds, "peak_anon_bytes": max(peak), "start_anon_bytes": start_bytes}


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of each run, the highest of the peaks."""
    return {
        "seconds": [round(run["seconds"], 2) for run in runs],
        "peak_anon_bytes": max(int(run["peak_anon_bytes"]) for run in runs),
        "start_anon_bytes": max(int(run["start_anon_bytes"]) for run in runs),
    }


def cells(made: dict[str, Any], *, against: Sequence[dict[str, Any]]) -> list[str]:
    """Median and all runs, how many times faster than each of `against`, peak memory in MB and as a share of each."""
    seconds = median(made["seconds"])
    runs = ", ".join(f"{value:.2f}" for value in sorted(made["seconds"]))
    faster = [f"{median(other['seconds']) / seconds:.1f}" for other in against]
    return [f"{seconds:.2f} ({runs})", *faster, f"{made['peak_anon_bytes'] / 1e6:,.0f}"]


def _anon_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024
