"""An ensemble: its scores are the mean of those of its members, and its training is that of each member by itself."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.task import RetrievalTask
from tests.recsys_core.ingest.random_features import feature_store
from tests.recsys_core.models.test_task import NUM_ITEMS, NUM_USERS, batch_of, scores, task_of

NUM_MEMBERS = 3
FEATURES = ("user.list", "item.list", "item.number", "context.weighted_list")
_FEATURE_BY_KEY = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_USERS).feature_by_key
STORE = FeatureStore({key: _FEATURE_BY_KEY[key] for key in FEATURES})
SETTINGS: list[dict[str, Any]] = [
    {"config": {}},
    {"config": {"learn_user_embedding": True, "similarity": "dot", "history": {"pooling": "recency"}}, "features": FEATURES},
    {
        "config": {
            "candidate": {"layers": [6]},
            "query": {"layers": [6]},
            "history": {"item_representation": "candidate_tower"},
        },
        "features": FEATURES,
    },
    {"config": {"history": {"pooling": "self_attention"}}},
    {
        "config": {},
        "vector_dims": {"item": 8},
        "tables": {"item": {"transfer": "residual"}},
        "loss": {"distillation": {"weight": 0.5, "temperature": 0.5}},
    },
]
IDS = ["default", "dot product with users and features", "candidate vectors in histories", "self-attention", "residual"]


def ensemble_and_members(settings: dict[str, Any]) -> tuple[RetrievalTask, list[RetrievalTask]]:
    """Return an ensemble, and one model for each member with its part of the parameters. Dropout is off."""
    ensemble = task_of(**{**settings, "config": {**settings["config"], "num_members": NUM_MEMBERS}}).eval()
    with torch.no_grad():
        for parameter in ensemble.head.parameters():
            parameter.normal_()  # the last layers begin with zeros
    state, members = ensemble.state_dict(), []
    for member in range(NUM_MEMBERS):
        task = task_of(**settings).eval()
        task.load_state_dict({name: member_part(state, name, member, tensor) for name, tensor in task.state_dict().items()})
        members.append(task)
    return ensemble, members


def member_part(state: dict[str, Tensor], name: str, member: int, tensor: Tensor) -> Tensor:
    """Return the value in the ensemble's state of a parameter of one member."""
    for tower in ("head.query.", "head.item."):
        if name.startswith(tower):
            return state[f"{tower}members.{member}.{name.removeprefix(tower)}"]
    # The name of a collection has the width of its tables.
    suffix = "." + ".".join(name.split(".")[-3:])
    value = next(value for other_name, value in state.items() if other_name == name or other_name.endswith(suffix))
    return value if value.shape == tensor.shape else value.chunk(NUM_MEMBERS, dim=1)[member]


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_a_score_is_the_mean_of_the_scores_of_the_members(settings: dict[str, Any]) -> None:
    if "features" in settings:
        settings = {**settings, "features": ()}
    ensemble, members = ensemble_and_members(settings)
    expected = torch.stack([scores(member) for member in members]).mean(dim=0)
    torch.testing.assert_close(scores(ensemble), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_a_step_gives_each_member_the_gradient_of_its_own_training(settings: dict[str, Any]) -> None:
    ensemble, members = ensemble_and_members(settings)
    batch = batch_of(features=STORE if "features" in settings else None)
    loss, reported_loss = ensemble(batch)
    loss.backward()
    gradients = {name: torch.zeros_like(parameter) for name, parameter in ensemble.named_parameters()}
    gradients |= {name: parameter.grad for name, parameter in ensemble.named_parameters() if parameter.grad is not None}
    losses = []
    for index, member in enumerate(members):
        member_loss = member(batch)[0]
        member_loss.backward()
        losses.append(member_loss.detach())
        for name, parameter in member.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            actual = member_part(gradients, name, index, parameter)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(reported_loss, torch.stack(losses).mean(), rtol=1e-4, atol=1e-5)


def test_the_vectors_of_an_ensemble_have_unit_length_under_cosine_similarity() -> None:
    ensemble, _ = ensemble_and_members(SETTINGS[0])
    query_BD = ensemble.encode_queries(batch_of([]))
    assert query_BD.shape[1] == NUM_MEMBERS * 4
    torch.testing.assert_close(query_BD.norm(dim=1), torch.ones(len(query_BD)))


def test_an_ensemble_with_a_popularity_term_is_rejected() -> None:
    with pytest.raises(ValidationError, match=r"num_members is 2, but a popularity term \(learned\) needs a model with one"):
        TwoTowerConfig.model_validate({"num_members": 2, "popularity": {"kind": "learned"}})
