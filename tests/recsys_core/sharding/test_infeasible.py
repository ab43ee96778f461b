"""The error of a cluster without a feasible plan, and proof that the changes it suggests help."""

import re

import pytest

from recsys_core.errors import InputError
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import TableOptimizer
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.planner import make_plan
from tests.recsys_core.training.small_model import with_optimizer

HUGE = ModelSpec.sized(TwoTowerConfig(learn_user_embedding=True, embedding_dim=128), num_users=10**9, num_items=10**7)


def message_of(config: ShardingConfig, model: ModelSpec = HUGE) -> str:
    with pytest.raises(InputError) as caught:
        make_plan(config, model=model, batch_size=1024)
    return str(caught.value)


def cluster(**changes) -> ClusterConfig:
    return ClusterConfig(**({"device": "cuda", "processes_per_node": 2, "hbm_gb": 80, "ddr_gb": 16} | changes))


def test_too_few_gpus_are_reported_with_the_table_the_bytes_and_numbers_that_fit():
    message = message_of(ShardingConfig(cluster=cluster()))
    match = re.search(
        r"table user needs ([\d,]+) bytes of HBM on one rank \(row_wise\), but ([\d,]+) are usable: ([\d,]+) by", message
    )
    assert match, message
    need, usable, short = (int(number.replace(",", "")) for number in match.groups())
    assert need > 5 * 10**8 * 128 * 4 and usable == int(80 * 2**30 * 0.85) and short == need - usable
    ddr_gb = re.search(r"sharding.cluster.ddr_gb: (\d+)", message)
    gpus = re.search(r"sharding.cluster.processes_per_node: (\d+)", message)
    assert ddr_gb and gpus and int(gpus[1]) == 8
    assert make_plan(ShardingConfig(cluster=cluster(ddr_gb=float(ddr_gb[1]))), model=HUGE, batch_size=1024)
    assert make_plan(ShardingConfig(cluster=cluster(processes_per_node=8)), model=HUGE, batch_size=1024)


def test_more_hosts_are_suggested_if_one_does_not_have_enough_gpus():
    config = TwoTowerConfig(learn_user_embedding=True, embedding_dim=128)
    large_model = ModelSpec.sized(config, num_users=4 * 10**9, num_items=10**7)
    message = message_of(ShardingConfig(cluster=cluster()), large_model)
    nodes = re.search(r"sharding.cluster.num_nodes: (\d+) with processes_per_node 8", message)
    assert nodes, message
    suggested_cluster = cluster(num_nodes=int(nodes[1]), processes_per_node=8)
    assert make_plan(ShardingConfig(cluster=suggested_cluster), model=large_model, batch_size=1024)
    smaller_cluster = cluster(num_nodes=int(nodes[1]) - 1, processes_per_node=8)
    message_of(ShardingConfig(cluster=smaller_cluster), large_model)


def test_the_error_names_a_constraint_that_prevents_a_plan():
    roomy = cluster(num_nodes=2, processes_per_node=8, ddr_gb=2000)
    table_wise = TableConstraint(sharding_types=("table_wise",), compute_kernels=("fused",))
    message = message_of(ShardingConfig(cluster=roomy, tables={"user": table_wise}))
    assert "table user needs" in message and "bytes short per rank" in message
    assert "sharding.tables.user.sharding_types removed" in message
    resident = TableConstraint(compute_kernels=("fused",))
    message = message_of(ShardingConfig(cluster=cluster(ddr_gb=2000), tables={"user": resident}))
    assert "sharding.tables.user.compute_kernels: [fused, fused_uvm_caching], which uses main memory" in message
    assert make_plan(ShardingConfig(cluster=cluster(ddr_gb=2000)), model=HUGE, batch_size=1024).tables[
        "user"
    ].compute_kernel in (
        "fused_uvm",
        "fused_uvm_caching",
    )


def test_optimizer_state_is_part_of_what_has_to_fit():
    sizes = ShardingConfig(cluster=cluster(num_nodes=2, processes_per_node=8))
    assert make_plan(sizes, model=HUGE, batch_size=1024)
    message = message_of(sizes, with_optimizer(HUGE, TableOptimizer(kind="adam")))
    assert "table user needs" in message or "table user is the largest" in message


def test_too_little_main_memory_on_a_cpu_is_reported():
    model = ModelSpec.sized(TwoTowerConfig(embedding_dim=64), num_users=1, num_items=10**8)
    message = message_of(ShardingConfig(cluster=ClusterConfig(device="cpu", ddr_gb=8)), model)
    ddr_gb = re.search(r"sharding.cluster.ddr_gb: (\d+)", message)
    assert "of main memory" in message and ddr_gb, message
    assert make_plan(ShardingConfig(cluster=ClusterConfig(device="cpu", ddr_gb=float(ddr_gb[1]))), model=model, batch_size=1024)
