"""The error of a cluster without a feasible plan, and plans with the changes that it suggests."""

import re

import pytest

from recsys_core.errors import InputError
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.tables.table_config import TableOptimizer
from recsys_core.sharding.config import ClusterConfig, ShardingConfig, TableConstraint
from recsys_core.sharding.planner import make_plan
from tests.recsys_core.training.small_model import with_optimizer

HUGE_MODEL = ModelSpec.sized(TwoTowerConfig(learn_user_embedding=True, embedding_dim=128), num_users=10**9, num_items=10**7)


def message_of(config: ShardingConfig, model: ModelSpec = HUGE_MODEL) -> str:
    """Return the message of the InputError that `make_plan` raises."""
    with pytest.raises(InputError) as error_info:
        make_plan(config, model=model, batch_size=1024)
    return str(error_info.value)


def suggested_value(message: str, setting_name: str) -> int:
    """Return the value that the message suggests for a setting of sharding.cluster."""
    match = re.search(rf"sharding.cluster.{setting_name}: (\d+)", message)
    assert match, message
    return int(match[1])


def cluster(**changed_settings) -> ClusterConfig:
    """Return a host with two GPUs of 80 GB and 16 GB of main memory, apart from `changed_settings`."""
    return ClusterConfig(**({"device": "cuda", "processes_per_node": 2, "hbm_gb": 80, "ddr_gb": 16} | changed_settings))


def test_the_error_about_too_few_gpus_has_the_missing_bytes_and_possible_changes():
    message = message_of(ShardingConfig(cluster=cluster()))
    match = re.search(
        r"table user needs ([\d,]+) bytes of HBM on one rank \(row_wise\), but ([\d,]+) are usable: ([\d,]+) by", message
    )
    assert match, message
    needed_bytes, usable_bytes, missing_bytes = (int(number.replace(",", "")) for number in match.groups())
    assert needed_bytes > 10**9 // 2 * 128 * 4  # each of the 2 ranks has the rows of half of the users
    assert usable_bytes == int(80 * 2**30 * 0.85)  # 15 % are reserved
    assert missing_bytes == needed_bytes - usable_bytes
    ddr_gb = suggested_value(message, "ddr_gb")
    assert suggested_value(message, "processes_per_node") == 8
    assert make_plan(ShardingConfig(cluster=cluster(ddr_gb=ddr_gb)), model=HUGE_MODEL, batch_size=1024)
    assert make_plan(ShardingConfig(cluster=cluster(processes_per_node=8)), model=HUGE_MODEL, batch_size=1024)


def test_more_hosts_are_suggested_if_the_gpus_of_one_host_are_not_enough():
    config = TwoTowerConfig(learn_user_embedding=True, embedding_dim=128)
    large_model = ModelSpec.sized(config, num_users=4 * 10**9, num_items=10**7)
    message = message_of(ShardingConfig(cluster=cluster()), large_model)
    assert "with processes_per_node 8" in message
    num_nodes = suggested_value(message, "num_nodes")
    suggested_cluster = cluster(num_nodes=num_nodes, processes_per_node=8)
    assert make_plan(ShardingConfig(cluster=suggested_cluster), model=large_model, batch_size=1024)
    smaller_cluster = cluster(num_nodes=num_nodes - 1, processes_per_node=8)
    message_of(ShardingConfig(cluster=smaller_cluster), large_model)  # one host fewer has no feasible plan


def test_the_error_names_a_constraint_that_prevents_a_plan():
    large_cluster = cluster(num_nodes=2, processes_per_node=8, ddr_gb=2000)
    table_wise_constraint = TableConstraint(sharding_types=("table_wise",), compute_kernels=("fused",))
    table_wise_message = message_of(ShardingConfig(cluster=large_cluster, tables={"user": table_wise_constraint}))
    assert "table user needs" in table_wise_message and "bytes short per rank" in table_wise_message
    assert "sharding.tables.user.sharding_types removed" in table_wise_message
    hbm_constraint = TableConstraint(compute_kernels=("fused",))
    hbm_message = message_of(ShardingConfig(cluster=cluster(ddr_gb=2000), tables={"user": hbm_constraint}))
    assert "sharding.tables.user.compute_kernels: [fused, fused_uvm_caching], which uses main memory" in hbm_message
    plan = make_plan(ShardingConfig(cluster=cluster(ddr_gb=2000)), model=HUGE_MODEL, batch_size=1024)
    assert plan.tables["user"].compute_kernel in ("fused_uvm", "fused_uvm_caching")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_change_that_violates_another_constraint_is_not_suggested(device):
    model = ModelSpec.sized(TwoTowerConfig(embedding_dim=128), num_users=1, num_items=10**7)
    replicated_constraint = TableConstraint(sharding_types=("data_parallel",), compute_kernels=("dense",))
    small_cluster = cluster(device=device, hbm_gb=4, ddr_gb=8)
    message = message_of(ShardingConfig(cluster=small_cluster, tables={"item": replicated_constraint}), model)
    assert "a plan exists with sharding.tables.item.sharding_types and compute_kernels removed" in message
    assert message.count("sharding.tables") == 1
    assert make_plan(ShardingConfig(cluster=small_cluster), model=model, batch_size=1024)


def test_the_optimizer_state_has_to_fit_too():
    config = ShardingConfig(cluster=cluster(num_nodes=2, processes_per_node=8))
    assert make_plan(config, model=HUGE_MODEL, batch_size=1024)
    message = message_of(config, with_optimizer(HUGE_MODEL, TableOptimizer(kind="adam")))
    assert "table user needs" in message or "table user is the largest" in message


@pytest.mark.parametrize(
    "memory_settings", [{"device": "cpu", "ddr_gb": 1e-9}, {"device": "cuda", "hbm_gb": 1e-9}], ids=["cpu", "cuda"]
)
def test_a_usable_memory_of_less_than_a_byte_is_reported(memory_settings):
    model = ModelSpec.sized(TwoTowerConfig(embedding_dim=64), num_users=1, num_items=10**6)
    message = message_of(ShardingConfig(cluster=cluster(**memory_settings)), model)
    assert "table item needs" in message and "but 0 are usable" in message


def test_too_little_main_memory_on_a_cpu_is_reported():
    model = ModelSpec.sized(TwoTowerConfig(embedding_dim=64), num_users=1, num_items=10**8)
    message = message_of(ShardingConfig(cluster=ClusterConfig(device="cpu", ddr_gb=8)), model)
    assert "of main memory" in message
    suggested_cluster = ClusterConfig(device="cpu", ddr_gb=suggested_value(message, "ddr_gb"))
    assert make_plan(ShardingConfig(cluster=suggested_cluster), model=model, batch_size=1024)
