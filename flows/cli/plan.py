"""`nightjar plan`: a sharding plan for any cluster, written to plan.json and plan.html, with tables for the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.cli import output
from flows.settings.pipeline import PipelineConfig
from recsys_core.sharding.config import ClusterConfig
from recsys_core.sharding.plan_file import PlanFile, format_ranges
from recsys_core.sharding.planner import write_plan
from recsys_core.units import format_bytes, format_milliseconds
from tasks.runs.context import StageContext
from tasks.runs.run import Run
from tasks.stages.data_stages import ingest

MAX_RANK_LINES = 16


def plan_sharding(config: PipelineConfig, *, cluster_settings: dict[str, Any], as_json: bool) -> None:
    """Ingest the data, plan the sharding, write plan.json and plan.html, and print the plan.

    The plan and the ingested data are kept in <workspace>/plan.

    Args:
        cluster_settings: settings of the cluster that replace those of sharding.cluster.
    """
    run = Run("plan", workspace=config.workspace.absolute(), parent="")
    with output.stage_lines():
        dataset = ingest(StageContext(run), config.inputs)
    cluster = ClusterConfig(**(config.sharding.cluster.model_dump() | cluster_settings))
    sharding = config.sharding.model_copy(update={"cluster": cluster})
    plan = config.model_copy(update={"sharding": sharding}).training_setup(dataset).make_plan(dataset)
    paths = write_plan(plan, run.folder)
    if as_json:
        output.print_json(plan.model_dump_json())
    else:
        print_plan(plan, paths=paths)


def print_plan(plan: PlanFile, *, paths: Sequence[Path]) -> None:
    """Print the placement of each table, memory and time by rank."""
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
    output.print_table(["ranks, slowest first", "HBM", "main memory", "est. step"], rank_rows)
    if len(rank_groups) > MAX_RANK_LINES:
        output.print_line(f"... and {len(rank_groups) - MAX_RANK_LINES} more, see {paths[1].name}")
    output.stdout.print()
    output.print_line(
        f"maximum / mean over the ranks: memory {plan.imbalance(plan.lookup_memory_field):.2f}, "
        f"time {plan.imbalance('step_ms'):.2f}; "
        f"memory and time of each rank: {paths[1]} (and {paths[0].name})"
    )
