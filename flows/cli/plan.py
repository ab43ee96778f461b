"""A plan for a cluster that need not exist: from the input to plan.json and plan.html, and what a terminal shows of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.cli.output import print_table
from flows.config import PipelineConfig
from recsys_core.data.embeddings.ingest import ingest_embeddings
from recsys_core.data.features.ingest import ingest_features
from recsys_core.data.interactions.ingest import ingest_interactions
from recsys_core.manifests import Dataset
from recsys_core.models.spec import ModelSpec
from recsys_core.sharding.config import ClusterConfig
from recsys_core.sharding.lookup_stats import measure_lookups
from recsys_core.sharding.plan_file import PlanFile, format_ranges
from recsys_core.sharding.plan_page import compared_plans, fast_tier, format_bytes, format_milliseconds
from recsys_core.sharding.planner import make_plan, write_plan

MOST_LINES = 16


def plan_for(config: PipelineConfig, *, cluster: dict[str, Any]) -> tuple[PlanFile, tuple[Path, Path]]:
    """The plan for `config`'s data on its cluster with `cluster` put over it, and where plan.json and plan.html lie.

    They and the ingests are kept in <workspace>/plan.
    """
    folder = config.workspace / "plan"
    dataset = _ingest(config, folder=folder)
    model = ModelSpec.of(
        config.model,
        dataset=dataset,
        tables=config.tables,
        loss=config.loss,
    )
    wanted = ClusterConfig(**(config.sharding.cluster.model_dump() | cluster))
    sharding = config.sharding.model_copy(update={"cluster": wanted})
    batch_size, optimizer = config.training.batch_size, config.training.table_optimizer
    lookup_stats = measure_lookups(
        model,
        batch_size=batch_size,
        loss=config.loss,
        dataset=dataset,
    )
    plan = make_plan(sharding, model=model, batch_size=batch_size, optimizer=optimizer, lookup_stats=lookup_stats)
    return plan, write_plan(plan, folder)


def _ingest(config: PipelineConfig, *, folder: Path) -> Dataset:
    root = config.data_root
    embeddings = (
        ingest_embeddings(config.embeddings, folder=folder / "embeddings", data_root=root) if config.embeddings else None
    )
    interactions = ingest_interactions(config.log, embeddings=embeddings, folder=folder / "interactions", data_root=root)
    if config.features is None:
        return Dataset(interactions, embeddings)
    features = ingest_features(
        config.features,
        interactions=interactions,
        embeddings=embeddings,
        previous=None,
        memory_limit=config.interactions.memory_limit,
        threads=config.interactions.threads,
        folder=folder / "features",
        data_root=root,
    )
    return Dataset(interactions, embeddings, features)


def print_plan(plan: PlanFile, *, paths: Sequence[Path], console: Console) -> None:
    """Where each table lies, what the ranks hold and take, the same beside simpler plans, and the files that tell more."""
    tables = [
        [name, f"{t.rows:,} x {t.dim}", t.sharding_type, t.compute_kernel, format_ranges(t.ranks), f"{t.values_per_query:.3g}"]
        for name, t in plan.tables.items()
    ]
    print_table(["table", "rows x dim", "sharding", "kernel", "ranks", "values/query"], tables, console=console)
    console.print()
    groups = sorted(plan.rank_groups(), key=lambda group: -group[1].step_ms)
    ranks = [
        [
            format_ranges(ranks),
            format_bytes(one.hbm_bytes),
            format_bytes(one.ddr_bytes),
            f"{format_milliseconds(one.step_ms)} ms",
        ]
        for ranks, one in groups[:MOST_LINES]
    ]
    print_table(["ranks, slowest first", "HBM", "main memory", "est. step"], ranks, console=console)
    if len(groups) > MOST_LINES:
        console.print(f"... and {len(groups) - MOST_LINES} more, see {paths[1].name}", markup=False)
    console.print()
    plans = [
        [
            one.name,
            f"{format_milliseconds(one.step_ms)} ms" if one.step_ms is not None else "-",
            format_bytes(one.hbm_bytes),
            format_bytes(one.ddr_bytes),
        ]
        for one in compared_plans(plan)
    ]
    print_table(["compared", "est. step", "HBM at most", "main memory at most"], plans, console=console)
    for one in plan.naive:
        if one.problem is not None:
            console.print(f"{one.name}: {one.problem}", style="yellow", markup=False, soft_wrap=True)
    console.print(
        f"largest over mean of the ranks: memory {plan.imbalance(fast_tier(plan)):.2f}, time {plan.imbalance('step_ms'):.2f}; "
        f"why each table lies so: {paths[1]} (and {paths[0].name})",
        markup=False,
        soft_wrap=True,
    )
