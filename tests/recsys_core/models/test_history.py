"""Properties of every history encoder in `HistoryConfig`, and encoded histories compared with a plain loop."""

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

CONFIG_BY_POOLING = {
    config_class.model_fields["pooling"].default: config_class for config_class in get_args(get_args(HistoryConfig)[0])
}
POOLINGS = tuple(CONFIG_BY_POOLING)
WIDTH, MAX_LENGTH = 3, 6
any_histories = st.lists(st.lists(st.integers(0, 4), max_size=MAX_LENGTH), max_size=6)
"""Histories of up to six queries: indices into five distinct items."""
every_pooling = pytest.mark.parametrize("pooling", POOLINGS)


def encoder_of(pooling: Any, **settings: Any) -> HistoryEncoder:
    config: HistorySettings = CONFIG_BY_POOLING[pooling](length=MAX_LENGTH, **settings)
    return make_encoder(config, dim=WIDTH, std=0.5)


# These encoders return a weighted sum of the items.
WEIGHTED_POOLINGS = [pooling for pooling in POOLINGS if type(encoder_of(pooling)).forward is HistoryEncoder.forward]
every_weighted_pooling = pytest.mark.parametrize("pooling", WEIGHTED_POOLINGS)


def history_and_offset(histories: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return the items of all histories in one array, and offsets: history n is items[offset[n] : offset[n + 1]]."""
    lengths = torch.tensor([0, *(len(items) for items in histories)])
    return torch.tensor([item for items in histories for item in items], dtype=torch.int64), lengths.cumsum(0)


def loop_vectors(pooling: str, encoder: Any, item_VD: Tensor, histories: list[list[int]]) -> list[list[float]]:
    """Return the vectors of the histories, computed with plain floats."""
    vectors = []
    for items in histories:
        if not items:
            vectors.append(encoder.start.tolist())
            continue
        item_vectors = [item_VD[item].tolist() for item in items]
        match pooling:
            case "recency":
                ages = range(len(items) - 1, -1, -1)
                scores = [encoder.recency[age].item() for age in ages]
            case "attention":
                attention_query = encoder.attention.tolist()
                scores = [
                    sum(query_value * item_value for query_value, item_value in zip(attention_query, item_vector, strict=True))
                    / math.sqrt(WIDTH)
                    for item_vector in item_vectors
                ]
            case _:
                scores = [0.0] * len(items)
        max_score = max(scores)
        weights = [math.exp(score - max_score) for score in scores]
        divisor = 1.0 if pooling == "sum" else sum(weights)
        vectors.append(
            [
                sum(weight * item_vector[dimension] for weight, item_vector in zip(weights, item_vectors, strict=True))
                / divisor
                for dimension in range(WIDTH)
            ]
        )
    return vectors


@given(
    pooling=st.sampled_from(WEIGHTED_POOLINGS),
    histories=any_histories,
    seed=st.integers(0, 99),
    item_scale=st.sampled_from([0.1, 1.0, 300.0]),
)
def test_a_weighted_sum_equals_a_loop_over_the_items(
    pooling: str, histories: list[list[int]], seed: int, item_scale: float
) -> None:
    torch.manual_seed(seed)
    encoder = encoder_of(pooling)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter)
    item_VD = torch.randn(5, WIDTH) * item_scale
    vector_BD = encoder(item_VD, *history_and_offset(histories))
    expected_BD = torch.tensor(loop_vectors(pooling, encoder, item_VD, histories)).reshape(len(histories), WIDTH)
    torch.testing.assert_close(vector_BD, expected_BD, rtol=1e-3, atol=1e-4 * item_scale)


def test_attention_does_not_underflow_if_another_history_has_a_far_higher_score() -> None:
    encoder = encoder_of("attention")
    torch.nn.init.ones_(encoder.attention)
    item_VD = torch.tensor([[900.0] * WIDTH, [-900.0] * WIDTH, [-901.0] * WIDTH])
    first_numbers = encoder(item_VD, *history_and_offset([[0], [1], [2, 1]]))[:, 0].tolist()
    weight_ratio = math.exp(math.sqrt(WIDTH))  # of item 1 to item 2, whose scores differ by sqrt(WIDTH)
    assert first_numbers == pytest.approx([900.0, -900.0, -(901.0 + weight_ratio * 900.0) / (1 + weight_ratio)])


def test_the_attention_weights_of_a_long_history_add_up_to_one_with_bf16() -> None:
    config: HistorySettings = CONFIG_BY_POOLING["attention"](length=2_000)
    encoder = make_encoder(config, dim=WIDTH, std=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        vector_BD = encoder(torch.full((5, WIDTH), 3.0), *history_and_offset([[0, 1, 2, 3] * 500]))
    assert vector_BD[0].tolist() == pytest.approx([3.0] * WIDTH, rel=1e-3)


@every_pooling
def test_an_empty_history_has_the_start_vector_even_if_the_batch_has_no_item(pooling: str) -> None:
    encoder = encoder_of(pooling)
    start_vector = encoder.start.tolist()
    assert any(start_vector)
    assert encoder(torch.randn(5, WIDTH), *history_and_offset([[], [1], []]))[[0, 2]].tolist() == [start_vector] * 2
    assert encoder(torch.zeros(0, WIDTH), *history_and_offset([[], []])).tolist() == [start_vector] * 2
    assert encoder(torch.zeros(0, WIDTH), *history_and_offset([])).shape == (0, WIDTH)


@every_pooling
def test_every_parameter_has_a_gradient_even_if_all_histories_are_empty(pooling: str) -> None:
    for histories in ([[], []], [[], [1]]):
        encoder = encoder_of(pooling)
        encoder(torch.randn(5, WIDTH), *history_and_offset(histories)).sum().backward()
        assert [name for name, parameter in encoder.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("pooling", ["recency", "attention"])
def test_an_untrained_encoder_with_learned_weights_returns_the_mean(pooling: str) -> None:
    item_VD = torch.randn(5, WIDTH)
    history_arguments = history_and_offset([[0, 1, 1, 4], [], [3]])
    encoder, mean_encoder = encoder_of(pooling), encoder_of("mean")
    mean_encoder.start = encoder.start
    torch.testing.assert_close(encoder(item_VD, *history_arguments), mean_encoder(item_VD, *history_arguments))


@every_pooling
def test_the_gradient_reaches_every_item_and_every_weight(pooling: str) -> None:
    torch.manual_seed(3)
    encoder = encoder_of(pooling).double().eval()  # without dropout
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter)
    item_VD = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    history_arguments = history_and_offset([[0, 1, 1, 4], [], [3, 0]])
    parameter_names = [name for name, _ in encoder.named_parameters()]

    def encode(item_VD: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(
            encoder, dict(zip(parameter_names, weights, strict=True)), (item_VD, *history_arguments)
        )

    assert torch.autograd.gradcheck(encode, (item_VD, *encoder.parameters()))


@every_pooling
def test_an_item_that_is_in_no_history_has_no_gradient(pooling: str) -> None:
    item_VD = torch.randn(5, WIDTH, requires_grad=True)
    encoder_of(pooling)(item_VD, *history_and_offset([[0, 1], [1]])).square().sum().backward()
    assert item_VD.grad is not None
    assert (item_VD.grad.any(dim=1)).tolist() == [True, True, False, False, False]


def test_recency_weights_depend_on_the_position_from_the_end() -> None:
    encoder = encoder_of("recency")
    with torch.no_grad():
        encoder.recency[:2] = torch.tensor([3.0, 1.0]).log()
    item_VD = torch.tensor([[8.0] * WIDTH, [0.0] * WIDTH])
    # The last item has weight 3, and the item before it has weight 1.
    assert encoder(item_VD, *history_and_offset([[1, 0], [0, 1]]))[:, 0].tolist() == pytest.approx([6.0, 2.0])


@every_pooling
def test_a_history_whose_items_are_all_dropped_has_the_start_vector(pooling: str) -> None:
    encoder = encoder_of(pooling, item_dropout=0.5)
    encoder.item_dropout = 1.0  # the config allows only smaller values
    item_VD, history_arguments = torch.randn(5, WIDTH), history_and_offset([[0, 3], [4]])
    assert encoder(item_VD, *history_arguments).tolist() == [encoder.start.tolist()] * 2
    encoder.eval()
    assert not torch.equal(encoder(item_VD, *history_arguments)[0], encoder.start)


@every_weighted_pooling
def test_items_are_dropped_only_while_training(pooling: str) -> None:
    torch.manual_seed(0)
    encoder = encoder_of(pooling, item_dropout=0.5)
    item_VD, history_arguments = torch.eye(WIDTH), history_and_offset([[0, 1, 2]] * 400)
    torch.nn.init.constant_(encoder.start, -1.0)
    vector_BD = encoder(item_VD, *history_arguments)
    is_used_BI = vector_BD > 0  # number i of a vector belongs to item i, because the item vectors are unit vectors
    assert is_used_BI.float().mean().item() == pytest.approx(0.5, abs=0.06)
    assert len({tuple(is_used_I) for is_used_I in is_used_BI.tolist()}) == 2**3  # items are dropped independently
    has_items_B = is_used_BI.any(dim=1)
    assert vector_BD[~has_items_B].unique().tolist() == [-1.0]  # the start vector
    if pooling != "sum":  # weights are normalised over the remaining items
        torch.testing.assert_close(vector_BD[has_items_B].sum(dim=1), torch.ones(int(has_items_B.sum())))
    vectors_without_dropout = encoder_of(pooling)(item_VD, *history_arguments)
    assert torch.equal(encoder.eval()(item_VD, *history_arguments), vectors_without_dropout)


@every_pooling
def test_the_order_of_the_items_matters_only_to_an_encoder_with_needs_order(pooling: str) -> None:
    encoder = encoder_of(pooling)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter)
    item_VD = torch.randn(5, WIDTH)
    vector_BD, vector_of_reversed_BD = (encoder(item_VD, *history_and_offset([items])) for items in ([0, 3, 4], [4, 3, 0]))
    assert torch.allclose(vector_BD, vector_of_reversed_BD) != CONFIG_BY_POOLING[pooling].needs_order


@every_pooling
def test_the_expected_norm_is_at_most_the_norm_of_an_item(pooling: str) -> None:
    assert 0 < encoder_of(pooling).expected_norm(8.0) <= 8.0


@every_pooling
def test_a_model_can_start_from_a_champion_with_the_same_encoder(pooling: str) -> None:
    spec = spec_of(pooling)
    query_tower = QueryTower(spec)
    champion_tensors = {f"query.{name}": tensor for name, tensor in query_tower.state_dict().items()}
    champion_spec = ModelSpec.model_validate_json(spec.model_dump_json())
    assert architecture_settings(champion_spec) == architecture_settings(spec)
    assert architecture_settings(spec)["model.history.pooling"] == pooling
    champion = Champion("run", champion_spec, *[None] * 4)  # type: ignore[arg-type]  # no stage is read
    start_parameters = champion_parameters(spec, champion=champion, champion_tensors=champion_tensors)
    assert start_parameters.keys() == champion_tensors.keys()
    assert all(start_parameters[name] is tensor for name, tensor in champion_tensors.items())


@every_pooling
def test_a_tower_with_8_bit_item_vectors_computes_nearly_the_queries_of_the_fp32_tower(pooling: str) -> None:
    torch.manual_seed(0)
    spec = spec_of(pooling)
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


def spec_of(pooling: str) -> ModelSpec:
    config = TwoTowerConfig.model_validate({"embedding_dim": 16, "history": {"length": MAX_LENGTH, "pooling": pooling}})
    return ModelSpec.sized(config, num_users=1, num_items=9)


def test_the_default_pooling_is_the_mean() -> None:
    assert TwoTowerConfig.model_validate({"history": {"length": 5}}).history == CONFIG_BY_POOLING["mean"](length=5)


@given(histories=any_histories)
def test_last_items_returns_the_last_item_or_the_start_vector(histories: list[list[int]]) -> None:
    item_VD, start_vector = torch.randn(5, WIDTH), torch.randn(WIDTH)
    expected_vectors = [item_VD[items[-1]].tolist() if items else start_vector.tolist() for items in histories]
    assert last_items(item_VD, *history_and_offset(histories), start=start_vector).tolist() == expected_vectors
    empty_history_BD = last_items(item_VD[:0], *history_and_offset([[] for _ in histories]), start=start_vector)
    assert empty_history_BD.tolist() == [start_vector.tolist()] * len(histories)
