"""`nightjar plan`: a sharding plan for any cluster, written to plan.json and plan.html, with tables for the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.cli.output import print_table
from flows.settings.pipeline import PipelineConfig
from recsys_core.ingest.features.ingest import ingest_features
from recsys_core.ingest.log.ingest import ingest_interactions
from recsys_core.ingest.vectors.ingest import ingest_embeddings
from recsys_core.manifests import Dataset
from recsys_core.models.spec import ModelSpec
from recsys_core.sharding.config import ClusterConfig
from recsys_core.sharding.lookup_stats import measure_lookups
from recsys_core.sharding.plan_file import PlanFile, format_ranges
from recsys_core.sharding.plan_page import compared_plans, format_milliseconds, lookup_memory_field
from recsys_core.sharding.planner import make_plan, write_plan
from recsys_core.units import format_bytes

MAX_RANK_LINES = 16


def plan_for(config: PipelineConfig, *, cluster_settings: dict[str, Any]) -> tuple[PlanFile, tuple[Path, Path]]:
    """Ingest the data, plan the sharding and return the plan with the paths of plan.json and plan.html.

    The plan and the ingested data are kept in <workspace>/plan.

    Args:
        cluster_settings: settings of the cluster that replace those of sharding.cluster.
    """
    plan_folder = config.workspace / "plan"
    dataset = _ingest(config, plan_folder=plan_folder)
    model_spec = ModelSpec.of(
        config.model,
        dataset=dataset,
        tables=config.tables,
        loss=config.loss,
    )
    cluster = ClusterConfig(**(config.sharding.cluster.model_dump() | cluster_settings))
    sharding = config.sharding.model_copy(update={"cluster": cluster})
    batch_size, optimizer = config.training.batch_size, config.training.table_optimizer
    lookup_stats = measure_lookups(
        model_spec,
        batch_size=batch_size,
        loss=config.loss,
        dataset=dataset,
    )
    plan = make_plan(sharding, model=model_spec, batch_size=batch_size, optimizer=optimizer, lookup_stats=lookup_stats)
    return plan, write_plan(plan, plan_folder)


def _ingest(config: PipelineConfig, *, plan_folder: Path) -> Dataset:
    allowed_data_root = config.allowed_data_root
    embeddings = (
        ingest_embeddings(config.embeddings, folder=plan_folder / "embeddings", allowed_data_root=allowed_data_root)
        if config.embeddings
        else None
    )
    interactions = ingest_interactions(
        config.interactions_with_context,
        embeddings=embeddings,
        folder=plan_folder / "interactions",
        allowed_data_root=allowed_data_root,
    )
    if config.features is None:
        return Dataset(interactions, embeddings)
    features = ingest_features(
        config.features,
        interactions=interactions,
        embeddings=embeddings,
        previous=None,
        memory_limit=config.interactions.memory_limit,
        threads=config.interactions.threads,
        folder=plan_folder / "features",
        allowed_data_root=allowed_data_root,
    )
    return Dataset(interactions, embeddings, features)


def print_plan(plan: PlanFile, *, paths: Sequence[Path], console: Console) -> None:
    """Print the placement of each table, memory and time by rank, and a comparison with simpler plans."""
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
    print_table(["table", "rows x dim", "sharding", "kernel", "ranks", "values/query"], table_rows, console=console)
    console.print()
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
    print_table(["ranks, slowest first", "HBM", "main memory", "est. step"], rank_rows, console=console)
    if len(rank_groups) > MAX_RANK_LINES:
        console.print(f"... and {len(rank_groups) - MAX_RANK_LINES} more, see {paths[1].name}", markup=False)
    console.print()
    plan_rows = [
        [
            candidate.name,
            f"{format_milliseconds(candidate.step_ms)} ms" if candidate.step_ms is not None else "-",
            format_bytes(candidate.hbm_bytes),
            format_bytes(candidate.ddr_bytes),
        ]
        for candidate in compared_plans(plan)
    ]
    print_table(["plan", "est. step", "max. HBM", "max. main memory"], plan_rows, console=console)
    for naive_plan in plan.naive:
        if naive_plan.problem is not None:
            console.print(f"{naive_plan.name}: {naive_plan.problem}", style="yellow", markup=False, soft_wrap=True)
    console.print(
        f"maximum / mean over the ranks: memory {plan.imbalance(lookup_memory_field(plan)):.2f}, "
        f"time {plan.imbalance('step_ms'):.2f}; "
        f"the reasons for each placement: {paths[1]} (and {paths[0].name})",
        markup=False,
        soft_wrap=True,
    )
