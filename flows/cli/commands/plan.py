"""`nightjar plan`: a sharding plan for any cluster and an estimate of a run, as files and as tables for the terminal."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ByteSize, TypeAdapter

from flows.cli import output
from flows.settings.pipeline import PipelineConfig
from flows.settings.workload import check_sizes, data_of_dataset, data_of_sizes, plan_for_sizes, workload_of
from recsys_core.errors import counted
from recsys_core.estimates.run_estimate import RunEstimate, estimate_run
from recsys_core.estimates.stage_estimate import CONSTANTS_PATH, packaged_constants
from recsys_core.estimates.workload import DataSizes, Machines
from recsys_core.sharding.plan_file import PlanFile, format_ranges
from recsys_core.sharding.planner import write_plan
from recsys_core.units import format_bytes, format_duration, format_milliseconds
from tasks.runs.context import StageContext
from tasks.runs.run import LOCK_NAME, Run, exclusive_lock
from tasks.stages.data_stages import ingest

MAX_RANK_LINES = 16
ESTIMATE_FILE_NAME = "estimate.json"
ESTIMATE_TITLES = ("stage", "runs on", "memory", "disk", "time", "measured")


@dataclass(frozen=True)
class PlannedSizes:
    """Sizes of data and hosts that do not exist yet. None means the size of the config's data, or the cores of this machine."""

    num_users: int | None = None
    num_items: int | None = None
    num_events: int | None = None
    cores_per_host: int | None = None


def plan_sharding(config: PipelineConfig, *, sizes: PlannedSizes, as_json: bool) -> None:
    """Plan the sharding and estimate a run, for the data of the config or for other sizes. Write and print the results.

    Without sizes, the data are ingested first. The ingested data, the plan and the estimate are kept in <workspace>/plan.
    """
    check_sizes(sizes.num_users, sizes.num_items, sizes.num_events)
    run = Run("plan", workspace=config.workspace.absolute(), parent_name="")
    run.folder.mkdir(parents=True, exist_ok=True)
    problem = f"{run.folder}: another `nightjar plan` is writing this folder; wait for it to end, or set another workspace"
    with exclusive_lock(run.folder / LOCK_NAME, problem=problem):
        plan, estimate, paths = _plan_and_estimate(config, run, sizes)
    if as_json:
        output.print_json(plan.model_dump_json())
        return
    print_plan(plan, paths=paths)
    output.stdout.print()
    print_estimate(estimate, path=run.folder / ESTIMATE_FILE_NAME)
    if sizes.num_users is not None and config.features is not None:
        print_folded("the plan and the estimate leave out the features, because their sizes are not known")


def _plan_and_estimate(config: PipelineConfig, run: Run, sizes: PlannedSizes) -> tuple[PlanFile, RunEstimate, Sequence[Path]]:
    """Write the plan and the estimate into the run's folder; return them, and the paths of the plan as JSON and as a page."""
    plan, data_sizes = _plan_of_sizes(config, sizes) if sizes.num_users is not None else _plan_of_data(config, run)
    machines = Machines(
        engine=config.interactions.engine.kind,
        device=plan.device,
        num_hosts=plan.num_nodes,
        ranks_per_host=plan.processes_per_node,
        cores_per_host=sizes.cores_per_host or os.cpu_count() or 1,
        memory_limit_bytes=TypeAdapter(ByteSize).validate_python(config.interactions.memory_limit),
    )
    estimate = estimate_run(workload_of(config, data_sizes, plan=plan, machines=machines))
    (run.folder / ESTIMATE_FILE_NAME).write_text(estimate.model_dump_json(indent=2), encoding="utf-8")
    return plan, estimate, write_plan(plan, run.folder)


def _plan_of_sizes(config: PipelineConfig, sizes: PlannedSizes) -> tuple[PlanFile, DataSizes]:
    assert (
        sizes.num_users is not None and sizes.num_items is not None and sizes.num_events is not None
    )  # ensured by check_sizes
    data_sizes = data_of_sizes(config, num_users=sizes.num_users, num_items=sizes.num_items, num_events=sizes.num_events)
    return plan_for_sizes(config, data_sizes), data_sizes


def _plan_of_data(config: PipelineConfig, run: Run) -> tuple[PlanFile, DataSizes]:
    with output.printed_stages():
        dataset = ingest(StageContext(run), config.input_config)
    return config.training_setup(dataset).make_plan(dataset), data_of_dataset(config, dataset)


def print_plan(plan: PlanFile, *, paths: Sequence[Path]) -> None:
    """Print the placement of each table, and the memory and time of each rank."""
    json_path, page_path = paths
    table_rows = [
        [
            table_name,
            f"{table.rows:,} x {table.dim}",
            table.sharding_type,
            table.compute_kernel,
            format_ranges(table.ranks),
            f"{table.values_per_query:.3g}",
        ]
        for table_name, table in plan.tables.items()
    ]
    output.print_table(["table", "rows x dim", "sharding", "kernel", "ranks", "values/query"], table_rows)
    output.stdout.print()
    rank_groups = sorted(plan.rank_groups(), key=lambda group: -group[1].step_ms)
    rank_rows = [
        [
            format_ranges(ranks),
            format_bytes(rank_load.hbm_bytes),
            format_bytes(rank_load.ddr_bytes),
            f"{format_milliseconds(rank_load.step_ms)} ms",
        ]
        for ranks, rank_load in rank_groups[:MAX_RANK_LINES]
    ]
    output.print_table(["ranks, slowest first", "HBM", "main memory", "lookups of a step"], rank_rows)
    if len(rank_groups) > MAX_RANK_LINES:
        output.print_line(f"... and {len(rank_groups) - MAX_RANK_LINES} more, see {page_path.name}")
    output.stdout.print()
    memory_imbalance, time_imbalance = plan.imbalance(plan.lookup_memory_field), plan.imbalance("step_ms")
    print_folded(f"maximum / mean over the ranks: memory {memory_imbalance:.2f}, time {time_imbalance:.2f}")
    print_folded(f"memory and time of each rank: {page_path} (and {json_path.name})")


def print_estimate(estimate: RunEstimate, *, path: Path) -> None:
    """Print the sizes of a run, the estimates of its stages, and the meaning of the columns."""
    data_sizes, machines = estimate.workload.data, estimate.workload.machines
    gpus_text = f"{machines.ranks_per_host} GPUs and " if machines.device == "cuda" else ""
    gpu_price, core_price = (packaged_constants()[name].value for name in ("gpu_hour_dollars", "core_hour_dollars"))
    gpu_price_text = f" and {gpu_price:.2f} per GPU-hour" if gpus_text else ""
    print_folded(
        f"first run on {data_sizes.num_users:,} users, {data_sizes.num_items:,} items and {data_sizes.num_events:,} events, "
        f"with {counted(machines.num_hosts, 'host')} of {gpus_text}{machines.cores_per_host} cores, and {machines.engine} for "
        "the ingest:"
    )
    output.stdout.print()
    output.print_table(ESTIMATE_TITLES, estimate_rows(estimate), left_columns=(0, 1, 5))
    output.stdout.print()
    print_folded(
        "measured: size of the measurement (on 2 CPU cores), divided by the size of this run (for train, in catalogue items); "
        "a time from a smaller size, such as 1/50, is extrapolated"
    )
    print_folded(
        "no in the column measured: the time contains an assumption, such as the speed of a disk, of Spark or of a GPU"
    )
    print_folded("memory: of one process, without Python and its libraries; -: not estimated")
    print_folded(f"cost: {estimate.dollars:,.2f} dollars, assuming {core_price:.2f} dollars per core-hour{gpu_price_text}")
    print_folded(f"constants of each time: {path}")
    print_folded(f"sources of the constants: {CONSTANTS_PATH}")


def estimate_rows(estimate: RunEstimate) -> list[list[str]]:
    """Return a row for each stage and a row for the whole run. The columns are ESTIMATE_TITLES."""
    rows = [
        [
            stage.stage,
            stage.where,
            format_bytes(stage.memory_bytes),
            format_bytes(stage.disk_bytes or None),
            format_duration(stage.seconds),
            stage.measured_text,
        ]
        for stage in estimate.stages
    ]
    return [*rows, ["all stages", "", "", format_bytes(estimate.disk_bytes), format_duration(estimate.seconds), ""]]


def print_folded(text: str) -> None:
    """Print a text, folded at the width of the terminal."""
    output.print_line(output.fold(text, width=output.stdout.width))
