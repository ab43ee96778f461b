"""The users of a package are looked up in the file, and the file is verified block by block."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys_core.dataset.feature_store import FeatureStore
from recsys_core.errors import StageError
from recsys_core.models.spec import ModelSpec
from recsys_core.serving.ids import Id
from recsys_core.serving.users.mapped_file import BLOCK_BYTES, write_block_checksums
from recsys_core.serving.users.user_table import MAX_METADATA_BYTES, UserTable, replace_history_items, write_users
from tests.recsys_core.serving.conftest import config_of

NUM_ITEMS = 1_000


def written(folder: Path, user_ids: Sequence[Id], histories: Sequence[Sequence[int]]) -> tuple[Path, bytes]:
    """Write users without features; return the path and the block checksums."""
    path, checksums_path = folder / "users.arrow", folder / "users.sha256"
    write_users(
        path,
        user_ids=pa.array(user_ids),
        user_offset=np.cumsum([0, *map(len, histories)]),
        event_item=np.concatenate([np.array(history, np.int32) for history in histories]),
        features=FeatureStore({}),
    )
    write_block_checksums(path, checksums_path)
    return path, checksums_path.read_bytes()


def opened(path: Path, checksums: bytes, *, users: int) -> UserTable:
    spec = ModelSpec.sized(config_of(), num_users=users, num_items=NUM_ITEMS, ingested_by_feature={})
    return UserTable.open(path, checksums, spec=spec)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
unique_ids = st.one_of(
    *(st.lists(ids, unique=True, min_size=1, max_size=30) for ids in (st.integers(-(2**63), 2**63 - 1), texts))
)


@given(unique_ids, st.randoms())
def test_users_are_found_by_id_with_their_histories(
    tmp_path_factory: pytest.TempPathFactory, ids: list[Id], order: random.Random
) -> None:
    known_ids = ids[: max(1, len(ids) // 2)]
    histories = [[row % NUM_ITEMS, *range(row)] for row in range(len(known_ids))]
    table = opened(*written(tmp_path_factory.mktemp("users"), known_ids, histories), users=len(known_ids))
    order.shuffle(ids)
    rows = table.ids.rows(ids)
    assert rows.tolist() == [known_ids.index(user_id) if user_id in known_ids else -1 for user_id in ids]
    assert table.ids.ids(np.arange(len(known_ids))).tolist() == known_ids
    stored = table.histories(rows)
    lists = [stored.values_L[start:end].tolist() for start, end in zip(stored.offset, stored.offset[1:], strict=False)]
    assert lists == [histories[row] if row >= 0 else [] for row in rows]


def test_histories_get_other_item_rows_without_the_items_that_left(tmp_path: Path) -> None:
    path, _ = written(tmp_path, ["a", "b", "c"], [[5, 2, 5], [], [2, 9]])
    new_row_I = np.full(NUM_ITEMS, -1, np.int32)
    new_row_I[[5, 9]] = [0, 1]
    replaced = tmp_path / "replaced.arrow"
    replace_history_items(path, replaced, new_row_I)
    write_block_checksums(replaced, tmp_path / "replaced.sha256")
    table = opened(replaced, (tmp_path / "replaced.sha256").read_bytes(), users=3)
    stored = table.histories(table.ids.rows(["a", "b", "c", "d"]))
    assert (stored.offset.tolist(), stored.values_L.tolist()) == ([0, 2, 2, 3, 3], [0, 0, 1])


def test_users_without_any_event_have_empty_histories(tmp_path: Path) -> None:
    table = opened(*written(tmp_path, [7, 8], [[], []]), users=2)
    assert table.histories(table.ids.rows([8, 9, 7])).lengths.tolist() == [0, 0, 0]


def test_a_changed_block_fails_only_the_lookups_that_read_it(tmp_path: Path) -> None:
    users, length = 50_000, 20
    histories = np.random.default_rng(0).integers(0, NUM_ITEMS, (users, length))
    path, checksums = written(tmp_path, [f"user-{row}" for row in range(users)], list(histories))
    content = bytearray(path.read_bytes())
    position = content.find(histories[users // 2].astype(np.int32).tobytes())
    assert MAX_METADATA_BYTES < position < len(content) - MAX_METADATA_BYTES
    content[position] ^= 1
    path.write_bytes(content)
    table = opened(path, checksums, users=users)
    users_of_block = BLOCK_BYTES // (4 * length) + 1
    intact = np.array([0, users // 2 - users_of_block, users // 2 + users_of_block, users - 1])
    rows = table.ids.rows([f"user-{row}" for row in intact])
    assert (table.histories(rows).values_L == histories[intact].reshape(-1)).all()
    row = table.ids.rows([f"user-{users // 2}"])
    with pytest.raises(StageError, match=r"users.arrow: the bytes from [\d,]+ on were changed; download or package"):
        table.histories(row)


def test_opening_a_file_reads_as_many_bytes_of_many_users_as_of_few(tmp_path: Path) -> None:
    num_blocks_read = []
    for users in (100_000, 400_000):
        (folder := tmp_path / str(users)).mkdir()
        table = opened(*written(folder, range(users), [[1]] * users), users=users)
        num_blocks_read.append(int(table._event_item._file._is_verified_P.sum()))
    assert num_blocks_read[0] == num_blocks_read[1] > 0


def test_checksums_of_another_file_are_rejected(tmp_path: Path) -> None:
    path, checksums = written(tmp_path, [1, 2], [[1], [2]])
    with pytest.raises(StageError, match=r"users.arrow: the file has 1 blocks, but there are checksums for 2"):
        opened(path, checksums * 2, users=2)
    with pytest.raises(StageError, match=r"users.arrow: the bytes from 0 on were changed"):
        opened(path, bytes(len(checksums)), users=2)
