"""`nightjar init --log --items --vectors`: columns guessed from real parquet files."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.settings.column_guesses import guess_config
from flows.settings.config_file import load_config
from flows.settings.template import starter_config, to_commented_yaml
from recsys_core.errors import InputError


def write(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write(
        tmp_path / "ratings.parquet", userId=[1, 2], movieId=[7, 8], rating=[1.0, 5.0], timestamp=[1_700_000_000_000] * 2
    )


def test_guessed_columns_are_written_with_a_comment_and_load(tmp_path: Path, log: Path) -> None:
    items = write(tmp_path / "movies.parquet", movieId=[7], title=["Up"], genres=[["a", "b"]], year=[2009.0])
    vector = pa.FixedSizeListArray.from_arrays(pa.array([0.0, 1.0], pa.float32()), 2)
    vectors = write(tmp_path / "vectors.parquet", item_id=[7], embedding=vector)
    config, notes = guess_config(starter_config(), log_path=log, items_path=items, vectors_path=vectors, config_folder=tmp_path)
    file = tmp_path / "nightly.yaml"
    file.write_text(to_commented_yaml(config, notes=notes, every_setting=False))
    loaded = load_config(file)
    assert loaded == config.with_absolute_paths(tmp_path)
    interactions = loaded.interactions
    assert (interactions.user_column, interactions.item_column, interactions.timestamp_column) == (
        "userId",
        "movieId",
        "timestamp",
    )
    assert (interactions.timestamp_unit, interactions.label_column, interactions.label_threshold) == ("ms", "rating", 3.0)
    assert interactions.paths == (str(log),)
    assert loaded.embeddings[0].vector_column == "embedding"
    assert loaded.features is not None and loaded.features.items is not None
    kinds = {feature.name: feature.kind for feature in loaded.features.items.features}
    assert kinds == {"title": "categorical", "genres": "list", "year": "numeric"}
    lines = [line.strip() for line in file.read_text().splitlines()]
    assert lines[lines.index("# guessed: column 'userId' is int64") + 1].startswith("user_column: userId")
    assert all(f"# {note}" in lines for note in notes.values())


def test_a_column_per_dimension_is_recognised_by_its_prefix(tmp_path: Path, log: Path) -> None:
    vectors = write(tmp_path / "vectors.parquet", id=[7], dim_0=[0.5], dim_1=[0.25])
    config, _ = guess_config(starter_config(), log_path=log, items_path=None, vectors_path=vectors, config_folder=tmp_path)
    assert (config.embeddings[0].id_column, config.embeddings[0].dimension_prefix) == ("id", "dim_")


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"a": [1], "item_id": [1], "ts": [1]}, "no column is recognised as the user .* the columns are a, item_id, ts"),
        ({"user_id": [1], "item_id": [1]}, "no column is recognised as the timestamp"),
    ],
)
def test_a_column_that_cannot_be_guessed_is_an_input_error(
    tmp_path: Path, columns: dict[str, list[int]], expected: str
) -> None:
    log = write(tmp_path / "other.parquet", **columns)
    with pytest.raises(InputError, match=expected):
        guess_config(starter_config(), log_path=log, items_path=None, vectors_path=None, config_folder=tmp_path)


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent.parquet: no such parquet file"):
        guess_config(
            starter_config(), log_path=tmp_path / "absent.parquet", items_path=None, vectors_path=None, config_folder=tmp_path
        )
