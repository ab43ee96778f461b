"""Validation during training: the users that are validated, their candidates and metrics, and heartbeats."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from recsys_core.dataset.batch import Assembler
from recsys_core.dataset.events import EventStore
from recsys_core.errors import InputError
from recsys_core.evaluation.metrics import TargetPositions
from recsys_core.manifests import Dataset, InteractionsManifest
from recsys_core.models.config import TowerConfig, TwoTowerConfig
from recsys_core.models.history_config import MeanHistory
from recsys_core.models.loss.loss_config import LossConfig
from recsys_core.models.spec import ModelSpec
from recsys_core.models.task import RetrievalHead, RetrievalTask
from recsys_core.training.config import ValidationConfig
from recsys_core.training.export import encoding
from recsys_core.training.export.encoding import Encoder
from recsys_core.training.validation import Validator, users_to_validate
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.evaluation.stage_folders import write_interactions_stage

NUM_ITEMS, NUM_NEW_USERS = 40, 30


def test_users_without_history_are_validated_with_popular_items(tmp_path: Path) -> None:
    run_ranks(_validate_new_users, world_size=1, arguments=(tmp_path,))


def _validate_new_users(rank: int, folder: Path) -> None:
    """Assert that users without history have the popular item first, whatever the random weights are."""
    interactions = _log_with_new_users(folder)
    for seed in range(3):
        validator = _validator_of(interactions, rank, folder, seed=seed)
        assert validator.measure() == {"recall@1": 1.0, "ndcg@1": 1.0, "hit_rate@1": 1.0}
        assert validator._encoder.task.training  # the training continues with dropout


def _log_with_new_users(folder: Path) -> InteractionsManifest:
    # 39 users have all items but one before the split. The new users have none, and item 0, the most popular item, after it.
    items_of_old_users = [[item for item in range(NUM_ITEMS) if item != missing_item] for missing_item in range(1, NUM_ITEMS)]
    num_old_users = len(items_of_old_users)
    return write_interactions_stage(
        folder / "interactions",
        train=[*items_of_old_users, *[[]] * NUM_NEW_USERS],
        validation=[*[[]] * num_old_users, *[[0]] * NUM_NEW_USERS],
        test=[[]] * (num_old_users + NUM_NEW_USERS),
        num_items=NUM_ITEMS,
    )


def _validator_of(
    interactions: InteractionsManifest, rank: int, folder: Path, *, seed: int, candidates: Literal["all", "cold"] = "all"
) -> Validator:
    """Return the validator of a model with random weights."""
    config = TwoTowerConfig(embedding_dim=8, history=MeanHistory(length=5), query=TowerConfig(layers=(8,)))
    spec = ModelSpec.of(config, dataset=Dataset(interactions))
    store, device = EventStore.open(interactions), torch.device("cpu")
    torch.manual_seed(seed)
    head = RetrievalHead(
        spec, loss=LossConfig(), item_count_I=store.train_count_I, popularity_rank={}, weight_decay={}, group=None
    )
    task = RetrievalTask(head, device=device)
    task.embedding_tables.to_empty(device=device)
    for parameter in task.embedding_tables.parameters():
        torch.nn.init.normal_(parameter)
    encoder = Encoder(task, store, Assembler(user_batch_key=spec.user_batch_key, features=None), cpu_process(rank))
    return Validator(
        ValidationConfig(k=1, candidates=candidates),
        encoder=encoder,
        interactions=interactions,
        work_folder=folder,
        heartbeat_path=folder / "heartbeat",
    )


def test_with_cold_candidates_only_items_without_a_training_event_are_ranked(tmp_path: Path) -> None:
    run_ranks(_validate_cold_items, world_size=1, arguments=(tmp_path,))


def _validate_cold_items(rank: int, folder: Path) -> None:
    """Assert that the only cold item is always first, whatever the random weights are."""
    cold_item = NUM_ITEMS - 1
    interactions = write_interactions_stage(
        folder / "interactions",
        train=[[user % cold_item, (user + 1) % cold_item] for user in range(NUM_ITEMS)],
        validation=[[cold_item]] * NUM_ITEMS,
        test=[[]] * NUM_ITEMS,
        num_items=NUM_ITEMS,
    )
    cold_validator = _validator_of(interactions, rank, folder, seed=0, candidates="cold")
    assert cold_validator.measure()["recall@1"] == 1
    assert _validator_of(interactions, rank, folder, seed=0).measure()["recall@1"] < 1


def test_each_batch_of_validated_users_sends_a_heartbeat(tmp_path: Path) -> None:
    run_ranks(_validate_in_batches, world_size=1, arguments=(tmp_path,))


def _validate_in_batches(rank: int, folder: Path) -> None:
    """Assert that a heartbeat is sent in each of three batches and after the last, and that dropout is off in each batch."""
    validator = _validator_of(_log_with_new_users(folder), rank, folder, seed=0)
    heartbeat_path, target_positions, was_sent_by_batch = folder / "heartbeat", validator._target_positions, []

    def check_heartbeat_and_return_positions(*arguments: Any, **options: Any) -> TargetPositions:
        was_sent_by_batch.append(heartbeat_path.exists())
        assert not validator._encoder.task.training
        heartbeat_path.unlink(missing_ok=True)
        return target_positions(*arguments, **options)

    validator._target_positions = check_heartbeat_and_return_positions  # type: ignore[method-assign]
    encoding.ENCODE_BATCH_ROWS = NUM_NEW_USERS // 3
    validator.measure()
    assert was_sent_by_batch == [True] * 3 and heartbeat_path.exists()


@pytest.mark.parametrize(
    ("validation_items", "validated_users"), [([[0], [2]], []), ([[0, 1], [2]], [0])], ids=["all seen", "one unseen"]
)
def test_users_who_had_seen_all_their_validation_items_are_not_validated(
    tmp_path: Path, validation_items: list[list[int]], validated_users: list[int]
) -> None:
    interactions = write_interactions_stage(
        tmp_path / "stage", train=[[0], [1, 2]], validation=validation_items, test=[[], []], num_items=3
    )
    users = users_to_validate(ValidationConfig(), store=EventStore.open(interactions), cold_items=None)
    assert users.tolist() == validated_users


def test_cold_candidates_need_a_validation_event_of_a_cold_item(tmp_path: Path) -> None:
    config = ValidationConfig(candidates="cold")
    interactions = write_interactions_stage(
        tmp_path / "stage", train=[[0], [1], [0, 1]], validation=[[2], [0], [1, 2]], test=[[], [], []], num_items=3
    )
    store = EventStore.open(interactions)
    assert users_to_validate(config, store=store, cold_items=np.array([2])).tolist() == [0, 2]
    with pytest.raises(InputError, match="candidates is cold, but every validation event has an item with training events"):
        users_to_validate(config, store=store, cold_items=np.array([], np.int64))


def test_a_sample_of_the_validation_users_is_ascending_and_always_the_same(tmp_path: Path) -> None:
    interactions = write_interactions_stage(
        tmp_path / "stage", train=[[0]] * 100, validation=[[1]] * 100, test=[[]] * 100, num_items=2
    )
    sample, repeated_sample = (
        users_to_validate(ValidationConfig(max_users=60), store=EventStore.open(interactions), cold_items=None).tolist()
        for _ in range(2)
    )
    assert sample == repeated_sample == sorted({*sample}) and len(sample) == 60
    all_users = users_to_validate(ValidationConfig(max_users=100), store=EventStore.open(interactions), cold_items=None)
    assert all_users.tolist() == list(range(100))
