"""Estimates for three model sizes from the sharding planner, under the assumptions in HOST and ASSUMPTIONS.

    make bench-scale          # writes benchmarks/scale.json and the tables of docs/scale.md; no GPU, under two minutes

Only the planning time is measured. The loader's throughput comes from benchmarks/ingest.md.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

from recsys_core.errors import InputError
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import TableConfig, TableOptimizer
from recsys_core.preflight import installed_versions
from recsys_core.sharding.config import ClusterConfig, ShardingConfig
from recsys_core.sharding.lookup_stats import LookupStats, num_distinct_items
from recsys_core.sharding.plan_file import PlanFile
from recsys_core.sharding.planner import make_plan

ROOT = Path(__file__).resolve().parents[1]
RESULT_PATH, PAGE_PATH = ROOT / "benchmarks" / "scale.json", ROOT / "docs" / "scale.md"
BEGIN_MARK, END_MARK = "<!-- begin: benchmarks/scale.py -->", "<!-- end: benchmarks/scale.py -->"

HOST = {
    "hbm_gb": 80,
    "ddr_gb": 2000,
    "hbm_bandwidth_gb_s": 3350,
    "intra_host_gb_s": 450,
    "inter_host_gb_s": 50,
    "pcie_gb_s": 55,
    "ddr_bandwidth_gb_s": 300,
}
"""Data-sheet values of an H100 SXM, with NVLink in one direction, one port of 400 Gbit/s per GPU, and PCIe 5."""
ASSUMPTIONS: dict[str, Any] = {
    "dim": 128,
    "batch_size": 8192,
    "history": 20,
    "negatives": 512,
    "zipf_exponent": 1.0,
    "tower_tflops": 100.0,
    "loader_samples_per_s_and_rank": 1.7e6,
    "dollars_per_gpu_hour": 2.5,
    "checkpoint_write_gb_per_s_and_host": 2.0,
    "checkpoint_hash_gb_per_s_and_host": 5.0,
}
SIZES: dict[str, dict[str, Any]] = {
    "10 M items, 1 GPU": {"items": 10**7, "users": 0, "nodes": 1, "processes": 1, "examples": 10**9},
    "1 B rows, 2 x 8 GPUs": {"items": 10**8, "users": 9 * 10**8, "nodes": 2, "processes": 8, "examples": 2 * 10**10},
    "20 B rows, 32 x 8 GPUs": {"items": 10**9, "users": 19 * 10**9, "nodes": 32, "processes": 8, "examples": 2 * 10**11},
}
LARGEST = "20 B rows, 32 x 8 GPUs"


def spec_of(model_size: dict[str, Any], *, has_pooled_users: bool, optimizer: str = "rowwise_adagrad") -> ModelSpec:
    """Return the model of one size. `has_pooled_users` sets tables.user.lookup to `pooled`."""
    config = TwoTowerConfig(embedding_dim=ASSUMPTIONS["dim"], learn_user_embedding=model_size["users"] > 0)
    tables = {"user": TableConfig(lookup="pooled")} if has_pooled_users and config.learn_user_embedding else {}
    return ModelSpec.sized(
        config,
        num_users=model_size["users"],
        num_items=model_size["items"],
        tables=tables,
        optimizer=TableOptimizer(kind=optimizer),
    )


def plan_model_size(
    model_size: dict[str, Any], *, optimizer: str = "rowwise_adagrad", has_pooled_users: bool = False
) -> PlanFile:
    """Return the planner's plan for one size."""
    batch_size, num_draws = ASSUMPTIONS["batch_size"], ASSUMPTIONS["batch_size"] * (1 + ASSUMPTIONS["history"])
    num_distinct = num_distinct_items(
        model_size["items"], num_draws=num_draws, num_negatives=ASSUMPTIONS["negatives"], exponent=ASSUMPTIONS["zipf_exponent"]
    )
    cluster = ClusterConfig(device="cuda", num_nodes=model_size["nodes"], processes_per_node=model_size["processes"], **HOST)
    return make_plan(
        ShardingConfig(cluster=cluster),
        model=spec_of(model_size, optimizer=optimizer, has_pooled_users=has_pooled_users),
        batch_size=batch_size,
        lookup_stats=LookupStats(values_per_query={"item": num_distinct / batch_size, "user": 1.0}, hot_row_curve={}),
    )


def sent_bytes(plan_file: PlanFile, *, unpooled_tables: set[str], bytes_per_number: int) -> dict[str, float]:
    """Return the bytes of rows and gradients that the busiest rank sends per step, in total and between hosts."""
    num_ranks, ranks_per_host, batch_size = plan_file.world_size, plan_file.processes_per_node, plan_file.batch_size
    total_bytes = between_hosts_bytes = 0.0
    for name, table in plan_file.tables.items():
        row_bytes = table.dim * bytes_per_number
        if name in unpooled_tables and table.sharding_type == "row_wise":
            batch_bytes = table.values_per_query * batch_size * row_bytes
            total_bytes += batch_bytes * (num_ranks - 1) / num_ranks
            between_hosts_bytes += batch_bytes * (num_ranks - ranks_per_host) / num_ranks
        elif table.sharding_type == "row_wise":  # each rank sends a partial sum for every query; most are zeros
            total_bytes += (num_ranks - 1) * batch_size * row_bytes
            between_hosts_bytes += (num_ranks - ranks_per_host) * batch_size * row_bytes
        elif table.sharding_type == "table_row_wise":  # partial sums are added within the host, and then sent to other hosts
            reduced_bytes = num_ranks * batch_size * row_bytes / ranks_per_host
            other_host_bytes = reduced_bytes * (plan_file.num_nodes - 1) / plan_file.num_nodes
            total_bytes += (ranks_per_host - 1) * reduced_bytes + other_host_bytes
            between_hosts_bytes += other_host_bytes
        else:  # table_wise: the rank with the table sends rows to all other ranks
            batch_bytes = table.values_per_query * batch_size * row_bytes
            total_bytes += (num_ranks - 1) * batch_bytes
            between_hosts_bytes += (num_ranks - ranks_per_host) * batch_bytes
    return {"sent": 2 * total_bytes, "between_hosts": 2 * between_hosts_bytes}  # rows forward, gradients backward


def measure(model_size: dict[str, Any], *, has_pooled_users: bool = False) -> dict[str, Any]:
    """Return all estimates for one size."""
    start_s = time.perf_counter()
    plan_file = plan_model_size(model_size, has_pooled_users=has_pooled_users)
    plan_s = time.perf_counter() - start_s
    unpooled_tables = {
        name for name, table in spec_of(model_size, has_pooled_users=has_pooled_users).tables.items() if table.is_unpooled
    }
    fullest_rank = max(plan_file.ranks, key=lambda rank: rank.hbm_bytes)
    num_candidates = ASSUMPTIONS["batch_size"] + ASSUMPTIONS["negatives"]
    towers_ms = 6 * ASSUMPTIONS["batch_size"] * num_candidates * ASSUMPTIONS["dim"] / ASSUMPTIONS["tower_tflops"] / 1e9
    comms_ms = max(rank.forward_comms_ms + rank.backward_comms_ms for rank in plan_file.ranks)
    loader_ms = 1000 * ASSUMPTIONS["batch_size"] / ASSUMPTIONS["loader_samples_per_s_and_rank"]
    step_ms = max(plan_file.step_ms + towers_ms, loader_ms)
    num_steps = math.ceil(model_size["examples"] / ASSUMPTIONS["batch_size"] / plan_file.world_size)
    hours = num_steps * step_ms / 3.6e6
    weight_bytes = sum(sum(table.weights for table in rank.tables.values()) for rank in plan_file.ranks)
    optimizer_bytes = sum(sum(table.optimizer for table in rank.tables.values()) for rank in plan_file.ranks)
    return {
        "tables": {
            name: {
                "rows": table.rows,
                "sharding": table.sharding_type,
                "kernel": table.compute_kernel,
                "values_per_query": table.values_per_query,
            }
            for name, table in plan_file.tables.items()
        },
        "gpus": plan_file.world_size,
        "weights_bytes": weight_bytes,
        "optimizer_bytes": optimizer_bytes,
        "rank_hbm_bytes": fullest_rank.hbm_bytes,
        "rank_ddr_bytes": max(rank.ddr_bytes for rank in plan_file.ranks),
        "rank_buffer_bytes": sum(table.buffers for table in fullest_rank.tables.values()),
        "usable_hbm_bytes": plan_file.usable_hbm_bytes,
        "fp32": sent_bytes(plan_file, unpooled_tables=unpooled_tables, bytes_per_number=4),
        "fp16": sent_bytes(plan_file, unpooled_tables=unpooled_tables, bytes_per_number=2),
        "lookups_ms": plan_file.step_ms,
        "comms_ms": comms_ms,
        "towers_ms": towers_ms,
        "loader_ms": loader_ms,
        "step_ms": step_ms,
        "step_ms_fp16": max(plan_file.step_ms - comms_ms / 2 + towers_ms, loader_ms),
        "examples": model_size["examples"],
        "steps": num_steps,
        "hours": hours,
        "dollars": hours * plan_file.world_size * ASSUMPTIONS["dollars_per_gpu_hour"],
        "checkpoint_write_s": (weight_bytes + optimizer_bytes)
        / 1e9
        / ASSUMPTIONS["checkpoint_write_gb_per_s_and_host"]
        / plan_file.num_nodes,
        "checkpoint_hash_s": (weight_bytes + optimizer_bytes)
        / 1e9
        / ASSUMPTIONS["checkpoint_hash_gb_per_s_and_host"]
        / plan_file.num_nodes,
        "plan_seconds": plan_s,
    }


def compare_optimizers() -> dict[str, Any]:
    """Return the memory of one GPU for the largest size with other optimizers, or the planner's error."""
    results: dict[str, Any] = {}
    for kind in ("sgd", "rowwise_adagrad", "adagrad", "adam"):
        try:
            plan_file = plan_model_size(SIZES[LARGEST], optimizer=kind)
        except InputError as error:
            results[kind] = {"infeasible": str(error)}
            continue
        fullest_rank = max(plan_file.ranks, key=lambda rank: rank.hbm_bytes)
        kernels = sorted({table.compute_kernel for table in plan_file.tables.values()})
        results[kind] = {
            "rank_hbm_bytes": fullest_rank.hbm_bytes,
            "rank_ddr_bytes": fullest_rank.ddr_bytes,
            "lookups_ms": plan_file.step_ms,
            "kernels": kernels,
        }
    return results


def to_markdown(result: dict[str, Any]) -> str:
    """Return the tables of docs/scale.md."""
    sizes = result["sizes"]

    def line(label: str, cell: Any) -> str:
        return f"| {label} | " + " | ".join(cell(size) for size in sizes.values()) + " |"

    lines = ["| | " + " | ".join(sizes) + " |", "|:---|" + "---:|" * len(sizes)]
    for table in ("item", "user"):
        lines.append(
            line(
                f"table {table}",
                lambda size, table=table: (
                    "{rows:,} rows, {sharding}, {kernel}".format(**size["tables"][table]) if table in size["tables"] else "-"
                ),
            )
        )
    lines += [
        line(
            "distinct items in the batch of a GPU",
            lambda size: f"{size['tables']['item']['values_per_query'] * 8192:,.0f}",
        ),
        line("all weights, GB", lambda size: f"{size['weights_bytes'] / 1e9:,.1f}"),
        line("optimizer state (row-wise Adagrad), GB", lambda size: f"{size['optimizer_bytes'] / 1e9:,.2f}"),
        line(
            "memory of the fullest GPU: used and usable GB",
            lambda size: f"{size['rank_hbm_bytes'] / 1e9:.1f} of {size['usable_hbm_bytes'] / 1e9:.1f}",
        ),
        line(
            "part of the used memory for the buffers of a step, GB",
            lambda size: f"{size['rank_buffer_bytes'] / 1e9:.2f}",
        ),
        line("data that the busiest GPU sends per step, MB", lambda size: f"{size['fp32']['sent'] / 1e6:,.1f}"),
        line("part that is sent to other hosts, MB", lambda size: f"{size['fp32']['between_hosts'] / 1e6:,.1f}"),
        line("data that the busiest GPU sends with fp16 communication, MB", lambda size: f"{size['fp16']['sent'] / 1e6:,.1f}"),
        line("time of the lookups (planner's estimate), ms", lambda size: f"{size['lookups_ms']:.2f}"),
        line("part of this time that is communication, ms", lambda size: f"{size['comms_ms']:.2f}"),
        line("time of the towers and scores, ms", lambda size: f"{size['towers_ms']:.2f}"),
        line("time of the loader for a batch, ms", lambda size: f"{size['loader_ms']:.2f}"),
        line("**time of a step, ms**", lambda size: f"**{size['step_ms']:.2f}**"),
        line("time of a step with fp16 communication, ms", lambda size: f"{size['step_ms_fp16']:.2f}"),
        line("training examples of an epoch", lambda size: f"{size['examples']:,}"),
        line("steps of an epoch", lambda size: f"{size['steps']:,}"),
        line("**hours of an epoch**", lambda size: f"**{size['hours']:.2f}**"),
        line(
            "**dollars of an epoch**",
            lambda size: f"**{size['dollars']:,.{1 if size['dollars'] < 10 else 0}f}**",
        ),
        line("time to write a checkpoint, s", lambda size: f"{size['checkpoint_write_s']:,.0f}"),
        line("time to hash a checkpoint on all hosts, s", lambda size: f"{size['checkpoint_hash_s']:,.0f}"),
        line("measured time of the planner, s", lambda size: f"{size['plan_seconds']:.1f}"),
    ]
    lines += [
        "",
        f"The next table compares optimizers for {LARGEST.split(',')[0]}:",
        "",
        "| optimizer | memory per GPU, kernels, time of the lookups |",
        "|:---|:---|",
    ]
    for kind, estimate in result["optimizers"].items():
        if "infeasible" in estimate:
            cell = estimate["infeasible"].split("input): ")[1]
        else:
            hbm, ddr = estimate["rank_hbm_bytes"] / 1e9, estimate["rank_ddr_bytes"] / 1e9
            cell = (
                f"{hbm:.1f} GB of HBM and {ddr:.1f} GB of main memory per GPU, kernels {', '.join(estimate['kernels'])}, "
                f"lookups {estimate['lookups_ms']:,.1f} ms"
            )
        lines.append(f"| {kind} | {cell} |")
    pooled_result = result["pooled_users"]
    lines += [
        "",
        f"With pooled user lookups (`tables.user.lookup: pooled`), a GPU sends {pooled_result['fp32']['sent'] / 1e6:,.1f} MB "
        f"per step. Lookups take {pooled_result['lookups_ms']:.2f} ms, a step",
        f"{pooled_result['step_ms']:.2f} ms, and an epoch {pooled_result['hours']:.2f} hours and "
        f"{pooled_result['dollars']:,.0f} dollars.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Plan all sizes, and write scale.json and the tables of docs/scale.md."""
    result = {
        "versions": {name: version for name, version in installed_versions().items() if name in ("torch", "torchrec")},
        "assumed": ASSUMPTIONS | {"host": HOST},
        "sizes": {name: measure(model_size) for name, model_size in SIZES.items()},
        "optimizers": compare_optimizers(),
        "pooled_users": measure(SIZES[LARGEST], has_pooled_users=True),
    }
    RESULT_PATH.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    page = PAGE_PATH.read_text(encoding="utf-8")
    before, after = page[: page.index(BEGIN_MARK) + len(BEGIN_MARK)], page[page.index(END_MARK) :]
    PAGE_PATH.write_text(f"{before}\n{to_markdown(result)}\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
