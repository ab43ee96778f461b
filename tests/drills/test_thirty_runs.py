"""In thirty runs in a row, the run folders, the memory and the shared memory do not grow, and no process is left.

Each run reads one new file of the log, and the oldest file is removed.

`make drills` prints one row per run. NIGHTJAR_DRILL_RUNS sets another number of runs.
"""

import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import psutil
import pytest

from recsys_core.disk import used_bytes
from recsys_core.ingest.synthetic import generate
from recsys_core.units import MIB
from tasks.registry.mlflow_client import connect
from tests.flows.test_nightly import ROOT
from tests.tasks.retention.run_folders_by_hand import run_ids

pytestmark = pytest.mark.drill
NUM_RUNS = int(os.environ.get("NIGHTJAR_DRILL_RUNS", "30"))
WINDOW_DAYS = 6
NUM_FULL_RUNS, NUM_REPORT_RUNS, NUM_VERSIONS = 2, 3, 1
MARGIN_SHARE = 0.1
MARGIN_BYTES = 4 * MIB
MAX_GROWTH_BYTES_PER_RUN = 2 * MIB
"""The databases grow during the drill, because Prefect deletes events and flow runs only after days."""
RUN_TIMEOUT_S = 600
CONFIG = f"""
name: drill
workspace: .
interactions: {{paths: log/*.parquet, timestamp_column: timestamp, split: {{kind: time, test_days: 1}}}}
embeddings: {{paths: data/item_embeddings.parquet, vector_column: embedding}}
model: {{embedding_dim: 8}}
training: {{epochs: 1, batch_size: 64, log_every_steps: 5}}
sharding: {{cluster: {{device: cpu, processes_per_node: 1}}}}
index: {{nlist: 4, pq_m: 4}}
data_report: {{max_event_drop_share: null, max_leaked_event_share: null}}
registry: {{model_name: drill, smoke_test_users: 100, gate: {{kind: margin, max_relative_drop: 0.5}}, baselines: []}}
retention: {{keep_full_runs: {NUM_FULL_RUNS}, keep_report_runs: {NUM_REPORT_RUNS}, keep_versions: {NUM_VERSIONS}}}
"""


@dataclass(frozen=True)
class Usage:
    """Resources during and after one run. Sizes are in MiB."""

    seconds: float
    runs_mib: float
    models_mib: float
    databases_mib: float
    other_mib: float
    num_versions: int
    num_shared_files: int
    num_temporary_files: int
    peak_rss_mib: float
    max_file_descriptors: int
    num_orphans: int

    @property
    def bounded_mib(self) -> float:
        """Disk space of runs and model versions. Retention limits this space."""
        return self.runs_mib + self.models_mib

    @property
    def growing_mib(self) -> float:
        """Disk space of the databases, and of the reports and plots of MLflow runs, which are never deleted."""
        return self.databases_mib + self.other_mib


def test_thirty_runs_leave_no_process_and_do_not_need_more_and_more_disk_space_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(CONFIG)
    num_days = NUM_RUNS + WINDOW_DAYS - 1
    generate(
        tmp_path / "data", num_users=100, num_items=120, num_events=500 * num_days, num_days=num_days, dim=8, num_cold_items=5
    )
    day_paths = sorted((tmp_path / "data" / "interactions").glob("*.parquet"))
    (tmp_path / "log").mkdir()
    files_before_runs = _leaked_shared_files()
    usages = []
    for index in range(NUM_RUNS):
        for day_path in day_paths[index : index + WINDOW_DAYS]:
            (tmp_path / "log" / day_path.name).unlink(missing_ok=True)
            (tmp_path / "log" / day_path.name).hardlink_to(day_path)
        if index:
            (tmp_path / "log" / day_paths[index - 1].name).unlink()
        usages.append(_run(config_path, files_before_runs=files_before_runs))
        with capsys.disabled():
            _print_row(index, usages[-1])
    first_half, second_half = usages[: NUM_RUNS // 2], usages[NUM_RUNS // 2 :]
    for name in ("bounded_mib", "peak_rss_mib"):
        first_max, second_max = (max(getattr(usage, name) for usage in half) for half in (first_half, second_half))
        assert second_max <= first_max * (1 + MARGIN_SHARE) + MARGIN_BYTES / MIB, name
    assert (
        max(usage.max_file_descriptors for usage in second_half) <= max(usage.max_file_descriptors for usage in first_half) + 10
    )
    assert max(usage.num_versions for usage in usages) <= NUM_VERSIONS + 4  # the champion and three former champions
    assert {(usage.num_shared_files, usage.num_orphans) for usage in usages} == {(0, 0)}
    assert usages[-1].num_temporary_files == usages[0].num_temporary_files
    growth_mib_per_run = (usages[-1].growing_mib - first_half[-1].growing_mib) / len(second_half)
    assert growth_mib_per_run < MAX_GROWTH_BYTES_PER_RUN / MIB
    assert len(run_ids(tmp_path)) <= NUM_REPORT_RUNS + 2
    record_property("figures", _summary(first_half, second_half, growth_mib=growth_mib_per_run))


def _summary(first_half: list[Usage], second_half: list[Usage], *, growth_mib: float) -> str:
    """Return the figures of both halves in one line."""

    def halves(name: str, statistic: Callable[[list[float]], float] = max, *, digits: int = 1) -> str:
        first, second = ([float(getattr(usage, name)) for usage in half] for half in (first_half, second_half))
        return f"{statistic(first):,.{digits}f} / {statistic(second):,.{digits}f}"

    return (
        f"{len(first_half) + len(second_half)} runs in a row were measured. Of two numbers such as 1 / 2, the first "
        f"is for the first {len(first_half)} runs and the second is for the last {len(second_half)} runs. "
        f"The median duration of a run was {halves('seconds', statistics.median)} s. The largest size of the run folders and "
        f"model versions was {halves('bounded_mib')} MiB. A run used at most {halves('peak_rss_mib')} MiB of memory and "
        f"{halves('max_file_descriptors', digits=0)} file descriptors. It left at most "
        f"{halves('num_shared_files', digits=0)} files in shared memory. The databases and reports grew by "
        f"{growth_mib:.2f} MiB per run"
    )


def _run(config_path: Path, *, files_before_runs: set[str]) -> Usage:
    """Execute `nightjar run` to its end; return its usage.

    files_before_runs: names of the files that were leaked into shared memory before the first run.
    """
    mark = uuid.uuid4().hex
    temporary_folder = config_path.parent / "tmp"
    temporary_folder.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    start_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run", str(config_path)],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary_folder), "NIGHTJAR_DRILL_MARK": mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    peak_rss_bytes = max_file_descriptors = 0
    while process.poll() is None and time.monotonic() - start_s < RUN_TIMEOUT_S:
        try:
            run_process = psutil.Process(process.pid)
            peak_rss_bytes = max(peak_rss_bytes, run_process.memory_info().rss)
            max_file_descriptors = max(max_file_descriptors, run_process.num_fds())
        except psutil.Error:  # the process has just ended
            pass
        time.sleep(0.5)
    seconds = time.monotonic() - start_s
    stderr = process.communicate(timeout=10)[1]
    assert process.returncode == 0, stderr
    workspace = config_path.parent
    database_files = workspace.glob("mlflow.db*")
    database_bytes = used_bytes(workspace / "prefect") + sum(path.stat().st_size for path in database_files)
    runs_bytes, models_bytes = used_bytes(workspace / "runs"), used_bytes(workspace / "mlartifacts" / "models")
    inputs_bytes = used_bytes(workspace / "data")
    client = connect(workspace)
    return Usage(
        seconds=seconds,
        runs_mib=runs_bytes / MIB,
        models_mib=models_bytes / MIB,
        databases_mib=database_bytes / MIB,
        other_mib=(used_bytes(workspace) - database_bytes - runs_bytes - models_bytes - inputs_bytes) / MIB,
        num_versions=len(client.search_model_versions("name = 'drill'")),
        num_shared_files=len(_leaked_shared_files() - files_before_runs),
        num_temporary_files=len(list(temporary_folder.iterdir())),
        peak_rss_mib=peak_rss_bytes / MIB,
        max_file_descriptors=max_file_descriptors,
        num_orphans=sum(_has_mark(candidate, mark) for candidate in psutil.process_iter()),
    )


def _leaked_shared_files() -> set[str]:
    """Return the names of the files in shared memory that no process has mapped."""
    folder = Path("/dev/shm")  # noqa: S108 the mount point is a convention of Linux
    mapped_names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # a process of another user, or one that has just ended
            mapped_names |= {line.rpartition("/")[2] for line in maps.read_text().splitlines() if str(folder) in line}
    return {path.name for path in folder.iterdir() if path.is_file()} - mapped_names


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("NIGHTJAR_DRILL_MARK") == mark
    except psutil.Error:  # a process of another user, or one that has just ended
        return False


def _print_row(index: int, usage: Usage) -> None:
    """Print a row of the table, and its header above the first row."""
    if index == 0:
        sys.stdout.write("\t".join(["\nrun", *(field.name for field in fields(usage))]) + "\n")
    values = (f"{value:.1f}" if isinstance(value, float) else str(value) for value in astuple(usage))
    sys.stdout.write("\t".join([str(index + 1), *values]) + "\n")
    sys.stdout.flush()
