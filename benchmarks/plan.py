"""Derivation of the constants of `nightjar plan` from benchmark results, and its estimates compared with measured runs.

    make bench-plan                            # writes plan.json, plan.md, the constants, and a table of docs/scale.md
    python -m benchmarks.plan --constants      # the same without new measurements, which take about ten minutes

Most constants come from other benchmarks. This benchmark measures two runs, which give file sizes and the time of the encoding.
It also measures the data report of a larger log, and two trainings on random pairs, which give the time of a training step.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.nightly import NIGHTJAR
from benchmarks.quality import speed
from benchmarks.quality.experiment import Settings, merge_settings
from flows.cli.commands.plan import ESTIMATE_FILE_NAME, ESTIMATE_TITLES, estimate_rows
from flows.settings.template import write_demo
from recsys_core.estimates.model_stages import FLOPS_PER_SCORE_VALUE
from recsys_core.estimates.run_estimate import RunEstimate, estimate_run
from recsys_core.estimates.stage_estimate import CONSTANTS_PATH, Constant, ConstantsFile, packaged_constants
from recsys_core.estimates.workload import Workload
from recsys_core.ingest.synthetic import generate

FOLDER = Path(__file__).resolve().parent
RESULT_PATH, PAGE_PATH = FOLDER / "plan.json", FOLDER / "plan.md"
SCALE_PAGE_PATH = FOLDER.parent / "docs" / "scale.md"
BEGIN_MARK, END_MARK = "<!-- begin: benchmarks/plan.py -->", "<!-- end: benchmarks/plan.py -->"
COMMAND = (
    "plan examples/ten_billion.yaml --users 1000000000 --items 100000000 --events 10000000000 "
    "--nodes 4 --gpus-per-node 8 --cores 64"
)
"""The command whose table is in docs/scale.md."""
LOG_SIZES = {"num_users": 50_000, "num_items": 30_000, "num_events": 2_000_000, "num_cold_items": 1_500}
LOG_SETTINGS = ("training.epochs=1", "training.batch_size=1024", "evaluation.baselines=[recent_popularity]")
LARGE_LOG_SIZES = {"num_users": 500_000, "num_items": 100_000, "num_events": 20_000_000, "num_cold_items": 5_000}
"""The log whose data report is measured. The start of the stage takes a small part of this time."""
LARGE_LOG, LOG, DEMO = "20 M events", "2 M events", "demo"
INDEX_KINDS = ("flat", "ivf_flat", "ivf_sq8", "ivf_pq", "opq_pq", "pq_fastscan", "hnsw")
TRAINING_BY_CASE: dict[str, Settings] = {
    "two_ids": {
        "model": {"history": {"length": 0}},
        "loss": {"kind": "bce", "in_batch_negatives": False, "num_negatives": 1},
        "training": {"batch_size": 8_192},
    },
    "history": {"loss": {"num_negatives": 512}, "training": {"batch_size": 1_024}},
}
"""Two trainings on the pairs of benchmarks/quality/speed.py. `history` has in-batch and sampled negatives."""
NUM_RANKS, NUM_EPOCHS, TRAINED_CANDIDATES, TRAINED_DIM = 2, 3, 1_024 + 512, 64
BEAUTY_USERS, BEAUTY_ITEMS = 22_363, 12_101
"""Test users and items of Amazon Beauty, which nightly.json has measured on an idle machine."""


def measure() -> dict[str, Any]:
    """Execute the runs, all with the config of the demo, and the two trainings.

    Return the stages, sizes and workloads of the runs, and the samples per second of the trainings.
    """
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder_name:
        log_folder, large_folder, demo_folder = (Path(folder_name) / name for name in ("log", "large", "demo"))
        generate(log_folder / "data", **LOG_SIZES)
        generate(large_folder / "data", **LARGE_LOG_SIZES)
        runs = {
            LOG: execute_run(log_folder, LOG_SETTINGS),
            DEMO: execute_run(demo_folder, ()),
            LARGE_LOG: execute_run(large_folder, (), last_stage="check_data"),
        }
        trainings = measure_trainings(Path(folder_name))
    machine = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "cores": os.cpu_count(), "load": load_average}
    return {**machine, "runs": runs, "trainings": trainings}


def measure_trainings(folder: Path) -> dict[str, Any]:
    """Return the samples per second of both ranks together, for each training and each epoch except the first."""
    pairs_path = speed.write_pairs(folder)
    rank_settings: Settings = {"sharding": {"cluster": {"device": "cpu", "processes_per_node": NUM_RANKS}}}
    samples_per_s = {}
    for case, case_settings in TRAINING_BY_CASE.items():
        settings = merge_settings(
            speed.settings(pairs_path), rank_settings, case_settings, {"training": {"epochs": NUM_EPOCHS}}
        )
        epoch_s = speed.epoch_seconds(settings, folder=folder / "training", num_epochs=NUM_EPOCHS)
        samples_per_s[case] = [round(speed.NUM_PAIRS / seconds) for seconds in epoch_s]
    return {"items": speed.NUM_ITEMS, "samples_per_s": samples_per_s}


def execute_run(folder: Path, settings: Sequence[str], *, last_stage: str = "build_index") -> dict[str, Any]:
    """Execute a run up to `last_stage`. Return the seconds and bytes of its stages, and its workload."""
    arguments = [str(write_demo(folder)), *(word for setting in settings for word in ("--set", setting))]
    output = run_nightjar("run", *arguments, "--until", last_stage, "--json")
    (run_folder,) = (path for path in (folder / "runs").iterdir() if path.is_dir())
    run_nightjar("plan", *arguments)
    estimate = RunEstimate.model_validate_json((folder / "plan" / ESTIMATE_FILE_NAME).read_bytes())
    return {
        "seconds": {stage: round(result["seconds"], 2) for stage, result in json.loads(output)["stages"].items()},
        "bytes": {path.name: folder_bytes(path) for path in sorted(run_folder.iterdir()) if path.is_dir()},
        "part_bytes": folder_bytes(run_folder / "ingest_interactions" / "parts"),
        "id_bytes": sum(path.stat().st_size for path in (run_folder / "ingest_interactions").glob("*.parquet")),
        "workload": estimate.workload.model_dump(mode="json"),
    }


def run_nightjar(*arguments: str) -> str:
    """Execute a nightjar command. Return the last line of its output."""
    process = subprocess.run([*NIGHTJAR, *arguments], cwd=FOLDER.parent, check=True, stdout=subprocess.PIPE, text=True)
    return process.stdout.splitlines()[-1]


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Result:
    """The committed result of a benchmark, whose numbers become constants."""

    def __init__(self, name: str) -> None:
        self.name, self.content = name, json.loads((FOLDER / f"{name}.json").read_bytes())

    def number(self, path: str) -> float:
        """Return the number at a path of keys and positions, or the median of the numbers there."""
        value = self.content
        for key in path.split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
        return float(median(value) if isinstance(value, list) else value)

    def constant(self, path: str, unit: str, *, size: float | None = None, value: float | None = None) -> Constant:
        """Return the number at a path divided by `size`, or `value` if the constant is computed from several numbers."""
        value = self.number(path) / (size or 1) if value is None else value
        date = self.content["date"] if "date" in self.content else self.content[path.partition(".")[0]]["date"]
        return Constant(value=value, unit=unit, source=f"{self.name}.json: {path}", date=date, measured_at=size)


def measured_constants() -> dict[str, Constant]:
    """Return the constants that come from the committed results, by name."""
    training_constants = _training_constants(Result("plan"), ingest=Result("ingest"))
    return _data_constants() | training_constants | _export_constants() | _index_constants()


def _data_constants() -> dict[str, Constant]:
    ingest, plan = Result("ingest"), Result("plan")
    num_values = ingest.content["vectors"]["rows"] * ingest.content["vectors"]["dim"]
    num_events = ingest.content["interactions"]["same_limit"]["large"]["events"]
    data, run = plan.content["runs"][LOG]["workload"]["data"], f"runs.{LOG}"
    start, report = (f"runs.{name}.seconds.check_data" for name in (DEMO, LARGE_LOG))
    num_report_events = LARGE_LOG_SIZES["num_events"]
    report_s = (plan.number(report) - plan.number(start)) / num_report_events
    vectors, log, num_ids = "vectors.list.nightjar", "interactions.same_limit.large", data["num_users"] + data["num_items"]
    return {
        "vector_value_s": ingest.constant(f"{vectors}.seconds", "s per value of a vector", size=num_values),
        "vector_memory_bytes": ingest.constant(f"{vectors}.peak_anon_bytes", "bytes"),
        "event_s": ingest.constant(f"{log}.seconds", "s per event, 2 cores", size=num_events),
        "event_memory_bytes": ingest.constant(f"{log}.peak_anon_bytes", "bytes per event, up to the limit", size=num_events),
        "part_bytes": plan.constant(f"{run}.part_bytes", "bytes per event", size=data["num_events"]),
        "id_bytes": plan.constant(f"{run}.id_bytes", "bytes per user or item", size=num_ids),
        "report_start_s": plan.constant(start, "s until the events are counted: most of this data report"),
        "report_event_s": plan.constant(report, "s per event, 2 cores", size=num_report_events, value=report_s),
    }


def _training_constants(plan: Result, *, ingest: Result) -> dict[str, Constant]:
    """Return a and f of the step time B a + 6 B C D f, for B examples, C candidates and vectors of D numbers.

    The training `two_ids` measures a, and `history` measures f.
    """
    two_ids, history = (f"trainings.samples_per_s.{case}" for case in TRAINING_BY_CASE)
    example_s, history_s = (NUM_RANKS / plan.number(path) for path in (two_ids, history))
    operation_s = (history_s - example_s) / (FLOPS_PER_SCORE_VALUE * TRAINED_CANDIDATES * TRAINED_DIM)
    speeds = [(row["case"], row["batch_size"], row["processes"]) for row in ingest.content["loader"]["speeds"]]
    loader = f"loader.speeds.{speeds.index(('history of 20', 8_192, 2))}.samples_per_s"
    loaded_s = 1 / ingest.number(loader)
    example_unit = "s per training example of a rank without its scores; measured at: items of the catalogue"
    num_items = plan.number("trainings.items")
    return {
        "trained_example_s": plan.constant(two_ids, example_unit, size=num_items, value=example_s),
        "cpu_operation_s": plan.constant(history, "s per floating-point operation of a rank", value=operation_s),
        "loaded_example_s": ingest.constant(loader, "s per training example of a rank, for the loader", value=loaded_s),
    }


def _export_constants() -> dict[str, Constant]:
    ranks, nightly, plan = Result("ranks"), Result("nightly"), Result("plan")
    num_users, num_pairs = ranks.content["queries"], ranks.content["queries"] * ranks.content["items"]
    top_lists, targets = "runs.Top lists.2", "runs.Top lists and positions of all targets.2"  # the third run has 2 ranks
    pair_unit = "s of CPU time per dimension of the score of a user-item pair"
    pair_s, target_pair_s = (ranks.number(f"{path}.cpu_s") / num_pairs / TRAINED_DIM for path in (top_lists, targets))
    vector_bytes = (num_users + ranks.content["items"]) * TRAINED_DIM * 4
    memory = f"{targets}.rank_bytes"
    list_bytes = (NUM_RANKS * ranks.number(memory) - vector_bytes) / num_users

    log, demo = (Workload.model_validate(plan.content["runs"][run]["workload"]) for run in (LOG, DEMO))
    seconds, num_bytes = f"runs.{LOG}.seconds.export", f"runs.{LOG}.bytes.export"
    vectors, demo_vectors = (load.data.num_held_out_users + load.data.num_items for load in (log, demo))
    export_s = plan.number(seconds) - plan.number(f"runs.{DEMO}.seconds.export")  # without the start of the ranks
    vector_s = NUM_RANKS * export_s / (vectors - demo_vectors)
    num_held_out = log.data.num_held_out_users
    start, evaluated, beauty = "runs.demo.seconds.evaluate", f"runs.{LOG}.seconds.evaluate", "runs.beauty.seconds.evaluate"
    user_s, num_beauty_pairs = plan.number(evaluated) / num_held_out, BEAUTY_USERS * BEAUTY_ITEMS
    baselines_s = nightly.number(beauty) - nightly.number(start) - BEAUTY_USERS * user_s
    other_bytes = 2 * 4 * log.data.num_items * log.training.dim + log.training.table_bytes
    user_bytes = (plan.number(num_bytes) - other_bytes) / num_held_out
    return {
        "ranked_value_s": ranks.constant(f"{top_lists}.cpu_s", pair_unit, size=num_pairs, value=pair_s),
        "ranked_target_value_s": ranks.constant(f"{targets}.cpu_s", pair_unit, size=num_pairs, value=target_pair_s),
        "ranked_user_bytes": ranks.constant(memory, "bytes per held-out user", size=num_users, value=list_bytes),
        "rank_start_s": nightly.constant("runs.beauty.seconds.export", "s until all ranks have started: most of this export"),
        "exported_user_bytes": plan.constant(num_bytes, "bytes per held-out user", size=num_held_out, value=user_bytes),
        "encoded_vector_s": plan.constant(seconds, "s of a rank per item or held-out user", size=vectors, value=vector_s),
        "evaluation_start_s": nightly.constant(start, "s until the users are evaluated: most of this evaluation"),
        "evaluated_user_s": plan.constant(evaluated, "s per held-out user", size=num_held_out, value=user_s),
        "linear_baseline_pair_s": nightly.constant(
            beauty, "s per user-item pair, 2 cores", size=num_beauty_pairs, value=baselines_s / num_beauty_pairs
        ),
    }


def _index_constants() -> dict[str, Constant]:
    index, serve, nightly = Result("index"), Result("serve"), Result("nightly")
    num_items, num_users, constants = index.content["items"], 10_000_000, {}
    for kind in INDEX_KINDS:
        peak, factor_unit = f"rows.{kind}.peak_bytes", "bytes per byte of the index, while it is built"
        factor = index.number(peak) / index.number(f"rows.{kind}.bytes")
        constants[f"index_{kind}_item_s"] = index.constant(f"rows.{kind}.build_s", "s per item", size=num_items)
        constants[f"index_{kind}_memory_factor"] = index.constant(peak, factor_unit, size=num_items, value=factor)
    users, user_unit = f"users.{num_users}.users_mib", "bytes per user with a history of 20 items"
    user_bytes = serve.number(users) * 2**20 / num_users
    constants["package_user_bytes"] = serve.constant(users, user_unit, size=num_users, value=user_bytes)
    constants["register_s"] = nightly.constant("runs.beauty.seconds.register", "s")
    return constants


def comparisons() -> list[str]:
    """Return table rows with estimated and measured seconds and megabytes, except of stages whose numbers are constants."""
    runs, nightly = Result("plan").content["runs"], Result("nightly").content["runs"]
    log_s = {
        stage: seconds for stage, seconds in runs[LOG]["seconds"].items() if stage not in ("check_data", "export", "evaluate")
    }
    disk_mb = {
        stage: num_bytes / 1e6 for stage, num_bytes in runs[DEMO]["bytes"].items() if stage != "train"
    }  # the estimate is the peak during training
    cases = [(DEMO, "s", nightly[DEMO]["seconds"]), (LOG, "s", log_s), (DEMO, "MB", disk_mb)]
    rows = []
    for run, unit, measured_by_stage in cases:
        for stage in estimate_run(Workload.model_validate(runs[run]["workload"])).stages:
            estimated = stage.seconds if unit == "s" else stage.disk_bytes / 1e6
            if estimated and stage.stage in measured_by_stage:
                measured = measured_by_stage[stage.stage]
                sizes = f"{estimated:.1f} {unit} | {measured:.1f} {unit} | {estimated / measured:.2f}"
                rows.append(f"| {run} | {stage.stage} | {sizes} |")
    return rows


def to_markdown() -> str:
    """Return the report."""
    plan, nightly_date = Result("plan").content, Result("nightly").content["date"]
    lines = [
        "# Estimates of `nightjar plan`, compared with measured runs",
        "",
        f"The demo ran on an idle machine on {nightly_date} ([nightly.md](nightly.md)). `make bench-plan` executed the run on",
        f"2 million events on {plan['date']}, on {plan['cores']} cores with a load average of {plan['load']:.0f}. On a busy",
        "machine, a stage takes longer than its estimate, because most constants come from an idle machine.",
        "",
        "| run | stage | estimated | measured | estimated / measured |",
        "|:---|:---|---:|---:|---:|",
        *comparisons(),
        "",
        "The measured constants and their sources are in [constants.json](../recsys_core/estimates/constants.json), and the",
        "assumed ones in [stage_estimate.py](../recsys_core/estimates/stage_estimate.py).",
        "",
    ]
    return "\n".join(lines)


def ten_billion_events() -> str:
    """Return the section of docs/scale.md with COMMAND and the table that it prints."""
    with tempfile.TemporaryDirectory() as workspace:
        run_nightjar(*COMMAND.split(), "--set", f"workspace={workspace}")
        estimate = RunEstimate.model_validate_json((Path(workspace) / "plan" / ESTIMATE_FILE_NAME).read_bytes())
    table = [ESTIMATE_TITLES, ("---", "---", "---:", "---:", "---:", "---"), *estimate_rows(estimate)]
    lines = [f"    nightjar {COMMAND}", "", *(f"| {' | '.join(row)} |" for row in table)]
    return "\n".join([*lines, "", f"The machines cost about {estimate.dollars:,.0f} dollars."])


def main() -> None:
    """Measure unless --constants is given. Write the constants, the report and the section of docs/scale.md."""
    if "--constants" not in sys.argv[1:]:
        RESULT_PATH.write_text(json.dumps(measure(), indent=2) + "\n", encoding="utf-8")
    constants_json = ConstantsFile(constants=measured_constants()).model_dump_json(indent=2)
    CONSTANTS_PATH.write_text(constants_json + "\n", encoding="utf-8")
    packaged_constants.cache_clear()
    PAGE_PATH.write_text(to_markdown(), encoding="utf-8")
    page = SCALE_PAGE_PATH.read_text(encoding="utf-8")
    before, after = page[: page.index(BEGIN_MARK) + len(BEGIN_MARK)], page[page.index(END_MARK) :]
    SCALE_PAGE_PATH.write_text(f"{before}\n{ten_billion_events()}\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
