"""`SelfAttention` compared with nn.TransformerEncoderLayer, dropout, and groups of histories that are padded together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from recsys_core.models.history import make_encoder
from recsys_core.models.history_config import RecencyHistory, SelfAttentionHistory
from recsys_core.models.self_attention import Block, Dropout, SelfAttention, groups_of_similar_length

WIDTH, MAX_LENGTH = 8, 12


def random_attention(**settings: int) -> SelfAttention:
    """Return self-attention with random weights, including the weights that are zero before the training."""
    torch.manual_seed(1)
    attention = SelfAttention(SelfAttentionHistory(length=MAX_LENGTH, **settings), dim=WIDTH, std=0.5).eval()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    return attention


def torch_layer(block: Block) -> nn.TransformerEncoderLayer:
    """Return torch's layer with the weights of a block."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, block.num_heads, dim_feedforward=WIDTH, activation="gelu", batch_first=True, norm_first=True
    ).eval()
    first_layer, _, second_layer = block.feed_forward
    layer.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([block.query.weight, block.key_value.weight]),
            "self_attn.in_proj_bias": torch.cat([block.query.bias, block.key_value.bias]),
            **{f"self_attn.out_proj.{name}": weight for name, weight in block.attended.state_dict().items()},
            **{f"linear1.{name}": weight for name, weight in first_layer.state_dict().items()},
            **{f"linear2.{name}": weight for name, weight in second_layer.state_dict().items()},
            **{f"norm1.{name}": weight for name, weight in block.attention_norm.state_dict().items()},
            **{f"norm2.{name}": weight for name, weight in block.feed_forward_norm.state_dict().items()},
        }
    )
    return layer


def torch_vector(attention: SelfAttention, item_HD: Tensor) -> Tensor:
    """Return the vector of one history, computed with torch's layers."""
    num_items = len(item_HD)
    hidden_1HD = attention.input_norm(item_HD + attention.position.weight[:num_items].flip(0))[None]
    causal_mask_HH = nn.Transformer.generate_square_subsequent_mask(num_items)
    for block in attention.blocks:
        assert isinstance(block, Block)
        hidden_1HD = torch_layer(block)(hidden_1HD, src_mask=causal_mask_HH, is_causal=True)
    vector_D: Tensor = attention.output_norm(hidden_1HD[0, -1])
    return vector_D


@pytest.mark.parametrize(("num_blocks", "num_heads"), [(1, 1), (2, 4), (3, 2)])
def test_the_vectors_equal_the_vectors_of_torchs_encoder_layers(num_blocks: int, num_heads: int) -> None:
    attention = random_attention(num_blocks=num_blocks, num_heads=num_heads)
    config = SelfAttentionHistory(length=MAX_LENGTH, num_blocks=num_blocks, num_heads=num_heads)
    encoder = make_encoder(config, dim=WIDTH, std=0.5).eval()
    encoder.attention = attention
    lengths = [3, 1, 12, 0, 7, 8, 2, 1, 5]
    item_VD, history_H = torch.randn(20, WIDTH), torch.randint(20, (sum(lengths),))
    vector_BD = encoder(item_VD, history_H, torch.tensor([0, *lengths]).cumsum(0))
    for vector_D, items in zip(vector_BD, history_H.split(lengths), strict=True):
        expected_D = torch_vector(attention, item_VD[items]) if len(items) else encoder.start
        torch.testing.assert_close(vector_D, expected_D, rtol=1e-4, atol=1e-5)


def test_padding_may_be_anywhere_and_have_any_value() -> None:
    attention = random_attention()
    item_HD = torch.randn(3, WIDTH)
    padded_BHD = torch.full((3, 6, WIDTH), 9.0)
    is_item_BH = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1]], dtype=torch.bool)
    padded_BHD[is_item_BH] = item_HD.repeat(3, 1)
    # Positions count from the end: the last item has position 0.
    position_BH = is_item_BH.sum(dim=1, keepdim=True) - is_item_BH.long().cumsum(dim=1)
    vector_BD = attention(padded_BHD, is_item_BH, position_BH)
    torch.testing.assert_close(vector_BD, torch_vector(attention, item_HD).expand(3, -1), rtol=1e-4, atol=1e-5)


def test_with_recency_residual_an_untrained_attention_equals_recency_pooling() -> None:
    torch.manual_seed(2)
    encoder_without_residual, encoder_with_residual = (
        make_encoder(SelfAttentionHistory(length=MAX_LENGTH, recency_residual=has_residual), dim=WIDTH, std=0.5).eval()
        for has_residual in (False, True)
    )
    recency_encoder = make_encoder(RecencyHistory(length=MAX_LENGTH), dim=WIDTH, std=0.5)
    recency_weights = nn.Parameter(torch.randn(MAX_LENGTH))
    recency_encoder.recency, encoder_with_residual.recency = recency_weights, recency_weights
    recency_encoder.start = encoder_with_residual.start
    # Item vectors, and the items and offsets of four histories. History 1 is empty.
    encoder_inputs = torch.randn(9, WIDTH), torch.randint(9, (16,)), torch.tensor([0, 3, 3, 4, 16])
    torch.testing.assert_close(encoder_with_residual(*encoder_inputs), recency_encoder(*encoder_inputs))
    encoder_with_residual.attention = encoder_without_residual.attention
    has_items_B = torch.tensor([True, False, True, True])
    expected_BD = encoder_without_residual(*encoder_inputs) + recency_encoder(*encoder_inputs)
    torch.testing.assert_close(encoder_with_residual(*encoder_inputs)[has_items_B], expected_BD[has_items_B])
    assert encoder_with_residual(*encoder_inputs)[1].tolist() == encoder_with_residual.start.tolist()
    assert encoder_with_residual.expected_norm(8.0) == recency_encoder.expected_norm(8.0)


def test_an_untrained_encoder_returns_vectors_with_the_norm_of_an_item_vector() -> None:
    config = SelfAttentionHistory(length=MAX_LENGTH)
    encoder = make_encoder(config, dim=WIDTH, std=0.25).eval()
    vector_BD = encoder(torch.randn(4, WIDTH) * 0.25, torch.tensor([0, 1, 2, 3]), torch.tensor([0, 3, 4]))
    torch.testing.assert_close(vector_BD.norm(dim=1), torch.full((2,), 0.25 * WIDTH**0.5), rtol=1e-3, atol=0)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=40))
def test_each_history_is_in_one_group_which_pads_it_to_less_than_twice_its_length(lengths: list[int]) -> None:
    groups = groups_of_similar_length(torch.tensor(lengths), max_length=200)
    grouped_indices = [history_index for history_index_B, _ in groups for history_index in history_index_B.tolist()]
    assert sorted(grouped_indices) == list(range(len(lengths)))
    for history_index_B, padded_length in groups:
        group_lengths = [lengths[history_index] for history_index in history_index_B.tolist()]
        assert max(group_lengths) == padded_length
        assert padded_length < 2 * min(group_lengths) or padded_length == min(group_lengths)


def test_dropout_keeps_the_mean_and_is_off_in_evaluation() -> None:
    torch.manual_seed(0)
    dropout, values = Dropout(0.3), torch.full((200, 50), 2.0)
    values_in_training = dropout(values)
    assert values_in_training.unique().tolist() == pytest.approx([0.0, 2 / (1 - 0.3)])
    assert (values_in_training == 0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert torch.equal(dropout.eval()(values), values)
