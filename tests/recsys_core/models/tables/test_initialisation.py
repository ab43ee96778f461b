"""Initial values of tables: random rows, pretrained vectors, and rows without a vector."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.models.tables import initialisation
from recsys_core.models.tables.embedding_tables import LocalShard
from recsys_core.models.tables.initialisation import (
    copy_rows,
    fill_missing,
    fill_random,
    mean_vector,
    no_vectors,
    present_vector_rows,
    scale_to_norm,
)
from recsys_core.models.tables.table_config import random_norm

NUM_ROWS, DIM, STD = 23, 8, 0.02
VECTOR_VD = np.random.default_rng(0).normal(size=(9, DIM)).astype(np.float32)
VECTOR_ROW_R = np.full(NUM_ROWS, -1)
VECTOR_ROW_R[[4, 10, 11]] = [8, 0, 3]  # the vectors of the rows 4, 10 and 11; no other row has a vector


def whole_table() -> torch.Tensor:
    """Return the table `item` with random rows of seed 3."""
    table = torch.empty(NUM_ROWS, DIM)
    fill_random(LocalShard(0, 0, table), table="item", dim=DIM, seed=3, std=STD)
    return table


@given(
    first_row=st.integers(0, NUM_ROWS - 1),
    first_column=st.integers(0, DIM - 1),
    num_rows=st.integers(1, NUM_ROWS),
    num_columns=st.integers(1, DIM),
    chunk_rows=st.integers(1, NUM_ROWS),
)
def test_initial_values_do_not_depend_on_the_sharding(first_row, first_column, num_rows, num_columns, chunk_rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initialisation, "CHUNK_ROWS", chunk_rows)
        shard_RC = torch.full((min(num_rows, NUM_ROWS - first_row), min(num_columns, DIM - first_column)), torch.nan)
        fill_random(LocalShard(first_row, first_column, shard_RC), table="item", dim=DIM, seed=3, std=STD)
        expected_shard_RC = whole_table()[
            first_row : first_row + shard_RC.shape[0], first_column : first_column + shard_RC.shape[1]
        ]
    torch.testing.assert_close(shard_RC, expected_shard_RC, rtol=0, atol=0)


def test_another_seed_and_another_table_name_give_other_values():
    table_of_other_seed, table_of_other_name = torch.empty(NUM_ROWS, DIM), torch.empty(NUM_ROWS, DIM)
    fill_random(LocalShard(0, 0, table_of_other_seed), table="item", dim=DIM, seed=4, std=STD)
    fill_random(LocalShard(0, 0, table_of_other_name), table="user", dim=DIM, seed=3, std=STD)
    assert not torch.equal(whole_table(), table_of_other_seed) and not torch.equal(whole_table(), table_of_other_name)


def test_a_shard_gets_the_vectors_of_its_rows_and_columns_and_keeps_rows_without_a_vector():
    shard_RC = torch.full((12, 4), 7.0)  # rows 2 to 13 and columns 4 to 7 of the table
    copy_rows(LocalShard(2, 4, shard_RC), vectors=VECTOR_VD, vector_row=VECTOR_ROW_R, norm=None)
    torch.testing.assert_close(shard_RC[[2, 8, 9]], torch.from_numpy(VECTOR_VD[[8, 0, 3], 4:]))
    rows_without_vector = [row for row in range(12) if row not in (2, 8, 9)]
    assert (shard_RC[rows_without_vector] == 7.0).all()


def test_rows_without_a_vector_become_the_mean_or_zero_and_rows_with_a_vector_are_kept():
    mean_D = mean_vector(VECTOR_VD, vector_row=VECTOR_ROW_R, norm=None)
    torch.testing.assert_close(mean_D, torch.from_numpy(VECTOR_VD[[8, 0, 3]].mean(axis=0)))
    mean_of_scaled_vectors_D = mean_vector(VECTOR_VD * 7, vector_row=VECTOR_ROW_R, norm=3.0)
    torch.testing.assert_close(
        mean_of_scaled_vectors_D, scale_to_norm(torch.from_numpy(VECTOR_VD[[8, 0, 3]]), norm=3.0).mean(dim=0)
    )
    for fill_D, expected_fill_C in ((mean_D, mean_D[4:]), (None, torch.zeros(4))):
        shard_RC = torch.full((12, 4), 7.0)  # rows 2 to 13 and columns 4 to 7 of the table
        fill_missing(LocalShard(2, 4, shard_RC), vector_row=VECTOR_ROW_R, value_D=fill_D)
        assert (shard_RC[[2, 8, 9]] == 7).all()
        torch.testing.assert_close(shard_RC[[0, 5, 11]], expected_fill_C.expand(3, 4))


def test_random_rows_have_the_configured_standard_deviation_and_norm():
    table = torch.empty(2_000, 64)
    for std in (0.02, 0.5):
        fill_random(LocalShard(0, 0, table), table="item", dim=64, seed=3, std=std)
        assert table.std().item() == pytest.approx(std, rel=0.01)
        assert table.norm(dim=1).square().mean().sqrt().item() == pytest.approx(random_norm(std, 64), rel=0.01)


def test_the_standard_deviation_only_scales_the_values():
    table_of_std_half, table_of_std_1 = torch.empty(NUM_ROWS, DIM), torch.empty(NUM_ROWS, DIM)
    fill_random(LocalShard(0, 0, table_of_std_half), table="item", dim=DIM, seed=3, std=0.5)
    fill_random(LocalShard(0, 0, table_of_std_1), table="item", dim=DIM, seed=3, std=1.0)
    torch.testing.assert_close(table_of_std_1, 2 * table_of_std_half)


def test_vectors_scaled_to_a_norm_keep_their_direction():
    vector_VD = (np.random.default_rng(0).normal(size=(3, DIM)) * 50).astype(np.float32)
    shard_RC = torch.zeros(3, DIM)
    copy_rows(LocalShard(0, 0, shard_RC), vectors=vector_VD, vector_row=np.arange(3), norm=random_norm(STD, DIM))
    torch.testing.assert_close(shard_RC.norm(dim=1), torch.full((3,), STD * math.sqrt(DIM)))
    torch.testing.assert_close(torch.cosine_similarity(shard_RC, torch.from_numpy(vector_VD)), torch.ones(3))


def test_a_shard_of_some_columns_is_scaled_by_the_norm_of_the_whole_vector():
    vector_VD = np.array([[3.0, 0.0, 0.0, 4.0]], np.float32)
    shard_RC = torch.zeros(1, 2)
    copy_rows(LocalShard(0, 2, shard_RC), vectors=vector_VD, vector_row=np.array([0]), norm=10.0)
    assert shard_RC.tolist() == [[0.0, 8.0]]


def test_filling_a_table_of_many_rows_needs_less_than_one_byte_of_memory_per_row():
    num_rows = 1_000_000
    vector_VD, vector_row_R = np.ones((9, 2), np.float32), np.arange(num_rows) % 10 - 1  # every tenth row has no vector
    shard = LocalShard(0, 0, torch.full((num_rows, 2), 5.0))
    tracemalloc.start()
    try:
        assert mean_vector(vector_VD, vector_row=vector_row_R, norm=None).tolist() == [1.0, 1.0]
        fill_missing(shard, vector_row=vector_row_R, value_D=None)
        copy_rows(shard, vectors=vector_VD, vector_row=vector_row_R, norm=None)
        fill_missing(LocalShard(0, 0, torch.empty(num_rows, 2)), vector_row=no_vectors(num_rows), value_D=None)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < num_rows, f"{peak_bytes:,} bytes for {num_rows:,} rows"
    assert shard.weight_RD.mean() == pytest.approx(0.9)  # nine of ten rows have a vector of ones


def test_the_vectors_of_a_table_come_in_chunks_in_the_order_of_its_rows():
    vector_row_R = np.random.default_rng(0).integers(-1, 5, 3 * initialisation.CHUNK_ROWS)
    chunks = list(present_vector_rows(vector_row_R))
    assert len(chunks) == 3 and max(map(len, chunks)) <= initialisation.CHUNK_ROWS
    np.testing.assert_array_equal(np.concatenate(chunks), vector_row_R[vector_row_R >= 0])
