"""Measurement of seconds and anonymous memory in separate processes."""

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
SAMPLE_INTERVAL_S = 0.005


def run_in_new_process(module: str, *arguments: str) -> dict[str, Any]:
    """Run `python -m module arguments`, and return the JSON of its last output line."""
    process = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def measure_work(work: Callable[[], object]) -> dict[str, Any]:
    """Run `work`. Return its duration, and the anonymous memory of this process at the start and at the peak."""
    start_bytes = anonymous_bytes()
    anon_bytes, is_finished = [start_bytes], threading.Event()

    def sample() -> None:
        while not is_finished.wait(SAMPLE_INTERVAL_S):
            anon_bytes.append(anonymous_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    start_s = time.perf_counter()
    try:
        result = work()
        seconds = time.perf_counter() - start_s
    finally:
        is_finished.set()
        sampler.join()
    del result  # kept until now, so that the last sample includes its memory
    return {"seconds": seconds, "peak_anon_bytes": max(anon_bytes), "start_anon_bytes": start_bytes}


def summarise_runs(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the durations of all runs, and the largest anonymous memory at the start and at the peak of a run."""
    return {
        "seconds": [round(run["seconds"], 2) for run in runs],
        "peak_anon_bytes": max(int(run["peak_anon_bytes"]) for run in runs),
        "start_anon_bytes": max(int(run["start_anon_bytes"]) for run in runs),
    }


def table_cells(measurement: dict[str, Any], *, references: Sequence[dict[str, Any]]) -> list[str]:
    """Return table cells: the median duration with all durations, the speed-up over each reference, and the peak memory."""
    median_s = median(measurement["seconds"])
    run_seconds_text = ", ".join(f"{run_s:.2f}" for run_s in sorted(measurement["seconds"]))
    speed_ups = [f"{median(reference['seconds']) / median_s:.1f}" for reference in references]
    return [f"{median_s:.2f} ({run_seconds_text})", *speed_ups, f"{measurement['peak_anon_bytes'] / 1e6:,.0f}"]


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process, RssAnon of /proc/self/status."""
    process_status = Path("/proc/self/status").read_text()
    return int(process_status.partition("RssAnon:")[2].split()[0]) * 1024
