"""The constants of `nightjar plan`, and a comparison of its estimates with runs that were measured.

    make bench-plan                            # writes plan.json, plan.md, the constants, and a table of docs/scale.md
    python -m benchmarks.plan --constants      # without the runs, which take about five minutes

The constants come from the results of the other benchmarks. Bytes, and the times of the data report and of the encoding of a
vector, come from a run on a generated log of 2 million events and from the demo. The estimates are compared with the other
stages of these runs, with the demo on another day, and with the ingest of 22 million events.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.nightly import NIGHTJAR
from recsys_core.estimates.constants import CONSTANTS_PATH, Constant, ConstantsFile, packaged_constants
from recsys_core.estimates.data_stages import ingest_interactions
from recsys_core.estimates.model_stages import FLOPS_PER_SCORE_VALUE
from recsys_core.estimates.run_estimate import RunEstimate, estimate_run
from recsys_core.estimates.workload import Data, Machines, Workload
from recsys_core.units import format_bytes, format_duration

FOLDER = Path(__file__).resolve().parent
RESULT_PATH, PAGE_PATH = FOLDER / "plan.json", FOLDER / "plan.md"
SCALE_PAGE_PATH = FOLDER.parent / "docs" / "scale.md"
BEGIN_MARK, END_MARK = "<!-- begin: benchmarks/plan.py -->", "<!-- end: benchmarks/plan.py -->"
SIMULATION = {"users": 10**9, "items": 10**8, "events": 10**10, "nodes": 4, "gpus-per-node": 8, "cores": 64}
"""Options of the command whose table is in docs/scale.md."""
LOG_SIZES = {"num_users": 50_000, "num_items": 30_000, "num_events": 2_000_000, "num_cold_items": 1_500}
LOG, DEMO = "2 M events", "demo"
INDEX_KINDS = ("flat", "ivf_flat", "ivf_sq8", "ivf_pq", "opq_pq", "pq_fastscan", "hnsw")
TRAINING_CASES = ("two ids, batches of 8,192", "history of 20, batches of 1,024")
TRAINED_ITEMS, TRAINED_CANDIDATES, TRAINED_DIM, TRAINING_RANKS = 200_000, 1_024 + 512, 64, 2
"""The trainings of ingest.json, on an idle machine. The one with histories has in-batch and sampled negatives."""
CONSTANT_SOURCES = ((LOG, "check_data"), (LOG, "export"), (DEMO, "export"))
"""Stages of the runs of plan.json from whose durations constants come."""
BEAUTY_USERS = 22_363
"""Test users of Amazon Beauty, which nightly.json has measured on an idle machine."""


def measure() -> dict[str, Any]:
    """Execute the runs; return their stages, sizes and workloads."""
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        config_path = write_log(folder)
        runs = {
            LOG: execute_run(config_path, folder / "log-runs", batch_size=1_024),
            DEMO: execute_run(write_demo_config(folder / "demo"), folder / "demo-runs", batch_size=512),
        }
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cores": len(os.sched_getaffinity(0)),
        "load": load_average,
        "runs": runs,
        "training": training_speeds(),
    }


def training_speeds() -> dict[str, Any]:
    """Return the samples per second of the training in ingest.json; if a newer ingest.json has none, those of plan.json."""
    loader = json.loads((FOLDER / "ingest.json").read_bytes())["loader"]
    if "training" not in loader:
        earlier: dict[str, Any] = json.loads(RESULT_PATH.read_bytes())["training"]
        return earlier
    speeds = {f"{row['case']}, batches of {row['batch_size']:,}": row["with_loader"] for row in loader["training"]}
    return {"date": loader["date"], "samples_per_s": speeds}


def write_log(folder: Path) -> Path:
    """Generate the log of 2 million events, and write its config; return the path of the config."""
    from recsys_core.ingest.synthetic import generate

    generate(folder / "data", **LOG_SIZES)
    settings = {
        "interactions": {
            "paths": [str(folder / "data" / "interactions")],
            "timestamp_column": "timestamp",
            "split": {"kind": "time", "test_days": 2, "validation_days": 1},
        },
        "embeddings": {"paths": [str(folder / "data" / "item_embeddings.parquet")], "vector_column": "embedding"},
        "training": {"epochs": 1},
        "evaluation": {"baselines": ["recent_popularity"]},  # the other ones are for catalogues of up to 100,000 items
    }
    config_path = folder / "log.yaml"
    config_path.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    return config_path


def write_demo_config(workspace: Path) -> Path:
    """Write data and config of `nightjar demo`; return the path of the config."""
    from flows.settings.template import write_demo

    workspace.mkdir()
    return write_demo(workspace)


def execute_run(config_path: Path, workspace: Path, *, batch_size: int) -> dict[str, Any]:
    """Execute a run without package and registration; return seconds and bytes of its stages, and its workload."""
    settings = ["--set", f"workspace={workspace}", "--set", f"training.batch_size={batch_size}"]
    command = [*NIGHTJAR, "run", str(config_path), *settings, "--until", "build_index", "--json"]
    process = subprocess.run(command, cwd=FOLDER.parent, check=True, stdout=subprocess.PIPE, text=True)
    output = json.loads(process.stdout.splitlines()[-1])
    (run_folder,) = (path for path in (workspace / "runs").iterdir() if path.is_dir())
    return {
        "seconds": {stage: round(result["seconds"], 2) for stage, result in output["stages"].items()},
        "bytes": {path.name: folder_bytes(path) for path in sorted(run_folder.iterdir()) if path.is_dir()},
        "part_bytes": folder_bytes(run_folder / "ingest_interactions" / "parts"),
        "id_bytes": sum(path.stat().st_size for path in (run_folder / "ingest_interactions").glob("*.parquet")),
        "workload": workload_of_run(config_path, settings[1::2], run_folder=run_folder).model_dump(mode="json"),
    }


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def workload_of_run(config_path: Path, overrides: list[str], *, run_folder: Path) -> Workload:
    """Return the sizes of a run, from its folder."""
    from flows.settings.config_file import LoadedConfig
    from flows.settings.workload import data_of_dataset, workload_of
    from recsys_core.manifests import Dataset, EmbeddingsManifest, InteractionsManifest, load_manifest
    from recsys_core.sharding.plan_file import PlanFile

    config = LoadedConfig.read(config_path, tuple(overrides)).config
    interactions = load_manifest(run_folder / "ingest_interactions", InteractionsManifest, verify=False)
    assert interactions is not None
    dataset = Dataset(interactions, load_manifest(run_folder / "ingest_embeddings", EmbeddingsManifest, verify=False))
    plan = PlanFile.read(run_folder / "plan_sharding" / "plan.json")
    machines = Machines(ranks_per_host=plan.world_size, cores_per_host=len(os.sched_getaffinity(0)))
    return workload_of(config, data_of_dataset(config, dataset), plan=plan, machines=machines)


def constants_of(results: dict[str, Any]) -> dict[str, Constant]:
    """Return the constants. results: the content of plan.json; the other files are read from the folder of benchmarks."""
    other = {
        name: json.loads((FOLDER / f"{name}.json").read_bytes()) for name in ("ingest", "ranks", "index", "serve", "nightly")
    }
    return {
        **dict(_data_constants(other["ingest"], results)),
        **dict(_training_constants(other["ingest"], results)),
        **dict(_ranking_constants(other["ranks"], other["nightly"], results)),
        **dict(_index_constants(other["index"], other["serve"], other["nightly"])),
        **dict(_assumptions()),
    }


def _data_constants(ingest: dict[str, Any], results: dict[str, Any]) -> Iterator[tuple[str, Constant]]:
    vectors, large = ingest["vectors"], ingest["interactions"]["same_limit"]["large"]
    num_values, date = vectors["rows"] * vectors["dim"], ingest["interactions"]["date"]
    vector_method = vectors["list"]["nightjar"]
    run = results["runs"][LOG]
    data = Data.model_validate(run["workload"]["data"])
    yield "benchmark_cores", Constant(value=ingest["interactions"]["cores"], unit="cores", source="ingest.json", date=date)
    yield (
        "vector_value_s",
        Constant(
            value=median(vector_method["seconds"]) / num_values,
            unit="s per value of a vector",
            source="ingest.json: vectors.list.nightjar.seconds",
            date=vectors["date"],
            measured_at=num_values,
        ),
    )
    yield (
        "vector_memory_bytes",
        Constant(
            value=vector_method["peak_anon_bytes"],
            unit="bytes",
            source="ingest.json: vectors.list.nightjar.peak_anon_bytes",
            date=vectors["date"],
        ),
    )
    yield (
        "event_s",
        Constant(
            value=large["seconds"] / large["events"],
            unit="s per event, 2 cores",
            source="ingest.json: interactions.same_limit.large.seconds",
            date=date,
            measured_at=large["events"],
        ),
    )
    yield (
        "event_memory_bytes",
        Constant(
            value=large["peak_anon_bytes"] / large["events"],
            unit="bytes per event, up to the memory limit of DuckDB",
            source="ingest.json: interactions.same_limit.large.peak_anon_bytes",
            date=date,
            measured_at=large["events"],
        ),
    )
    sources = {"part_bytes": data.num_events, "id_bytes": data.num_users + data.num_items}
    for name, count in sources.items():
        yield (
            name,
            Constant(
                value=run[name] / count,
                unit=f"bytes per {'event' if name == 'part_bytes' else 'user or item'}",
                source=f"plan.json: {LOG}, {name}",
                date=results["date"],
                measured_at=count,
            ),
        )
    yield (
        "report_event_s",
        Constant(
            value=run["seconds"]["check_data"] / data.num_events,
            unit="s per event",
            source=f"plan.json: {LOG}, seconds.check_data",
            date=results["date"],
            measured_at=data.num_events,
        ),
    )


def _training_constants(ingest: dict[str, Any], results: dict[str, Any]) -> Iterator[tuple[str, Constant]]:
    """Yield a and f of the step time B a + 6 B C D f. a: the fastest training with two ids; f: a training with histories."""
    speeds, date = results["training"]["samples_per_s"], results["training"]["date"]
    example_s, history_s = (TRAINING_RANKS / speeds[case] for case in TRAINING_CASES)
    operations = FLOPS_PER_SCORE_VALUE * TRAINED_CANDIDATES * TRAINED_DIM
    yield (
        "trained_example_s",
        Constant(
            value=example_s,
            unit="s per training example of a rank without its scores, for a catalogue of this many items",
            source=f"plan.json: training.samples_per_s, {TRAINING_CASES[0]}",
            date=date,
            measured_at=TRAINED_ITEMS,
        ),
    )
    yield (
        "cpu_operation_s",
        Constant(
            value=(history_s - example_s) / operations,
            unit="s per floating-point operation of a rank",
            source=f"plan.json: training.samples_per_s, {TRAINING_CASES[1]}",
            date=date,
        ),
    )
    (loader,) = (
        speed
        for speed in ingest["loader"]["speeds"]
        if (speed["case"], speed["batch_size"], speed["processes"]) == ("history of 20", 8192, 2)
    )
    yield (
        "loaded_example_s",
        Constant(
            value=1 / loader["samples_per_s"],
            unit="s per training example of a rank, for the loader",
            source="ingest.json: loader.speeds, history of 20, batches of 8,192, 2 processes",
            date=ingest["loader"]["date"],
        ),
    )


def _ranking_constants(
    ranks: dict[str, Any], nightly: dict[str, Any], results: dict[str, Any]
) -> Iterator[tuple[str, Constant]]:
    num_pairs, dim = ranks["queries"] * ranks["items"], 64
    cases = {"ranked_value_s": "Top lists", "ranked_target_value_s": "Top lists and positions of all targets"}
    run_by_size = {}
    for name, case in cases.items():
        run_by_size = {run["world_size"]: run for run in ranks["runs"][case]}
        yield (
            name,
            Constant(
                value=run_by_size[2]["cpu_s"] / num_pairs / dim,
                unit="s of CPU time per value of a pair of a user and an item",
                source=f"ranks.json: {case}, 2 ranks, cpu_s",
                date=ranks["date"],
                measured_at=num_pairs,
            ),
        )
    # A rank needs a constant number of bytes, and its share of the vectors and of the lists of the users.
    shared_bytes = 4 * (run_by_size[2]["rank_bytes"] - run_by_size[4]["rank_bytes"])
    vector_bytes = (ranks["queries"] + ranks["items"]) * dim * 4
    yield (
        "ranked_user_bytes",
        Constant(
            value=(shared_bytes - vector_bytes) / ranks["queries"],
            unit="bytes per held-out user",
            source="ranks.json: rank_bytes with 2 and with 4 ranks",
            date=ranks["date"],
            measured_at=ranks["queries"],
        ),
    )
    yield (
        "ranking_memory_bytes",
        Constant(
            value=max(0.0, run_by_size[2]["rank_bytes"] - shared_bytes / 2),
            unit="bytes",
            source="ranks.json: rank_bytes with 2 and with 4 ranks",
            date=ranks["date"],
        ),
    )
    start_s = nightly["runs"]["beauty"]["seconds"]["export"]
    yield (
        "rank_start_s",
        Constant(
            value=start_s,
            unit="s until all ranks have started",
            source="nightly.json: beauty, seconds.export, which mostly starts ranks",
            date=nightly["date"],
        ),
    )
    run, workload = results["runs"][LOG], Workload.model_validate(results["runs"][LOG]["workload"])
    data = workload.data
    item_bytes = 2 * 4 * data.num_items * workload.training.dim
    yield (
        "exported_user_bytes",
        Constant(
            value=(run["bytes"]["export"] - item_bytes - workload.training.table_bytes) / data.num_held_out_users,
            unit="bytes per held-out user: vectors of two splits, and rankings",
            source=f"plan.json: {LOG}, bytes.export, less the item vectors and the tables",
            date=results["date"],
            measured_at=data.num_held_out_users,
        ),
    )
    # The difference of two exports of the same day leaves out the start of the ranks.
    runs = [results["runs"][name] for name in (LOG, DEMO)]
    sizes = [Workload.model_validate(run["workload"]).data for run in runs]
    num_pairs_by_run = [size.num_held_out_users * size.num_items for size in sizes]
    num_vectors_by_run = [size.num_held_out_users + size.num_items for size in sizes]
    export_s = runs[0]["seconds"]["export"] - runs[1]["seconds"]["export"]
    ranking_cpu_s = run_by_size[2]["cpu_s"] * (num_pairs_by_run[0] - num_pairs_by_run[1]) / num_pairs
    yield (
        "encoded_vector_s",
        Constant(
            value=(export_s * TRAINING_RANKS - ranking_cpu_s) / (num_vectors_by_run[0] - num_vectors_by_run[1]),
            unit="s of a rank per vector of an item or a held-out user",
            source=f"plan.json: seconds.export of {LOG}, less that of {DEMO} and the ranking",
            date=results["date"],
            measured_at=num_vectors_by_run[0],
        ),
    )
    yield (
        "evaluated_user_s",
        Constant(
            value=nightly["runs"]["beauty"]["seconds"]["evaluate"] / BEAUTY_USERS,
            unit="s per held-out user, with the rankings of all baselines of a small catalogue",
            source="nightly.json: beauty, seconds.evaluate",
            date=nightly["date"],
            measured_at=BEAUTY_USERS,
        ),
    )


def _index_constants(index: dict[str, Any], serve: dict[str, Any], nightly: dict[str, Any]) -> Iterator[tuple[str, Constant]]:
    for kind in INDEX_KINDS:
        row = index["rows"][kind]
        yield (
            f"index_{kind}_item_s",
            Constant(
                value=row["build_s"] / index["items"],
                unit="s per item",
                source=f"index.json: {kind}, build_s",
                date=index["date"],
                measured_at=index["items"],
            ),
        )
        yield (
            f"index_{kind}_memory_factor",
            Constant(
                value=row["peak_bytes"] / row["bytes"],
                unit="bytes per byte of the index, while it is built",
                source=f"index.json: {kind}, peak_bytes and bytes",
                date=index["date"],
                measured_at=index["items"],
            ),
        )
    yield "index_dim", Constant(value=64, unit="values of a vector", source="benchmarks/index.py", date=index["date"])
    num_users = 10_000_000
    yield (
        "package_user_bytes",
        Constant(
            value=serve["users"][str(num_users)]["users_mib"] * 2**20 / num_users,
            unit="bytes per user with a history of package_history items",
            source=f"serve.json: users.{num_users}.users_mib",
            date=serve["date"],
            measured_at=num_users,
        ),
    )
    yield "package_history", Constant(value=20, unit="items", source="benchmarks/serve_users.py", date=serve["date"])
    seconds = nightly["runs"]["beauty"]["seconds"]
    yield (
        "register_s",
        Constant(
            value=seconds["package"] + seconds["register"],
            unit="s",
            source="nightly.json: beauty, seconds.package and seconds.register",
            date=nightly["date"],
        ),
    )


def _assumptions() -> Iterator[tuple[str, Constant]]:
    """Yield the constants that nothing here measures."""
    assumptions = {
        "spark_cpu_factor": (10.0, "CPU time of Spark per CPU time of DuckDB", "a guess: the JVM, the shuffle and its files"),
        "spark_start_s": (20.0, "s until the executors have started", "a guess"),
        "spark_core_memory_bytes": (4e9, "bytes per core of an executor", "a common setting of Spark clusters"),
        "gpu_operation_s": (1e-14, "s per floating-point operation", "100 TFLOP/s, a tenth of the peak of an H100 in bf16"),
        "gpu_ranked_value_s": (
            2e-13,
            "s per value of a pair of a user and an item",
            "10 TFLOP/s with the choice of the top items",
        ),
        "checkpoint_write_byte_s": (0.5e-9, "s per byte and host", "2 GB/s to the storage"),
        "checkpoint_hash_byte_s": (0.2e-9, "s per byte, on one host", "sha256 at 5 GB/s"),
        "gpu_hour_dollars": (2.5, "dollars per hour", "the price in docs/scale.md"),
        "core_hour_dollars": (0.05, "dollars per hour", "a round price of a rented core with 4 to 8 GB"),
    }
    for name, (value, unit, reason) in assumptions.items():
        yield name, Constant(value=value, unit=unit, source=reason)


def comparisons(results: dict[str, Any], constants: dict[str, Constant]) -> list[dict[str, Any]]:
    """Return the estimated and measured seconds of stages, except of those that a constant comes from."""
    nightly, ingest = (json.loads((FOLDER / f"{name}.json").read_bytes()) for name in ("nightly", "ingest"))
    rows = []
    for label, run, seconds in (
        (f"demo, {nightly['date']}, nightly.json", DEMO, nightly["runs"]["demo"]["seconds"]),
        (f"demo, {results['date']}", DEMO, results["runs"][DEMO]["seconds"]),
        (f"{LOG}, {results['date']}", LOG, results["runs"][LOG]["seconds"]),
    ):
        for stage in estimate_run(Workload.model_validate(results["runs"][run]["workload"]), constants).stages:
            is_source = seconds is results["runs"][run]["seconds"] and (run, stage.stage) in CONSTANT_SOURCES
            if stage.stage in seconds and not is_source:
                rows.append({"run": label, "stage": stage.stage, "estimated": stage.seconds, "measured": seconds[stage.stage]})
    log = ingest["interactions"]["same_limit"]["small"]
    data = Data(num_users=1_000_000, num_items=200_000, num_events=log["events"], num_held_out_users=0)
    rows.append(
        {
            "run": f"log of {log['events'] / 1e6:.0f} M events, {ingest['interactions']['date']}, ingest.json",
            "stage": "ingest_interactions",
            "estimated": ingest_interactions(data, Machines(), constants).seconds,
            "measured": log["seconds"],
        }
    )
    return rows


def size_comparisons(results: dict[str, Any], constants: dict[str, Constant]) -> list[dict[str, Any]]:
    """Return the estimated and measured bytes of the stages of the demo."""
    run = results["runs"][DEMO]
    estimate = estimate_run(Workload.model_validate(run["workload"]), constants)
    return [
        {"run": "demo", "stage": stage.stage, "estimated": stage.disk_bytes, "measured": run["bytes"][stage.stage]}
        for stage in estimate.stages
        if stage.disk_bytes
        and stage.stage in run["bytes"]
        and stage.stage != "train"  # only one checkpoint is left of the peak
    ]


def to_markdown(results: dict[str, Any], constants: dict[str, Constant]) -> str:
    """Return the report."""
    lines = [
        "# Estimates of `nightjar plan`, compared with measured runs",
        "",
        f"`make bench-plan` executed the runs on {results['date']} on {results['cores']} cores with a load average of",
        f"{results['load']:.1f} at the start. Most constants come from an idle machine, so a ratio below 1 is expected for the",
        "runs of this day. `nightly.json` and `ingest.json` were measured on an idle machine.",
        "",
        "| run | stage | estimated, s | measured, s | estimated / measured |",
        "|:---|:---|---:|---:|---:|",
    ]
    for row in comparisons(results, constants):
        ratio = f"{row['estimated'] / row['measured']:.2f}" if row["measured"] else "-"
        lines.append(f"| {row['run']} | {row['stage']} | {row['estimated']:.1f} | {row['measured']:.1f} | {ratio} |")
    lines += [
        "",
        "| run | stage | estimated disk, MB | measured disk, MB | estimated / measured |",
        "|:---|:---|---:|---:|---:|",
    ]
    for row in size_comparisons(results, constants):
        megabytes = f"{row['estimated'] / 1e6:.2f} | {row['measured'] / 1e6:.2f}"
        lines.append(f"| {row['run']} | {row['stage']} | {megabytes} | {row['estimated'] / row['measured']:.2f} |")
    lines += [
        "",
        "## Constants",
        "",
        "`recsys_core/estimates/constants.json` has these constants. A constant without a date is an assumption.",
        "",
        "| constant | value | unit | measured at | source | date |",
        "|:---|---:|:---|---:|:---|:---|",
    ]
    for name, constant in constants.items():
        size = "" if constant.measured_at is None else f"{constant.measured_at:,.0f}"
        lines.append(
            f"| {name} | {constant.value:.4g} | {constant.unit} | {size} | {constant.source} | {constant.date or 'assumed'} |"
        )
    return "\n".join(lines) + "\n"


def ten_billion_events() -> RunEstimate:
    """Return the estimate of docs/scale.md, which `nightjar plan` prints with the options of SIMULATION."""
    from flows.settings.config_file import load_config
    from flows.settings.workload import data_of_sizes, plan_for_sizes, workload_of

    config = load_config(FOLDER.parent / "examples" / "ten_billion.yaml")
    cluster = config.sharding.cluster.model_copy(
        update={"device": "cuda", "num_nodes": SIMULATION["nodes"], "processes_per_node": SIMULATION["gpus-per-node"]}
    )
    config = config.model_copy(update={"sharding": config.sharding.model_copy(update={"cluster": cluster})})
    data = data_of_sizes(config, num_users=SIMULATION["users"], num_items=SIMULATION["items"], num_events=SIMULATION["events"])
    plan = plan_for_sizes(config, data)
    machines = Machines(
        engine="spark",
        device=plan.device,
        num_hosts=plan.num_nodes,
        ranks_per_host=plan.processes_per_node,
        cores_per_host=SIMULATION["cores"],
    )
    return estimate_run(workload_of(config, data, plan=plan, machines=machines))


def simulation_markdown(estimate: RunEstimate) -> str:
    """Return the section of docs/scale.md: the command, and its table."""
    options = " ".join(f"--{option} {value}" for option, value in SIMULATION.items())
    lines = [
        f"    nightjar plan examples/ten_billion.yaml {options} --engine spark",
        "",
        "| stage | runs on | memory per process | disk | time | basis of the time |",
        "|:---|:---|---:|---:|---:|:---|",
    ]
    for stage in estimate.stages:
        memory, disk = format_bytes(stage.memory_bytes), format_bytes(stage.disk_bytes)
        lines.append(
            f"| {stage.stage} | {stage.where} | {memory} | {disk} | {format_duration(stage.seconds)} | {stage.basis_text} |"
        )
    total = f"{format_bytes(estimate.disk_bytes)} | {format_duration(estimate.seconds)}"
    lines += [
        f"| **all stages** | | | {total} | |",
        "",
        f"The machines cost about {estimate.dollars:,.0f} dollars.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, unless --constants is given, and write the constants and the report."""
    if "--constants" not in sys.argv[1:]:
        RESULT_PATH.write_text(json.dumps(measure(), indent=2) + "\n", encoding="utf-8")
    results = json.loads(RESULT_PATH.read_bytes())
    constants = constants_of(results)
    CONSTANTS_PATH.write_text(ConstantsFile(constants=constants).model_dump_json(indent=2) + "\n", encoding="utf-8")
    PAGE_PATH.write_text(to_markdown(results, constants), encoding="utf-8")
    packaged_constants.cache_clear()
    page = SCALE_PAGE_PATH.read_text(encoding="utf-8")
    before, after = page[: page.index(BEGIN_MARK) + len(BEGIN_MARK)], page[page.index(END_MARK) :]
    SCALE_PAGE_PATH.write_text(f"{before}\n{simulation_markdown(ten_billion_events())}\n{after}", encoding="utf-8")
    sys.stdout.write(to_markdown(results, constants))


if __name__ == "__main__":
    main()
