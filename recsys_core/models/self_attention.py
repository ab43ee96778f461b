"""Causal self-attention over padded histories (Kang and McAuley, "Self-attentive sequential recommendation", ICDM 2018).

Shapes: B histories, H entries of a padded history, Q entries whose states are computed, D width of an item vector.
"""

import torch
from torch import Tensor, nn

from recsys_core.models.history_config import SelfAttentionHistory

INIT_STD = 0.02
"""Standard deviation of the initial weight matrices, as in BERT."""


class SelfAttention(nn.Module):
    """Blocks of self-attention over histories.

    Each block computes a new vector, the *state*, for each entry. The result is the state of the last item of each history.
    A position is the number of items after an entry. An entry attends to itself and to the items before it. The last block
    computes only the state of the last item, because no other state is read.

    Args:
        dim: width of an item vector, and of the result.
        std: standard deviation of the values of the result at the start of training. With `recency_residual`, the result starts
            at zero.
    """

    def __init__(self, config: SelfAttentionHistory, *, dim: int, std: float) -> None:
        super().__init__()
        self.position = nn.Embedding(config.length, dim)
        self.input_norm, self.output_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = Dropout(config.hidden_dropout)
        self.blocks = nn.ModuleList(Block(config, dim=dim) for _ in range(config.num_blocks))
        if self.position.weight.is_meta:
            return
        nn.init.zeros_(self.position.weight)
        nn.init.constant_(self.output_norm.weight, 0.0 if config.recency_residual else std)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
                nn.init.zeros_(module.bias)

    def forward(self, item_BHD: Tensor, is_item_BH: Tensor, position_BH: Tensor) -> Tensor:
        """Return one vector per history [B, D]. The result of a history without an item has no meaning.

        Args:
            item_BHD: item vectors, oldest first.
            is_item_BH: False for padding, which may be anywhere and have any value.
            position_BH: number of items after each entry, at most the length of the history minus 1.
        """
        state_BHD = self.dropout(self.input_norm(item_BHD + self.position(position_BH)))
        # Padding attends to every entry, so that no row of the mask is empty. No result reads the states of padding.
        is_visible_BHH = (position_BH[:, None, :] >= position_BH[:, :, None]) & is_item_BH[:, None, :]
        is_visible_BHH = is_visible_BHH | ~is_item_BH[:, :, None]
        for block in self.blocks[:-1]:
            state_BHD = block(state_BHD, state_BHD, is_visible_BHH)
        is_last_B1H = (is_item_BH & (position_BH == 0))[:, None, :]
        last_state_B1D = is_last_B1H.to(state_BHD.dtype) @ state_BHD
        is_visible_B1H = is_item_BH[:, None, :] | ~is_item_BH.any(dim=1)[:, None, None]
        last_state_B1D = self.blocks[-1](last_state_B1D, state_BHD, is_visible_B1H)
        vector_BD: Tensor = self.output_norm(last_state_B1D.squeeze(1))
        return vector_BD


class Dropout(nn.Module):
    """Dropout. On a CPU, it takes a third of the time of nn.Dropout, whose random numbers are slow."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, value: Tensor) -> Tensor:
        """Return the values. While training, a random part of the values is zero, and the other values are scaled up."""
        if not self.training or not self.rate:
            return value
        is_retained = torch.rand_like(value, dtype=torch.float32) >= self.rate
        return value * is_retained * (1 / (1 - self.rate))


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a layer norm before it and a residual connection around it."""

    def __init__(self, config: SelfAttentionHistory, *, dim: int) -> None:
        super().__init__()
        self.num_heads, self.attention_dropout = config.num_heads, Dropout(config.attention_dropout)
        self.scale = (dim // config.num_heads) ** -0.5
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key_value, self.attended = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.dropout = Dropout(config.hidden_dropout)

    def forward(self, entry_BQD: Tensor, state_BHD: Tensor, is_visible_BQH: Tensor) -> Tensor:
        """Return the new states of the entries `entry_BQD`, which attend to the entries `state_BHD`."""
        normed_state_BHD = self.attention_norm(state_BHD)
        normed_entry_BQD = normed_state_BHD if entry_BQD is state_BHD else self.attention_norm(entry_BQD)
        key, value = self.key_value(normed_state_BHD).chunk(2, dim=2)
        score = self._split_heads(self.query(normed_entry_BQD)) @ self._split_heads(key).transpose(2, 3)
        score = (score * self.scale).masked_fill(~is_visible_BQH[:, None], torch.finfo(score.dtype).min)
        mean_value = self.attention_dropout(score.softmax(dim=3)) @ self._split_heads(value)
        entry_BQD = entry_BQD + self.dropout(self.attended(mean_value.transpose(1, 2).flatten(2)))
        state_BQD: Tensor = entry_BQD + self.dropout(self.feed_forward(self.feed_forward_norm(entry_BQD)))
        return state_BQD

    def _split_heads(self, vector_BHD: Tensor) -> Tensor:
        """Return the vectors by head, [B, heads, H, D / heads]."""
        num_histories, length, dim = vector_BHD.shape
        return vector_BHD.view(num_histories, length, self.num_heads, dim // self.num_heads).transpose(1, 2)


def groups_of_similar_length(length_B: Tensor, *, max_length: int) -> list[tuple[Tensor, int]]:
    """Return groups of histories that are padded together: the indices of the histories, and the length of the longest one.

    On a CPU, the longest history of a group is at most 1.5 times as long as the shortest, apart from rounding, so that little
    time is spent on padding. Empty histories are in a group of length 0. On a GPU, all histories are one group of `max_length`,
    because reading the lengths would wait for the device.

    >>> groups = groups_of_similar_length(torch.tensor([7, 0, 8, 2, 40]), max_length=50)
    >>> [(index_B.tolist(), longest) for index_B, longest in groups]
    [([1], 0), ([3], 2), ([0, 2], 8), ([4], 40)]
    """
    if length_B.device.type != "cpu":
        return [(torch.arange(len(length_B), device=length_B.device), max_length)]
    sorted_length_B, sorted_index_B = length_B.sort(stable=True)
    max_lengths = [0]  # 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ...
    while max_lengths[-1] < max_length:
        max_lengths.append(max_lengths[-1] + max(1, 1 << max(0, max_lengths[-1].bit_length() - 2)))
    group_ends = torch.searchsorted(sorted_length_B, torch.tensor(max_lengths), right=True).tolist()
    return [
        (sorted_index_B[start:end], int(sorted_length_B[end - 1]))
        for start, end in zip([0, *group_ends], group_ends, strict=False)
        if end > start
    ]
