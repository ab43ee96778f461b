"""Sharding plans and sizes for data that do not exist yet."""

from pathlib import Path

import pytest

from flows.settings.config_file import load_config
from flows.settings.workload import data_of_sizes, plan_for_sizes, workload_of
from recsys_core.estimates.workload import Machines

NUM_ITEMS, BATCH_SIZE = 10_000, 100


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_with_all_negatives_a_rank_looks_up_its_share_of_the_catalogue(tmp_path: Path, num_ranks: int) -> None:
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(
        "interactions: {paths: log.parquet, timestamp_column: t}\nloss: {negatives: all}\n"
        "model: {learn_user_embedding: true, history: {length: 0, last_item_feature: false}}\n"
        f"training: {{batch_size: {BATCH_SIZE}}}\nsharding: {{cluster: {{device: cpu, processes_per_node: {num_ranks}}}}}\n"
    )
    config = load_config(config_path)
    plan = plan_for_sizes(config, data_of_sizes(config, num_users=1_000, num_items=NUM_ITEMS, num_events=100_000))
    num_items_per_rank = NUM_ITEMS / num_ranks
    assert num_items_per_rank <= plan.tables["item"].values_per_query * BATCH_SIZE <= num_items_per_rank + BATCH_SIZE


def test_the_disk_estimate_counts_a_new_checkpoint_next_to_the_old_checkpoints(tmp_path: Path) -> None:
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(
        "interactions: {paths: log.parquet, timestamp_column: t}\n"
        "training: {batch_size: 100, epochs: 1, checkpoint_every_steps: 10, keep_checkpoints: 2, validation: {}}\n"
        "sharding: {cluster: {device: cpu, processes_per_node: 1}}\n"
    )
    config = load_config(config_path)
    for num_steps, num_checkpoints in ((5, 1), (30, 3), (1_000, 4)):
        data_sizes = data_of_sizes(config, num_users=1_000, num_items=NUM_ITEMS, num_events=100 * num_steps)
        machines = Machines(device="cpu", num_hosts=1, ranks_per_host=1, cores_per_host=2)
        workload = workload_of(config, data_sizes, plan=plan_for_sizes(config, data_sizes), machines=machines)
        assert workload.training.num_kept_checkpoints == num_checkpoints, num_steps
