"""Item vectors that every gloo rank receives from the other ranks, complete and in order."""

import numpy as np
import pytest
import torch

from recsys_core.launching.rank import Process
from recsys_core.training.export.item_columns import TravellingColumns, rows_of_rank
from tests.gloo import cpu_process, run_ranks
from tests.recsys_core.training.export.shares import share_of


def receive_all_columns(rank: int) -> None:
    """Assert that each rank receives the vectors of all requested items in blocks of four."""
    item_vector_ID, process = torch.arange(70.0).reshape(35, 2), cpu_process(rank)
    item_row_C = np.random.default_rng(0).permutation(35)[:33]  # without two items of rank 2
    columns = TravellingColumns(share_of(item_vector_ID, process), item_row_C=item_row_C, columns_per_block=4, process=process)
    for _ in range(2):  # the columns can travel again
        blocks = [(first_column, block_CD.clone()) for first_column, block_CD in columns.travel()]
        assert [first_column for first_column, _ in blocks] == list(range(0, 33, 4))
        torch.testing.assert_close(
            torch.cat([block_CD for _, block_CD in blocks]), item_vector_ID[torch.from_numpy(item_row_C)]
        )
    assert columns.num_owned_columns == {0: 12, 1: 12, 2: 9}[rank]


def test_every_rank_holds_some_columns_and_receives_all_columns_in_order() -> None:
    run_ranks(receive_all_columns, world_size=3)


@pytest.mark.parametrize("num_rows", [0, 2, 7, 9])
def test_the_rows_are_split_over_the_ranks_as_by_array_split(num_rows: int) -> None:
    row_slices = [rows_of_rank(num_rows, Process(rank, 4, torch.device("cpu"))) for rank in range(4)]
    assert [list(range(num_rows))[rows] for rows in row_slices] == [
        rows.tolist() for rows in np.array_split(range(num_rows), 4)
    ]
