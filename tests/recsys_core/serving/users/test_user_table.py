"""The table of users: lookups by id in a mapped file, whose blocks are verified when they are read."""

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
from tests.recsys_core.serving.conftest import small_model_config

NUM_ITEMS = 1_000


def write_user_file(folder: Path, user_ids: Sequence[Id], histories: Sequence[Sequence[int]]) -> tuple[Path, bytes]:
    """Write users without features. Return the path and the block checksums."""
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


def open_user_table(path: Path, checksums: bytes, *, num_users: int) -> UserTable:
    spec = ModelSpec.sized(small_model_config(), num_users=num_users, num_items=NUM_ITEMS, ingested_by_feature={})
    return UserTable.open(path, checksums, spec=spec)


int_ids = st.integers(-(2**63), 2**63 - 1)
text_ids = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
lists_of_unique_ids = st.one_of(*(st.lists(ids, unique=True, min_size=1, max_size=30) for ids in (int_ids, text_ids)))


@given(lists_of_unique_ids, st.randoms())
def test_users_are_found_by_id_with_their_histories(
    tmp_path_factory: pytest.TempPathFactory, ids: list[Id], shuffler: random.Random
) -> None:
    known_ids = ids[: max(1, len(ids) // 2)]
    histories = [[row % NUM_ITEMS, *range(row)] for row in range(len(known_ids))]
    table = open_user_table(*write_user_file(tmp_path_factory.mktemp("users"), known_ids, histories), num_users=len(known_ids))
    shuffler.shuffle(ids)
    rows = table.ids.rows(ids)
    assert rows.tolist() == [known_ids.index(user_id) if user_id in known_ids else -1 for user_id in ids]
    assert table.ids.ids(np.arange(len(known_ids))).tolist() == known_ids
    stored_histories = table.histories(rows)
    history_lists = np.split(stored_histories.values_L, stored_histories.offset[1:-1])
    assert [history.tolist() for history in history_lists] == [histories[row] if row >= 0 else [] for row in rows]


def test_replacing_items_renumbers_the_histories_and_drops_removed_items(tmp_path: Path) -> None:
    path, _ = write_user_file(tmp_path, ["a", "b", "c"], [[5, 2, 5], [], [2, 9]])
    new_row_I = np.full(NUM_ITEMS, -1, np.int32)  # every item is removed, except 5 and 9
    new_row_I[[5, 9]] = [0, 1]
    replaced_path = tmp_path / "replaced.arrow"
    replace_history_items(path, replaced_path, new_row_I)
    write_block_checksums(replaced_path, tmp_path / "replaced.sha256")
    table = open_user_table(replaced_path, (tmp_path / "replaced.sha256").read_bytes(), num_users=3)
    replaced_histories = table.histories(table.ids.rows(["a", "b", "c", "d"]))
    assert (replaced_histories.offset.tolist(), replaced_histories.values_L.tolist()) == ([0, 2, 2, 3, 3], [0, 0, 1])


def test_users_without_any_event_have_empty_histories(tmp_path: Path) -> None:
    table = open_user_table(*write_user_file(tmp_path, [7, 8], [[], []]), num_users=2)
    assert table.histories(table.ids.rows([8, 9, 7])).lengths.tolist() == [0, 0, 0]


def test_a_changed_block_fails_only_the_lookups_that_read_it(tmp_path: Path) -> None:
    num_users, history_length = 50_000, 20
    changed_row = num_users // 2
    history_UH = np.random.default_rng(0).integers(0, NUM_ITEMS, (num_users, history_length))
    path, checksums = write_user_file(tmp_path, [f"user-{row}" for row in range(num_users)], list(history_UH))
    content = bytearray(path.read_bytes())
    history_position = content.find(history_UH[changed_row].astype(np.int32).tobytes())
    assert MAX_METADATA_BYTES < history_position < len(content) - MAX_METADATA_BYTES
    content[history_position] ^= 1
    path.write_bytes(content)
    table = open_user_table(path, checksums, num_users=num_users)
    max_users_per_block = BLOCK_BYTES // (4 * history_length) + 1
    intact_rows = np.array([0, changed_row - max_users_per_block, changed_row + max_users_per_block, num_users - 1])
    rows = table.ids.rows([f"user-{row}" for row in intact_rows])
    assert (table.histories(rows).values_L == history_UH[intact_rows].reshape(-1)).all()
    changed_rows = table.ids.rows([f"user-{changed_row}"])
    with pytest.raises(StageError, match=r"users.arrow: the bytes from [\d,]+ on were changed; download or package"):
        table.histories(changed_rows)


def test_the_number_of_blocks_read_to_open_a_file_does_not_depend_on_the_number_of_users(tmp_path: Path) -> None:
    num_blocks_read_by_file = []
    for num_users in (100_000, 400_000):
        (folder := tmp_path / str(num_users)).mkdir()
        table = open_user_table(*write_user_file(folder, range(num_users), [[1]] * num_users), num_users=num_users)
        num_blocks_read_by_file.append(int(table._event_item._file._is_verified_P.sum()))
    assert num_blocks_read_by_file[0] == num_blocks_read_by_file[1] > 0


def test_checksums_of_another_file_are_rejected(tmp_path: Path) -> None:
    path, checksums = write_user_file(tmp_path, [1, 2], [[1], [2]])
    with pytest.raises(StageError, match=r"users.arrow: the file has 1 blocks, but there are checksums for 2"):
        open_user_table(path, checksums * 2, num_users=2)
    with pytest.raises(StageError, match=r"users.arrow: the bytes from 0 on were changed"):
        open_user_table(path, bytes(len(checksums)), num_users=2)
