"""Item vectors of the candidate model, compared with the trained task, and vectors of unseen items.

Shapes: I items, V items of a batch, D width of a vector.
"""

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

FEATURE_KEYS = ("item.single", "item.list", "item.weighted_list", "item.number")
FEATURE_STORE = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=1)
LAYERS = {"candidate": {"layers": [6, 4], "layer_norm": True, "skip_connection": True}}


def model_of(task: RetrievalTask) -> CandidateModel:
    weight_by_table = {
        table_name: weight_of(task, table_name).detach().numpy() for table_name in task.head.spec.features("item")
    }
    return CandidateModel.of(task.head.spec, tables=weight_by_table, dense=task.head.state_dict())


@pytest.mark.parametrize(
    ("model_settings", "settings_by_table"),
    [
        ({}, {}),
        ({**LAYERS, "similarity": "dot"}, {"item": {"rescale": False}}),
        ({**LAYERS, "history": {"item_representation": "candidate_tower"}}, {"item": {"transfer": "frozen"}}),
        (
            {"candidate": {"layers": [4], "skip_connection": True}},
            {"item": {"transfer": "residual"}, "item.list": {"pooling": "sum"}},
        ),
        ({**LAYERS, "num_members": 2, "history": {"item_representation": "candidate_tower"}}, {}),
    ],
    ids=["default", "layers", "history of candidate vectors", "residual", "ensemble"],
)
def test_the_model_computes_the_item_vectors_of_the_trained_task(
    model_settings: dict[str, object], settings_by_table: dict[str, object]
) -> None:
    task = task_of(model_settings, tables=settings_by_table, vector_dims={"item": 8}, features=FEATURE_KEYS).eval()
    spec = task.head.spec
    rng = np.random.default_rng(3)
    vector_ID = rng.normal(size=(NUM_ITEMS, 8)).astype(np.float32)
    for parameter in task.head.item.parameters():
        nn.init.normal_(parameter)  # the last layer is zero before the training
    with torch.no_grad():
        # The model encodes unseen items, so the task's table `item` gets the rows with which a training begins.
        item_settings = spec.tables["item"].settings
        item_weight_ID = torch.from_numpy(vector_ID)
        if item_settings.rescale:
            item_weight_ID = scale_to_norm(item_weight_ID, norm=random_norm(item_settings.init_std, 8))
        weight_of(task, "item").copy_(item_weight_ID.tile(1, spec.config.num_members))
        if item_settings.transfer == "residual":
            weight_of(task, "item_offset").zero_()
        batch = batch_of(list(range(NUM_ITEMS)), features=FEATURE_STORE, users=[0], histories=[[]])
        expected_history_VD, expected_candidate_VD = (vector_VD.numpy() for vector_VD in task.encode_items(batch))
    order_V = np.argsort(batch.item_row_V.numpy())
    history_ID, candidate_ID = model_of(task).encode(vector_ID, FEATURE_STORE, np.arange(NUM_ITEMS))
    np.testing.assert_allclose(history_ID, expected_history_VD[order_V], atol=1e-6)
    np.testing.assert_allclose(candidate_ID, expected_candidate_VD[order_V], atol=1e-6)


def test_an_unseen_item_without_a_pretrained_vector_has_a_table_row_of_zeros() -> None:
    task = task_of({}, features=FEATURE_KEYS).eval()
    with torch.no_grad():
        weight_of(task, "item").zero_()
        batch = batch_of([4, 2], features=FEATURE_STORE, users=[0], histories=[[]])
        _, expected_candidate_VD = task.encode_items(batch)
    _, candidate_VD = model_of(task).encode(None, FEATURE_STORE, batch.item_row_V.numpy())
    np.testing.assert_allclose(candidate_VD, expected_candidate_VD.numpy(), atol=1e-6)


def test_an_unseen_item_has_the_popularity_of_an_item_without_events() -> None:
    task = task_of({"popularity": {"kind": "fixed", "weight": 1}}, features=FEATURE_KEYS).eval()
    batch = batch_of([4, 2], features=FEATURE_STORE, users=[0], histories=[[]])
    _, task_candidate_VD = task.encode_items(batch)  # the last number of a candidate vector is the popularity
    popularity_by_item = dict(zip(batch.item_row_V.tolist(), task_candidate_VD[:, -1].tolist(), strict=True))
    # Item 2 has no event, item 4 has one event, and the most popular item has 9 events.
    assert popularity_by_item == {2: 0, 4: pytest.approx(np.log1p(1) / np.log1p(9))}
    history_VD, candidate_VD = model_of(task).encode(None, FEATURE_STORE, batch.item_row_V.numpy())
    assert (history_VD.shape, candidate_VD.shape) == ((2, 4), (2, 5)) and not candidate_VD[:, -1].any()
    _, candidate_of_no_item_VD = model_of(task).encode(None, FEATURE_STORE, np.zeros(0, np.int64))
    assert candidate_of_no_item_VD.shape == (0, 5)


def test_a_loaded_model_computes_the_same_vectors_bit_by_bit(tmp_path: Path) -> None:
    model = model_of(task_of(LAYERS, features=FEATURE_KEYS))
    model.save(tmp_path / "candidate.safetensors")
    loaded_model = CandidateModel.load(tmp_path / "candidate.safetensors", model.spec)
    history_VD, candidate_VD = model.encode(None, FEATURE_STORE, np.arange(5))
    loaded_history_VD, loaded_candidate_VD = loaded_model.encode(None, FEATURE_STORE, np.arange(5))
    assert np.array_equal(loaded_history_VD, history_VD)
    assert np.array_equal(loaded_candidate_VD, candidate_VD)


def test_without_items_there_are_no_vectors() -> None:
    model = model_of(task_of(LAYERS, features=FEATURE_KEYS))
    history_VD, candidate_VD = model.encode(None, FEATURE_STORE, np.zeros(0, np.int64))
    assert (history_VD.shape, candidate_VD.shape) == ((0, 4), (0, 4))
