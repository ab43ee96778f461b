"""Ensembles: a score is the mean of the members' scores, and each member is trained like a model of its own."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.task import RetrievalTask
from tests.recsys_core.ingest.random_features import feature_store
from tests.recsys_core.models.test_task import NUM_ITEMS, NUM_USERS, batch_of, item_scores, task_of

NUM_MEMBERS = 3
FEATURE_KEYS = ("user.list", "item.list", "item.number", "context.weighted_list")
ALL_FEATURES = feature_store(num_users=NUM_USERS, num_items=NUM_ITEMS, num_events=NUM_USERS).feature_by_key
FEATURE_STORE = FeatureStore({key: ALL_FEATURES[key] for key in FEATURE_KEYS})
MEMBER_ARGUMENTS_BY_CASE: dict[str, dict[str, Any]] = {
    "default": {"model_settings": {}},
    "dot product with users and features": {
        "model_settings": {"learn_user_embedding": True, "similarity": "dot", "history": {"pooling": "recency"}},
        "features": FEATURE_KEYS,
    },
    "candidate vectors in histories": {
        "model_settings": {
            "candidate": {"layers": [6]},
            "query": {"layers": [6]},
            "history": {"item_representation": "candidate_tower"},
        },
        "features": FEATURE_KEYS,
    },
    "self-attention": {"model_settings": {"history": {"pooling": "self_attention"}}},
    "residual": {
        "model_settings": {},
        "vector_dims": {"item": 8},
        "tables": {"item": {"transfer": "residual"}},
        "loss_settings": {"distillation": {"weight": 0.5, "temperature": 0.5}},
    },
}
"""Arguments of `task_of` for a model that is not an ensemble."""
every_case = pytest.mark.parametrize("member_arguments", MEMBER_ARGUMENTS_BY_CASE.values(), ids=MEMBER_ARGUMENTS_BY_CASE.keys())


def ensemble_and_members(member_arguments: dict[str, Any]) -> tuple[RetrievalTask, list[RetrievalTask]]:
    """Return an ensemble, and each of its members as a separate model with the same parameters. Dropout is off."""
    ensemble = task_of(
        **{**member_arguments, "model_settings": {**member_arguments["model_settings"], "num_members": NUM_MEMBERS}}
    ).eval()
    with torch.no_grad():
        for parameter in ensemble.head.parameters():
            parameter.normal_()  # the last layers are zero before the training
    ensemble_tensors, members = ensemble.state_dict(), []
    for member_index in range(NUM_MEMBERS):
        member = task_of(**member_arguments).eval()
        member.load_state_dict(
            {
                name: member_tensor(ensemble_tensors, name, member_index, parameter)
                for name, parameter in member.state_dict().items()
            }
        )
        members.append(member)
    return ensemble, members


def member_tensor(ensemble_tensors: dict[str, Tensor], name: str, member_index: int, parameter: Tensor) -> Tensor:
    """Return the tensor of a member's parameter `name`. `ensemble_tensors` has the values or gradients of the ensemble."""
    for prefix in ("head.query.", "head.item."):
        if name.startswith(prefix):
            return ensemble_tensors[f"{prefix}members.{member_index}.{name.removeprefix(prefix)}"]
    # The name of a collection contains the width of its tables, so only the ends of the two parameter names are equal.
    suffix = "." + ".".join(name.split(".")[-3:])
    ensemble_tensor = next(
        ensemble_tensor
        for ensemble_name, ensemble_tensor in ensemble_tensors.items()
        if ensemble_name == name or ensemble_name.endswith(suffix)
    )
    return (
        ensemble_tensor if ensemble_tensor.shape == parameter.shape else ensemble_tensor.chunk(NUM_MEMBERS, dim=1)[member_index]
    )


@every_case
def test_a_score_is_the_mean_of_the_scores_of_the_members(member_arguments: dict[str, Any]) -> None:
    if "features" in member_arguments:  # `item_scores` encodes queries and items without features
        member_arguments = {**member_arguments, "features": ()}
    ensemble, members = ensemble_and_members(member_arguments)
    expected_score_BI = torch.stack([item_scores(member) for member in members]).mean(dim=0)
    torch.testing.assert_close(item_scores(ensemble), expected_score_BI, rtol=1e-4, atol=1e-5)


@every_case
def test_each_member_gets_the_gradient_of_its_own_loss(member_arguments: dict[str, Any]) -> None:
    ensemble, members = ensemble_and_members(member_arguments)
    batch = batch_of(features=FEATURE_STORE if "features" in member_arguments else None)
    loss, reported_loss = ensemble(batch)
    loss.backward()
    ensemble_gradients = {name: torch.zeros_like(parameter) for name, parameter in ensemble.named_parameters()}
    ensemble_gradients |= {
        name: parameter.grad for name, parameter in ensemble.named_parameters() if parameter.grad is not None
    }
    member_losses = []
    for member_index, member in enumerate(members):
        member_loss = member(batch)[0]
        member_loss.backward()
        member_losses.append(member_loss.detach())
        for name, parameter in member.named_parameters():
            expected_gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            member_gradient = member_tensor(ensemble_gradients, name, member_index, parameter)
            torch.testing.assert_close(
                member_gradient, expected_gradient, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
    torch.testing.assert_close(reported_loss, torch.stack(member_losses).mean(), rtol=1e-4, atol=1e-5)


def test_the_vectors_of_an_ensemble_with_cosine_similarity_have_norm_1() -> None:
    ensemble, _ = ensemble_and_members(MEMBER_ARGUMENTS_BY_CASE["default"])
    query_BD = ensemble.encode_queries(batch_of([]))
    assert query_BD.shape[1] == NUM_MEMBERS * 4
    torch.testing.assert_close(query_BD.norm(dim=1), torch.ones(len(query_BD)))


def test_an_ensemble_with_a_popularity_term_is_rejected() -> None:
    with pytest.raises(ValidationError, match=r"num_members is 2, but a popularity term \(learned\) needs a model with one"):
        TwoTowerConfig.model_validate({"num_members": 2, "popularity": {"kind": "learned"}})
