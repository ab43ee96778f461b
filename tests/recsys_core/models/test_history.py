"""Properties of every history encoder in HistoryConfig, and vectors of the encoders compared with a slow loop."""

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
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
from recsys_core.training.warm.starting_model import Champion, architecture_settings, champion_parameters

CONFIG_BY_KIND = {
    config_class.model_fields["pooling"].default: config_class for config_class in get_args(get_args(HistoryConfig)[0])
}
KINDS = tuple(CONFIG_BY_KIND)
WIDTH, MAX_LENGTH = 3, 6
histories = st.lists(st.lists(st.integers(0, 4), max_size=MAX_LENGTH), max_size=6)
"""Histories of up to six queries: indices into five distinct items."""
every_kind = pytest.mark.parametrize("kind", KINDS)


def encoder_of(kind: Any, **fields: Any) -> HistoryEncoder:
    config: HistorySettings = CONFIG_BY_KIND[kind](length=MAX_LENGTH, **fields)
    return make_encoder(config, dim=WIDTH, std=0.5)


# These encoders return a weighted sum of the items.
WEIGHTED_KINDS = [kind for kind in KINDS if type(encoder_of(kind)).forward is HistoryEncoder.forward]
every_weighted_kind = pytest.mark.parametrize("kind", WEIGHTED_KINDS)


def ragged(lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return the concatenated lists, and the offset of each list."""
    lengths = torch.tensor([0, *(len(items) for items in lists)])
    return torch.tensor([item for items in lists for item in items], dtype=torch.int64), lengths.cumsum(0)


def loop_vectors(kind: str, encoder: Any, item_VD: Tensor, lists: list[list[int]]) -> list[list[float]]:
    """Return the vectors of the histories in `lists`, computed with plain floats."""
    vectors = []
    for items in lists:
        if not items:
            vectors.append(encoder.start.tolist())
            continue
        rows = [item_VD[item].tolist() for item in items]
        match kind:
            case "recency":
                ages = range(len(items) - 1, -1, -1)
                scores = [encoder.recency[age].item() for age in ages]
            case "attention":
                query = encoder.attention.tolist()
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


@given(kind=st.sampled_from(WEIGHTED_KINDS), lists=histories, seed=st.integers(0, 99), scale=st.sampled_from([0.1, 1.0, 300.0]))
def test_a_weighted_sum_equals_a_loop_over_the_items(kind: str, lists: list[list[int]], seed: int, scale: float) -> None:
    torch.manual_seed(seed)
    encoder = encoder_of(kind)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter)
    item_VD = torch.randn(5, WIDTH) * scale
    vector_BD = encoder(item_VD, *ragged(lists))
    expected_BD = torch.tensor(loop_vectors(kind, encoder, item_VD, lists)).reshape(len(lists), WIDTH)
    torch.testing.assert_close(vector_BD, expected_BD, rtol=1e-3, atol=1e-4 * scale)


def test_attention_does_not_underflow_if_another_history_has_a_far_higher_score() -> None:
    encoder = encoder_of("attention")
    torch.nn.init.ones_(encoder.attention)
    item_VD = torch.tensor([[900.0] * WIDTH, [-900.0] * WIDTH, [-901.0] * WIDTH])
    first_numbers = encoder(item_VD, *ragged([[0], [1], [2, 1]]))[:, 0].tolist()
    weight_ratio = math.exp(math.sqrt(WIDTH))  # of the items 1 and 2, whose scores differ by sqrt(WIDTH)
    assert first_numbers == pytest.approx([900.0, -900.0, -(901.0 + weight_ratio * 900.0) / (1 + weight_ratio)])


def test_the_attention_weights_of_a_long_history_add_up_to_one_with_bf16() -> None:
    config: HistorySettings = CONFIG_BY_KIND["attention"](length=2_000)
    encoder = make_encoder(config, dim=WIDTH, std=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        vector_BD = encoder(torch.full((5, WIDTH), 3.0), *ragged([[0, 1, 2, 3] * 500]))
    assert vector_BD[0].tolist() == pytest.approx([3.0] * WIDTH, rel=1e-3)


@every_kind
def test_an_empty_history_has_the_start_vector_even_if_the_batch_has_no_item(kind: str) -> None:
    encoder = encoder_of(kind)
    start = encoder.start.tolist()
    assert any(start)
    assert encoder(torch.randn(5, WIDTH), *ragged([[], [1], []]))[[0, 2]].tolist() == [start] * 2
    assert encoder(torch.zeros(0, WIDTH), *ragged([[], []])).tolist() == [start] * 2
    assert encoder(torch.zeros(0, WIDTH), *ragged([])).shape == (0, WIDTH)


@every_kind
def test_a_batch_of_empty_histories_uses_the_same_parameters_as_other_batches(kind: str) -> None:
    for lists in ([[], []], [[], [1]]):
        encoder = encoder_of(kind)
        encoder(torch.randn(5, WIDTH), *ragged(lists)).sum().backward()
        assert [name for name, parameter in encoder.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("kind", ["recency", "attention"])
def test_an_untrained_encoder_with_learned_weights_returns_the_mean(kind: str) -> None:
    item_VD = torch.randn(5, WIDTH)
    history = ragged([[0, 1, 1, 4], [], [3]])
    encoder, mean_encoder = encoder_of(kind), encoder_of("mean")
    mean_encoder.start = encoder.start
    torch.testing.assert_close(encoder(item_VD, *history), mean_encoder(item_VD, *history))


@every_kind
def test_the_gradient_reaches_every_item_and_every_weight(kind: str) -> None:
    torch.manual_seed(3)
    encoder = encoder_of(kind).double().eval()  # without dropout
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter)
    item_VD = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    history = ragged([[0, 1, 1, 4], [], [3, 0]])
    names = [name for name, _ in encoder.named_parameters()]

    def encode(item_VD: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(encoder, dict(zip(names, weights, strict=True)), (item_VD, *history))

    assert torch.autograd.gradcheck(encode, (item_VD, *encoder.parameters()))


@every_kind
def test_an_item_that_is_in_no_history_has_no_gradient(kind: str) -> None:
    item_VD = torch.randn(5, WIDTH, requires_grad=True)
    encoder_of(kind)(item_VD, *ragged([[0, 1], [1]])).square().sum().backward()
    assert item_VD.grad is not None
    assert (item_VD.grad.any(dim=1)).tolist() == [True, True, False, False, False]


def test_recency_weights_depend_on_the_position_from_the_end() -> None:
    encoder = encoder_of("recency")
    with torch.no_grad():
        encoder.recency[:2] = torch.tensor([3.0, 1.0]).log()
    item_VD = torch.tensor([[8.0] * WIDTH, [0.0] * WIDTH])
    # The last item has weight 3, and the item before it has weight 1.
    assert encoder(item_VD, *ragged([[1, 0], [0, 1]]))[:, 0].tolist() == pytest.approx([6.0, 2.0])


@every_kind
def test_a_history_whose_items_are_all_dropped_has_the_start_vector(kind: str) -> None:
    encoder = encoder_of(kind, item_dropout=0.5)
    encoder.item_dropout = 1.0  # the config allows only smaller values
    item_VD, history = torch.randn(5, WIDTH), ragged([[0, 3], [4]])
    assert encoder(item_VD, *history).tolist() == [encoder.start.tolist()] * 2
    encoder.eval()
    assert not torch.equal(encoder(item_VD, *history)[0], encoder.start)


@every_weighted_kind
def test_items_are_dropped_only_while_training(kind: str) -> None:
    torch.manual_seed(0)
    encoder = encoder_of(kind, item_dropout=0.5)
    item_VD, history = torch.eye(WIDTH), ragged([[0, 1, 2]] * 400)
    torch.nn.init.constant_(encoder.start, -1.0)
    vector_BD = encoder(item_VD, *history)
    is_used_BI = vector_BD > 0  # the item vectors are unit vectors, so each number belongs to one item
    assert is_used_BI.float().mean().item() == pytest.approx(0.5, abs=0.06)
    assert len({tuple(is_used_I) for is_used_I in is_used_BI.tolist()}) == 2**3  # items are dropped independently
    has_items_B = is_used_BI.any(dim=1)
    assert vector_BD[~has_items_B].unique().tolist() == [-1.0]  # the start vector
    if kind != "sum":  # weights are normalised over the remaining items
        torch.testing.assert_close(vector_BD[has_items_B].sum(dim=1), torch.ones(int(has_items_B.sum())))
    vectors_without_dropout = encoder_of(kind)(item_VD, *history)
    assert torch.equal(encoder.eval()(item_VD, *history), vectors_without_dropout)


@every_kind
def test_the_order_of_the_items_matters_only_for_an_encoder_that_needs_the_order(kind: str) -> None:
    encoder = encoder_of(kind)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter)
    item_VD = torch.randn(5, WIDTH)
    vector_BD, vector_of_reversed_BD = (encoder(item_VD, *ragged([items])) for items in ([0, 3, 4], [4, 3, 0]))
    assert torch.allclose(vector_BD, vector_of_reversed_BD) != CONFIG_BY_KIND[kind].needs_order


@every_kind
def test_the_expected_norm_is_at_most_the_norm_of_an_item(kind: str) -> None:
    assert 0 < encoder_of(kind).expected_norm(8.0) <= 8.0


@every_kind
def test_a_model_can_start_from_a_champion_with_the_same_encoder(kind: str) -> None:
    spec = spec_of(kind)
    tower = QueryTower(spec)
    state = {f"query.{name}": tensor for name, tensor in tower.state_dict().items()}
    same_spec = ModelSpec.model_validate_json(spec.model_dump_json())
    assert architecture_settings(same_spec) == architecture_settings(spec)
    assert architecture_settings(spec)["model.history.pooling"] == kind
    champion = Champion("run", same_spec, *[None] * 4)  # type: ignore[arg-type]  # no stage is read
    carried = champion_parameters(spec, champion=champion, champion_tensors=state)
    assert carried.keys() == state.keys()
    assert all(carried[name] is tensor for name, tensor in state.items())


@every_kind
def test_a_tower_with_8_bit_rows_computes_nearly_the_same_queries(kind: str) -> None:
    torch.manual_seed(0)
    spec = spec_of(kind)
    tower = torch.nn.ModuleDict({"query": QueryTower(spec)})
    history = JaggedArray.from_lengths(np.array([3, 0, 6]), np.array([0, 3, 4, 8, 7, 6, 5, 4, 3]))
    history_vector_ID = torch.randn(spec.num_items, spec.config.history_dim).numpy()
    query_of_int8_BD, query_of_fp32_BD = (
        build_tower(spec, history_items=history_vector_ID, tables={}, dense=tower.state_dict(), quantization=quantization)(
            np.zeros(3, np.int64), history, features=FeatureStore({})
        )
        for quantization in ("int8", "fp32")
    )
    torch.testing.assert_close(query_of_int8_BD, query_of_fp32_BD, atol=0.02, rtol=0)


def spec_of(kind: str) -> ModelSpec:
    config = TwoTowerConfig.model_validate({"embedding_dim": 16, "history": {"length": MAX_LENGTH, "pooling": kind}})
    return ModelSpec.sized(config, num_users=1, num_items=9)


def test_a_history_without_pooling_is_the_mean() -> None:
    assert TwoTowerConfig.model_validate({"history": {"length": 5}}).history == CONFIG_BY_KIND["mean"](length=5)


@given(lists=histories)
def test_last_items_returns_the_last_item_or_the_start_vector(lists: list[list[int]]) -> None:
    item_VD, start = torch.randn(5, WIDTH), torch.randn(WIDTH)
    expected = [item_VD[items[-1]].tolist() if items else start.tolist() for items in lists]
    assert last_items(item_VD, *ragged(lists), start=start).tolist() == expected
    assert last_items(item_VD[:0], *ragged([[] for _ in lists]), start=start).tolist() == [start.tolist()] * len(lists)
