"""Ensembles: a score is the mean of the members' scores, and each member is trained as if it were alone."""

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
FEATURE_KEYS = ("user.list", "item.list", "item.number", "context.weighted_list")
ALL_FEATURES = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_USERS).feature_by_key
FEATURE_STORE = FeatureStore({key: ALL_FEATURES[key] for key in FEATURE_KEYS})
SETTINGS_BY_CASE: dict[str, dict[str, Any]] = {
    "default": {"config": {}},
    "dot product with users and features": {
        "config": {"learn_user_embedding": True, "similarity": "dot", "history": {"pooling": "recency"}},
        "features": FEATURE_KEYS,
    },
    "candidate vectors in histories": {
        "config": {
            "candidate": {"layers": [6]},
            "query": {"layers": [6]},
            "history": {"item_representation": "candidate_tower"},
        },
        "features": FEATURE_KEYS,
    },
    "self-attention": {"config": {"history": {"pooling": "self_attention"}}},
    "residual": {
        "config": {},
        "vector_dims": {"item": 8},
        "tables": {"item": {"transfer": "residual"}},
        "loss": {"distillation": {"weight": 0.5, "temperature": 0.5}},
    },
}
"""Arguments of `task_of` for a model that is not an ensemble."""
every_case = pytest.mark.parametrize("settings", SETTINGS_BY_CASE.values(), ids=SETTINGS_BY_CASE.keys())


def ensemble_and_members(settings: dict[str, Any]) -> tuple[RetrievalTask, list[RetrievalTask]]:
    """Return an ensemble, and each member as a separate model with the same parameters. Dropout is off."""
    ensemble = task_of(**{**settings, "config": {**settings["config"], "num_members": NUM_MEMBERS}}).eval()
    with torch.no_grad():
        for parameter in ensemble.head.parameters():
            parameter.normal_()  # the last layers begin with zeros
    ensemble_state, members = ensemble.state_dict(), []
    for index in range(NUM_MEMBERS):
        member = task_of(**settings).eval()
        member.load_state_dict(
            {name: member_part(ensemble_state, name, index, value) for name, value in member.state_dict().items()}
        )
        members.append(member)
    return ensemble, members


def member_part(ensemble_state: dict[str, Tensor], name: str, member_index: int, parameter: Tensor) -> Tensor:
    """Return the part of `ensemble_state` (values or gradients) that belongs to the parameter `name` of a member."""
    for tower in ("head.query.", "head.item."):
        if name.startswith(tower):
            return ensemble_state[f"{tower}members.{member_index}.{name.removeprefix(tower)}"]
    # The names of collections contain the width of their tables, so only the end of the parameter name is the same.
    suffix = "." + ".".join(name.split(".")[-3:])
    value = next(value for other_name, value in ensemble_state.items() if other_name == name or other_name.endswith(suffix))
    return value if value.shape == parameter.shape else value.chunk(NUM_MEMBERS, dim=1)[member_index]


@every_case
def test_a_score_is_the_mean_of_the_scores_of_the_members(settings: dict[str, Any]) -> None:
    if "features" in settings:  # `scores` encodes queries and items without features
        settings = {**settings, "features": ()}
    ensemble, members = ensemble_and_members(settings)
    expected = torch.stack([scores(member) for member in members]).mean(dim=0)
    torch.testing.assert_close(scores(ensemble), expected, rtol=1e-4, atol=1e-5)


@every_case
def test_each_member_gets_the_gradient_of_its_own_loss(settings: dict[str, Any]) -> None:
    ensemble, members = ensemble_and_members(settings)
    batch = batch_of(features=FEATURE_STORE if "features" in settings else None)
    loss, reported_loss = ensemble(batch)
    loss.backward()
    gradients = {name: torch.zeros_like(parameter) for name, parameter in ensemble.named_parameters()}
    gradients |= {name: parameter.grad for name, parameter in ensemble.named_parameters() if parameter.grad is not None}
    member_losses = []
    for index, member in enumerate(members):
        member_loss = member(batch)[0]
        member_loss.backward()
        member_losses.append(member_loss.detach())
        for name, parameter in member.named_parameters():
            expected_gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            member_gradient = member_part(gradients, name, index, parameter)
            torch.testing.assert_close(
                member_gradient, expected_gradient, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
    torch.testing.assert_close(reported_loss, torch.stack(member_losses).mean(), rtol=1e-4, atol=1e-5)


def test_the_vectors_of_an_ensemble_with_cosine_similarity_have_norm_1() -> None:
    ensemble, _ = ensemble_and_members(SETTINGS_BY_CASE["default"])
    query_BD = ensemble.encode_queries(batch_of([]))
    assert query_BD.shape[1] == NUM_MEMBERS * 4
    torch.testing.assert_close(query_BD.norm(dim=1), torch.ones(len(query_BD)))


def test_an_ensemble_with_a_popularity_term_is_rejected() -> None:
    with pytest.raises(ValidationError, match=r"num_members is 2, but a popularity term \(learned\) needs a model with one"):
        TwoTowerConfig.model_validate({"num_members": 2, "popularity": {"kind": "learned"}})
