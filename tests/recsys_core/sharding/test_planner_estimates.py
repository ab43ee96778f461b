"""Estimates of memory and time in plan.json, and the reason for each table's sharding type."""

import pytest

from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import TableConfig, TableOptimizer
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.lookup_stats import LookupStats
from recsys_core.sharding.plan_file import PlanFile, to_html
from recsys_core.sharding.planner import make_plan
from tests.recsys_core.training.small_model import with_optimizer

MODEL = ModelSpec.sized(
    TwoTowerConfig(learn_user_embedding=True, embedding_dim=128),
    num_users=10**9,
    num_items=10**7,
    tables={"user": TableConfig(lookup="pooled")},
)


def plan_for(*, tables: dict | None = None, optimizer_kind: str = "rowwise_adagrad", **cluster_settings) -> PlanFile:
    cluster = ClusterConfig(**({"device": "cuda", "num_nodes": 2, "processes_per_node": 8, "ddr_gb": 1000} | cluster_settings))
    return make_plan(
        ShardingConfig(cluster=cluster, tables=tables or {}),
        model=with_optimizer(MODEL, TableOptimizer(kind=optimizer_kind)),
        batch_size=1024,
    )


OPTIMIZER_STATE_BYTES_BY_KIND = {
    "sgd": 0,
    "rowwise_adagrad": 10**7 * 4,
    "adagrad": 10**7 * 128 * 4,
    "adam": 2 * 10**7 * 128 * 4,
}
"""Size of the optimizer state of the item table, which has 10^7 rows of 128 float32 values."""


@pytest.mark.parametrize("optimizer_kind", OPTIMIZER_STATE_BYTES_BY_KIND)
@pytest.mark.parametrize("kernel", ["fused", "fused_uvm", "fused_uvm_caching"])
def test_the_parts_of_a_ranks_memory_add_up_to_the_memory_that_the_planner_assigns(optimizer_kind: str, kernel: str) -> None:
    constraints = {
        "item": TableConstraint(compute_kernels=(kernel,)),
        "user": TableConstraint(compute_kernels=("fused_uvm",)),
    }
    plan = plan_for(tables=constraints, optimizer_kind=optimizer_kind, ddr_gb=10_000)
    item_memory_by_rank = [rank.tables["item"] for rank in plan.ranks if "item" in rank.tables]
    assert sum(memory.weights for memory in item_memory_by_rank) == 10**7 * 128 * 4
    assert sum(memory.optimizer for memory in item_memory_by_rank) == pytest.approx(
        OPTIMIZER_STATE_BYTES_BY_KIND[optimizer_kind], rel=1e-6
    )
    assert all((memory.cache > 0) == (kernel == "fused_uvm_caching") for memory in item_memory_by_rank)
    assert all(memory.buffers > 0 for memory in item_memory_by_rank)
    for rank in plan.ranks:
        expected_hbm_bytes = sum(memory.cache + memory.buffers for memory in rank.tables.values())
        if kernel == "fused" and "item" in rank.tables:
            expected_hbm_bytes += rank.tables["item"].weights + rank.tables["item"].optimizer
        assert rank.hbm_bytes == pytest.approx(expected_hbm_bytes, abs=8)


def test_the_parts_of_a_ranks_time_add_up() -> None:
    for rank in plan_for().ranks:
        forward_ms = rank.forward_compute_ms + rank.forward_comms_ms
        backward_ms = rank.backward_compute_ms + rank.backward_comms_ms
        assert forward_ms + backward_ms + rank.prefetch_ms == pytest.approx(rank.step_ms)


def test_more_bandwidth_between_hosts_makes_the_step_shorter() -> None:
    assert plan_for(inter_host_gb_s=50.0).step_ms < plan_for(inter_host_gb_s=12.5).step_ms


def test_estimates_depend_on_the_lookups_of_a_batch_and_cache_misses_are_prefetched() -> None:
    constraints = {"item": TableConstraint(compute_kernels=("fused_uvm_caching",))}
    config = ShardingConfig(cluster=ClusterConfig(device="cuda"), tables=constraints)
    model = ModelSpec.sized(TwoTowerConfig(embedding_dim=128), num_users=1, num_items=10**7)

    def step_and_prefetch_ms(values_per_query: float, hot_row_curve: tuple[float, ...]) -> tuple[float, float]:
        lookup_stats = LookupStats(values_per_query={"item": values_per_query}, hot_row_curve={"item": hot_row_curve})
        (rank,) = make_plan(config, model=model, batch_size=1024, lookup_stats=lookup_stats).ranks
        return rank.step_ms, rank.prefetch_ms

    uniform_curve = tuple(percent / 100 for percent in range(1, 101))
    skewed_curve = (*(1 - 0.5 ** (percent / 2) for percent in range(1, 100)), 1.0)  # 2 % of the rows get half of the lookups
    one_value_ms, _ = step_and_prefetch_ms(1.0, uniform_curve)
    two_values_ms, uniform_prefetch_ms = step_and_prefetch_ms(2.0, uniform_curve)
    _, skewed_prefetch_ms = step_and_prefetch_ms(2.0, skewed_curve)
    assert two_values_ms == pytest.approx(2 * one_value_ms, rel=0.02)
    assert uniform_prefetch_ms > 100 * skewed_prefetch_ms > 0


def test_the_html_page_of_a_plan_names_every_table_and_loads_no_other_file() -> None:
    plan = plan_for(tables={"item": TableConstraint(sharding_types=("row_wise",))})
    html = to_html(plan)
    assert all(f"<code>{table_name}</code>" in html for table_name in plan.tables)
    assert "constraint: sharding_types: row_wise" in html
    assert plan.fingerprint[:12] in html
    assert "<script" not in html and "http" not in html.replace("http-equiv", "") and "prefers-color-scheme: dark" in html
