"""The contract of a history encoder, checked for every member of HistoryConfig. Encoders are compared with a slow loop."""

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.dataset.jagged import JaggedArray
from recsys_core.models.config import TwoTowerConfig
from recsys_core.models.history import HistoryEncoder, last_items, make_encoder
from recsys_core.models.history_config import HistoryConfig, HistorySettings
from recsys_core.models.spec import ModelSpec
from recsys_core.models.towers import QueryTower
from recsys_core.serving.quantise import build_tower
from recsys_core.training.warm.starting_model import Champion, architecture_settings, champion_layers

CONFIG_BY_KIND = {
    config_class.model_fields["pooling"].default: config_class for config_class in get_args(get_args(HistoryConfig)[0])
}
KINDS = tuple(CONFIG_BY_KIND)
WIDTH, LONGEST = 3, 6
histories = st.lists(st.lists(st.integers(0, 4), max_size=LONGEST), max_size=6)
"""Histories of up to six queries: indices into five distinct items."""
every_kind = pytest.mark.parametrize("kind", KINDS)


def pooling_of(kind: Any, **settings_of: Any) -> HistoryEncoder:
    config: HistorySettings = CONFIG_BY_KIND[kind](length=LONGEST, **settings_of)
    return make_encoder(config, dim=WIDTH, std=0.5)


WEIGHTED_KINDS = [kind for kind in KINDS if type(pooling_of(kind)).forward is HistoryEncoder.forward]
every_weighted_kind = pytest.mark.parametrize("kind", WEIGHTED_KINDS)


def ragged(lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([0, *(len(items) for items in lists)])
    return torch.tensor([item for items in lists for item in items], dtype=torch.int64), lengths.cumsum(0)


def loop_vectors(kind: str, pooling: Any, item_VD: Tensor, lists: list[list[int]]) -> list[list[float]]:
    """Return the pooled histories, computed with plain floats."""
    vectors = []
    for items in lists:
        if not items:
            vectors.append(pooling.start.tolist())
            continue
        rows = [item_VD[item].tolist() for item in items]
        match kind:
            case "recency":
                ages = range(len(items) - 1, -1, -1)
                scores = [pooling.recency[age].item() for age in ages]
            case "attention":
                query = pooling.attention.tolist()
                scores = [
                    sum(query_value * row_value for query_value, row_value in zip(query, row, strict=True)) / math.sqrt(WIDTH)
                    for row in rows
                ]
            case _:
                scores = [0.0] * len(items)
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        total = 1.0 if kind == "sum" else sum(weights)
        vectors.append(
            [
                sum(weight * row[dimension] for weight, row in zip(weights, rows, strict=True)) / total
                for dimension in range(WIDTH)
            ]
        )
    return vectors


@settings(deadline=None)
@given(kind=st.sampled_from(WEIGHTED_KINDS), lists=histories, seed=st.integers(0, 99), scale=st.sampled_from([0.1, 1.0, 300.0]))
def test_every_pooling_equals_a_loop_over_the_items(kind: str, lists: list[list[int]], seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    pooling = pooling_of(kind)
    for parameter in pooling.parameters():
        torch.nn.init.normal_(parameter)
    item_VD = torch.randn(5, WIDTH) * scale
    result = pooling(item_VD, *ragged(lists))
    expected = torch.tensor(loop_vectors(kind, pooling, item_VD, lists)).reshape(len(lists), WIDTH)
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4 * scale)


def test_attention_does_not_underflow_if_another_history_has_a_far_higher_score() -> None:
    pooling = pooling_of("attention")
    torch.nn.init.ones_(pooling.attention)
    item_VD = torch.tensor([[900.0] * WIDTH, [-900.0] * WIDTH, [-901.0] * WIDTH])
    result = pooling(item_VD, *ragged([[0], [1], [2, 1]]))[:, 0].tolist()
    ahead = math.exp(math.sqrt(WIDTH))  # ratio of the two attention weights
    assert result == pytest.approx([900.0, -900.0, -(901.0 + ahead * 900.0) / (1 + ahead)])


@every_kind
def test_an_empty_history_gives_start_even_if_the_batch_has_no_item(kind: str) -> None:
    pooling = pooling_of(kind)
    start = pooling.start.tolist()
    assert any(start)
    assert pooling(torch.randn(5, WIDTH), *ragged([[], [1], []]))[[0, 2]].tolist() == [start] * 2
    assert pooling(torch.zeros(0, WIDTH), *ragged([[], []])).tolist() == [start] * 2
    assert pooling(torch.zeros(0, WIDTH), *ragged([])).shape == (0, WIDTH)


@pytest.mark.parametrize("kind", ["recency", "attention"])
def test_learned_weights_start_at_the_plain_mean(kind: str) -> None:
    item_VD = torch.randn(5, WIDTH)
    history = ragged([[0, 1, 1, 4], [], [3]])
    pooling, mean = pooling_of(kind), pooling_of("mean")
    mean.start = pooling.start
    torch.testing.assert_close(pooling(item_VD, *history), mean(item_VD, *history))


@every_kind
def test_the_gradient_reaches_every_item_and_every_weight(kind: str) -> None:
    torch.manual_seed(3)
    pooling = pooling_of(kind).double().eval()  # without dropout
    for parameter in pooling.parameters():
        torch.nn.init.normal_(parameter)
    item_VD = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    history = ragged([[0, 1, 1, 4], [], [3, 0]])
    names = [name for name, _ in pooling.named_parameters()]

    def pooled(item_VD: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(pooling, dict(zip(names, weights, strict=True)), (item_VD, *history))

    assert torch.autograd.gradcheck(pooled, (item_VD, *pooling.parameters()))


@every_kind
def test_an_item_that_is_in_no_history_has_no_gradient(kind: str) -> None:
    item_VD = torch.randn(5, WIDTH, requires_grad=True)
    pooling_of(kind)(item_VD, *ragged([[0, 1], [1]])).square().sum().backward()
    assert item_VD.grad is not None
    assert (item_VD.grad.any(dim=1)).tolist() == [True, True, False, False, False]


def test_recency_weights_depend_on_the_position_from_the_end() -> None:
    pooling = pooling_of("recency")
    with torch.no_grad():
        pooling.recency[:2] = torch.tensor([3.0, 1.0]).log()
    items = torch.tensor([[8.0] * WIDTH, [0.0] * WIDTH])
    # The last item has weight 3, the item before it 1.
    assert pooling(items, *ragged([[1, 0], [0, 1]]))[:, 0].tolist() == pytest.approx([6.0, 2.0])


@every_kind
def test_a_history_that_dropout_left_empty_gives_start(kind: str) -> None:
    encoder = pooling_of(kind, item_dropout=0.5)
    encoder.item_dropout = 1.0
    item_VD, history = torch.randn(5, WIDTH), ragged([[0, 3], [4]])
    assert encoder(item_VD, *history).tolist() == [encoder.start.tolist()] * 2
    encoder.eval()
    assert not torch.equal(encoder(item_VD, *history)[0], encoder.start)


@every_weighted_kind
def test_items_are_dropped_only_while_training(kind: str) -> None:
    torch.manual_seed(0)
    pooling = pooling_of(kind, item_dropout=0.5)
    item_VD, history = torch.eye(WIDTH), ragged([[0, 1, 2]] * 400)
    torch.nn.init.constant_(pooling.start, -1.0)
    trained = pooling(item_VD, *history)
    is_used = trained > 0
    assert is_used.float().mean().item() == pytest.approx(0.5, abs=0.06)
    assert len({tuple(row) for row in is_used.tolist()}) == 8  # all 2^3 subsets occur: each history is dropped independently
    assert trained[~is_used.any(dim=1)].unique().tolist() == [-1.0]  # no item left: start
    if kind != "sum":  # weights are normalised over the items left
        torch.testing.assert_close(trained[is_used.any(dim=1)].sum(dim=1), torch.ones(int(is_used.any(dim=1).sum())))
    kept_out = pooling_of(kind)(item_VD, *history)
    assert torch.equal(pooling.eval()(item_VD, *history), kept_out)


@every_kind
def test_the_order_of_the_items_matters_only_for_an_encoder_that_needs_it(kind: str) -> None:
    encoder = pooling_of(kind)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter)
    item_VD = torch.randn(5, WIDTH)
    forward, backward = encoder(item_VD, *ragged([[0, 3, 4]])), encoder(item_VD, *ragged([[4, 3, 0]]))
    assert torch.allclose(forward, backward) != CONFIG_BY_KIND[kind].needs_order


@every_kind
def test_the_norm_is_at_most_that_of_an_item_and_only_called_modules_are_sharded(kind: str) -> None:
    encoder = pooling_of(kind)
    assert 0 < encoder.expected_norm(8.0) <= 8.0
    called = []
    for module in (shardable := encoder.shardable_modules()):
        module.register_forward_pre_hook(lambda module, inputs: called.append(module))
    encoder(torch.randn(5, WIDTH), *ragged([[0, 3, 4]]))
    assert called == shardable


@every_kind
def test_a_model_starts_from_its_own_layers(kind: str) -> None:
    spec = spec_of(kind)
    tower = QueryTower(spec)
    state = {f"query.{name}": tensor for name, tensor in tower.state_dict().items()}
    same_spec = ModelSpec.model_validate_json(spec.model_dump_json())
    assert architecture_settings(same_spec) == architecture_settings(spec)
    assert architecture_settings(spec)["model.history.pooling"] == kind
    champion = Champion("run", same_spec, *[None] * 4)  # type: ignore[arg-type]  # no stage is read
    carried = champion_layers(spec, champion=champion, champion_tensors=state)
    assert carried.keys() == state.keys()
    assert all(carried[name] is tensor for name, tensor in state.items())


@every_kind
def test_the_served_tower_of_8_bit_rows_gives_nearly_the_query_of_float_rows(kind: str) -> None:
    torch.manual_seed(0)
    spec = spec_of(kind)
    tower = torch.nn.ModuleDict({"query": QueryTower(spec)})
    history = JaggedArray.from_lengths(np.array([3, 0, 6]), np.array([0, 3, 4, 8, 7, 6, 5, 4, 3]))
    items = torch.randn(spec.num_items, spec.config.history_dim).numpy()
    compressed, exact = (
        build_tower(spec, history_items=items, tables={}, dense=tower.state_dict(), quantization=quantization)(
            np.zeros(3, np.int64), history, features=FeatureStore({})
        )
        for quantization in ("int8", "fp32")
    )
    torch.testing.assert_close(compressed, exact, atol=0.02, rtol=0)


def spec_of(kind: str) -> ModelSpec:
    config = TwoTowerConfig.model_validate({"embedding_dim": 16, "history": {"length": LONGEST, "pooling": kind}})
    return ModelSpec.sized(config, num_users=1, num_items=9)


def test_a_history_without_pooling_is_the_mean() -> None:
    assert TwoTowerConfig.model_validate({"history": {"length": 5}}).history == CONFIG_BY_KIND["mean"](length=5)


@settings(deadline=None)
@given(lists=histories)
def test_last_items_returns_the_last_item_or_start(lists: list[list[int]]) -> None:
    item_VD, start = torch.randn(5, WIDTH), torch.randn(WIDTH)
    expected = [item_VD[items[-1]].tolist() if items else start.tolist() for items in lists]
    assert last_items(item_VD, *ragged(lists), start=start).tolist() == expected
    assert last_items(item_VD[:0], *ragged([[] for _ in lists]), start=start).tolist() == [start.tolist()] * len(lists)
