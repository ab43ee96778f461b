"""The candidate model gives the vectors of the trained task, for items that the task has and for unseen ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from recsys_core.models.candidate_model import CandidateModel
from recsys_core.models.tables.initialisation import scale_to_norm
from recsys_core.models.tables.table_config import random_norm
from recsys_core.models.task import RetrievalTask
from tests.recsys_core.ingest.random_features import feature_store
from tests.recsys_core.models.test_task import NUM_ITEMS, NUM_USERS, batch_of, task_of, weight_of

FEATURES = ("item.single", "item.list", "item.weighted_list", "item.number")
STORE = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=1)
TOWER = {"candidate": {"layers": [6, 4], "layer_norm": True, "skip_connection": True}}


def model_of(task: RetrievalTask) -> CandidateModel:
    tables = {name: weight_of(task, name).detach().numpy() for name in task.head.spec.features("item")}
    return CandidateModel.of(task.head.spec, tables=tables, dense=task.head.state_dict())


@pytest.mark.parametrize(
    ("config", "tables"),
    [
        ({}, {}),
        ({**TOWER, "similarity": "dot"}, {"item": {"rescale": False}}),
        ({**TOWER, "history": {"item_representation": "candidate_tower"}}, {"item": {"transfer": "frozen"}}),
        (
            {"candidate": {"layers": [4], "skip_connection": True}},
            {"item": {"transfer": "residual"}, "item.list": {"pooling": "sum"}},
        ),
        ({**TOWER, "num_members": 2, "history": {"item_representation": "candidate_tower"}}, {}),
    ],
    ids=["sum", "layers", "history of candidate vectors", "residual", "ensemble"],
)
def test_items_have_the_vectors_of_the_task_that_has_their_rows(config: dict[str, object], tables: dict[str, object]) -> None:
    task = task_of(config, tables=tables, vector_dims={"item": 8}, features=FEATURES).eval()
    spec = task.head.spec
    random = np.random.default_rng(3)
    vector_ID = random.normal(size=(NUM_ITEMS, 8)).astype(np.float32)
    for parameter in task.head.item.parameters():
        nn.init.normal_(parameter)  # the last layer begins with zeros
    with torch.no_grad():
        # The rows with which a training begins, and from which a cold item does not move.
        settings = spec.tables["item"].settings
        rows = torch.from_numpy(vector_ID)
        rows = scale_to_norm(rows, norm=random_norm(settings.init_std, 8)) if settings.rescale else rows
        weight_of(task, "item").copy_(rows.tile(1, spec.config.num_members))
        if settings.transfer == "residual":
            weight_of(task, "item_offset").zero_()
        batch = batch_of(list(range(NUM_ITEMS)), features=STORE, users=[0], histories=[[]])
        expected = [vectors.numpy() for vectors in task.encode_items(batch)]
    order = np.argsort(batch.item_row_V.numpy())
    vectors = model_of(task).encode(vector_ID, STORE, np.arange(NUM_ITEMS))
    for actual, reference in zip(vectors, expected, strict=True):
        np.testing.assert_allclose(actual, reference[order], atol=1e-6)


def test_without_pretrained_vectors_an_unseen_item_has_a_row_of_zeros() -> None:
    task = task_of({}, features=FEATURES).eval()
    with torch.no_grad():
        weight_of(task, "item").zero_()
        batch = batch_of([4, 2], features=STORE, users=[0], histories=[[]])
        expected = task.encode_items(batch)[1].numpy()
    actual = model_of(task).encode(None, STORE, batch.item_row_V.numpy())[1]
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_an_unseen_item_has_the_popularity_of_an_item_without_events() -> None:
    task = task_of({"popularity": {"kind": "fixed", "weight": 1}}, features=FEATURES).eval()
    batch = batch_of([4, 2], features=STORE, users=[0], histories=[[]])
    popularity_V = task.encode_items(batch)[1][:, -1].tolist()
    assert dict(zip(batch.item_row_V.tolist(), popularity_V, strict=True)) == {2: 0, 4: pytest.approx(np.log(2) / np.log(10))}
    vectors = model_of(task).encode(None, STORE, batch.item_row_V.numpy())
    assert [array.shape for array in vectors] == [(2, 4), (2, 5)] and not vectors[1][:, -1].any()
    assert model_of(task).encode(None, STORE, np.zeros(0, np.int64))[1].shape == (0, 5)


def test_a_saved_model_gives_the_same_vectors_bit_by_bit(tmp_path: Path) -> None:
    model = model_of(task_of(TOWER, features=FEATURES))
    model.save(tmp_path / "candidate.safetensors")
    loaded = CandidateModel.load(tmp_path / "candidate.safetensors", model.spec)
    for vectors, loaded_vectors in zip(
        model.encode(None, STORE, np.arange(5)), loaded.encode(None, STORE, np.arange(5)), strict=True
    ):
        assert np.array_equal(vectors, loaded_vectors)


def test_no_items_have_no_vectors() -> None:
    history_VD, vector_VD = model_of(task_of(TOWER, features=FEATURES)).encode(None, STORE, np.zeros(0, np.int64))
    assert (history_VD.shape, vector_VD.shape) == ((0, 4), (0, 4))
