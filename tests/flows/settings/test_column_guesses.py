"""`nightjar init --log --items --vectors`: columns guessed from real parquet files."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.settings.column_guesses import FILL_IN, InitInputs, guess_config
from flows.settings.config_file import load_config
from flows.settings.pipeline import PipelineConfig
from flows.settings.template import starter_config, to_commented_yaml
from recsys_core.errors import InputError
from recsys_core.ingest.log.config import InteractionsConfig
from recsys_core.ingest.log.split_config import FileSplit

NUM_EVENTS = 1_000
RANDOM = np.random.default_rng(0)
TIMES_S = 1_700_000_000 + np.arange(NUM_EVENTS)


def random_ids(num_distinct: int) -> np.ndarray:
    """Return NUM_EVENTS random ids below `num_distinct`."""
    return RANDOM.integers(0, num_distinct, NUM_EVENTS)


def write_parquet(path: Path, **columns: object) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def guess(folder: Path, **inputs: str) -> tuple[PipelineConfig, dict[str, str]]:
    return guess_config(starter_config(), InitInputs(**inputs), config_folder=folder)


def guess_log(folder: Path, columns: dict[str, object], **inputs: str) -> tuple[InteractionsConfig, dict[str, str]]:
    config, note_by_setting = guess(folder, log=write_parquet(folder / "log.parquet", **columns), **inputs)
    return config.interactions, note_by_setting


def unguessed_settings(note_by_setting: dict[str, str]) -> list[str]:
    return [setting for setting, note in note_by_setting.items() if note.startswith(FILL_IN)]


def columns_of(interactions: InteractionsConfig) -> tuple[str, str, str | None]:
    return interactions.user_column, interactions.item_column, interactions.timestamp_column


@pytest.fixture
def log_path(tmp_path: Path) -> str:
    return write_parquet(
        tmp_path / "ratings.parquet", userId=[1, 2], movieId=[7, 8], rating=[1.0, 5.0], timestamp=[1_700_000_000_000] * 2
    )


def test_guessed_columns_are_written_with_a_comment_and_load(tmp_path: Path, log_path: str) -> None:
    items_path = write_parquet(tmp_path / "movies.parquet", movieId=[7], title=["Up"], genres=[["a", "b"]], year=[2009.0])
    vectors = pa.FixedSizeListArray.from_arrays(pa.array([0.0, 1.0], pa.float32()), 2)
    vectors_path = write_parquet(tmp_path / "vectors.parquet", item_id=[7], values=vectors)
    config, note_by_setting = guess(tmp_path, log=log_path, items=items_path, vectors=vectors_path)
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(to_commented_yaml(config, note_by_setting=note_by_setting, every_setting=False))
    loaded_config = load_config(config_path)
    assert loaded_config == config.with_absolute_paths(tmp_path)
    interactions = loaded_config.interactions
    assert columns_of(interactions) == ("userId", "movieId", "timestamp")
    assert (interactions.timestamp_unit, interactions.label_column, interactions.label_threshold) == ("ms", "rating", 3.0)
    assert interactions.paths == (log_path,)
    assert loaded_config.embeddings[0].vector_column == "values"
    assert loaded_config.features is not None and loaded_config.features.items is not None
    kind_by_feature = {feature.name: feature.kind for feature in loaded_config.features.items.features}
    assert kind_by_feature == {"genres": "list", "year": "numeric"}
    assert loaded_config.features.items.title_column == "title"
    lines = [line.strip() for line in config_path.read_text().splitlines()]
    assert lines[lines.index("# guessed: column 'userId' is int64") + 1].startswith("user_column: userId")
    assert all(f"# {note}" in lines for note in note_by_setting.values())


@pytest.mark.parametrize(
    "column_names",
    [
        ("customer", "sku", "ts"),
        ("CUSTOMER_KEY", "product_code", "created_at"),
        ("u", "i", "event_time"),
        ("uid", "asin", "date"),
    ],
)
def test_columns_are_recognised_by_their_names(tmp_path: Path, column_names: tuple[str, str, str]) -> None:
    interactions, note_by_setting = guess_log(
        tmp_path, dict(zip(column_names, (random_ids(200), random_ids(50), TIMES_S), strict=True))
    )
    assert columns_of(interactions) == column_names and unguessed_settings(note_by_setting) == []


def test_the_name_decides_between_several_columns_with_times(tmp_path: Path) -> None:
    columns = {"customer": TIMES_S, "item": random_ids(50), "loaded": pa.array(TIMES_S, pa.timestamp("s")), "time": TIMES_S}
    assert columns_of(guess_log(tmp_path, columns)[0]) == ("customer", "item", "time")
    assert guess_log(tmp_path, columns, time_column="loaded")[0].timestamp_column == "loaded"


def test_the_note_of_an_unrecognised_column_lists_the_possible_columns(tmp_path: Path) -> None:
    config, note_by_setting = guess(
        tmp_path, log=write_parquet(tmp_path / "log.parquet", a=np.arange(NUM_EVENTS) % 200, b=np.arange(NUM_EVENTS) % 50)
    )
    expected_settings = ["interactions.timestamp_column", "interactions.user_column", "interactions.item_column"]
    assert unguessed_settings(note_by_setting) == expected_settings
    assert note_by_setting["interactions.user_column"] == "FILL IN the column of the users: one of ['a', 'b']"
    assert note_by_setting["interactions.timestamp_column"].endswith(
        "for a log without times, use --test, or write timestamp_column: null, order_column and split: {kind: leave_last_out}"
    )
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(to_commented_yaml(config, note_by_setting=note_by_setting, every_setting=False))
    assert columns_of(load_config(config_path).interactions) == (
        "<column of the users>", "<column of the items>", "<column of the times>",
    )  # fmt: skip


def test_the_note_of_a_column_that_cannot_be_used_has_its_type_and_the_usable_types(tmp_path: Path) -> None:
    user_ids, time_texts = pa.array([1.0, None], pa.float64()), pa.array(["2026-01-01", "2026-01-02"])
    log_path = write_parquet(tmp_path / "log.parquet", user_id=user_ids, item_id=[7, 8], time=time_texts)
    _, note_by_setting = guess(
        tmp_path, log=log_path, vectors=write_parquet(tmp_path / "v.parquet", item_id=[7], vector=["0.5 0.25"])
    )
    assert note_by_setting["interactions.user_column"] == (
        "FILL IN the column of the users: one of ['item_id', 'time']; ids are integers or strings, unlike ['user_id (double)']"
    )
    assert (
        "one of ['item_id']; times are timestamps, dates or integers, unlike ['user_id (double)', 'time (string)']"
        in (note_by_setting["interactions.timestamp_column"])
    )
    assert note_by_setting["embeddings.vector_column"] == (
        "FILL IN the column of the vectors: no column can be used; vectors are lists of floats, unlike ['item_id (int64)', "
        "'vector (string)']"
    )


def test_a_split_log_without_times_needs_no_further_settings(tmp_path: Path) -> None:
    for name in ("train.parquet", "test.parquet"):
        write_parquet(tmp_path / name, user=random_ids(200), item=random_ids(50))
    config, note_by_setting = guess(tmp_path, log=str(tmp_path / "train.parquet"), test=str(tmp_path / "test.parquet"))
    assert columns_of(config.interactions) == ("user", "item", None) and unguessed_settings(note_by_setting) == []
    split = config.interactions.split
    assert isinstance(split, FileSplit) and (split.test_paths, split.validation_share) == (("test.parquet",), 0.1)
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(to_commented_yaml(config, note_by_setting=note_by_setting, every_setting=False))
    assert not load_config(config_path).model.history.last_item_feature
    config, _ = guess(
        tmp_path,
        log=write_parquet(tmp_path / "log.parquet", user=random_ids(200), item=random_ids(50), ts=TIMES_S),
        test=str(tmp_path),
    )
    assert config.interactions.timestamp_column == "ts" and config.model.history.last_item_feature


@pytest.mark.parametrize(
    ("ratings", "threshold"),
    [
        (np.full(NUM_EVENTS, np.nan), None),
        (np.where(np.arange(NUM_EVENTS) % 2, np.inf, 3.0), None),
        (np.where(np.arange(NUM_EVENTS) % 3, np.arange(NUM_EVENTS) % 5 + 1, np.nan), 3.0),
        ((np.arange(NUM_EVENTS) % 5 + 1).astype(np.float16), 3.0),
        (pa.array(np.arange(NUM_EVENTS) % 5 + 1).cast(pa.decimal128(21, 1)), 3.0),
        (np.arange(NUM_EVENTS) % 2 == 0, 0.5),
        (pa.nulls(NUM_EVENTS, pa.float64()), None),
    ],
    ids=["nan", "infinite", "some nan", "float16", "decimal", "bool", "null"],
)
def test_the_label_threshold_is_the_middle_of_the_finite_labels(tmp_path: Path, ratings: Any, threshold: float | None) -> None:
    columns = {"user": random_ids(200), "item": random_ids(50), "time": TIMES_S, "rating": ratings}
    interactions, _ = guess_log(tmp_path, columns)
    assert interactions.label_threshold == threshold
    assert interactions.label_column == (None if threshold is None else "rating")


def test_columns_from_options_are_not_guessed(tmp_path: Path) -> None:
    columns = {"user": random_ids(200), "a": random_ids(300), "b": random_ids(50), "c": TIMES_S}
    interactions, note_by_setting = guess_log(tmp_path, columns, user_column="a", item_column="b", time_column="c")
    assert columns_of(interactions) == ("a", "b", "c") and list(note_by_setting) == ["interactions.timestamp_unit"]
    with pytest.raises(InputError, match=r"log.parquet: no column 'usr' \(interactions.user_column\); did you mean 'user'?"):
        guess_log(tmp_path, columns, user_column="usr")
    with pytest.raises(InputError, match="user_column and item_column are both 'a'"):
        guess_log(tmp_path, columns, user_column="a", item_column="a")


def test_the_id_column_of_the_vectors_is_the_item_column_of_the_log(tmp_path: Path) -> None:
    log_path = write_parquet(tmp_path / "log.parquet", user=random_ids(200), thing=random_ids(50), ts=TIMES_S)
    vectors_path = write_parquet(tmp_path / "vectors.parquet", id=[7], thing=[7], dim_0=[0.5], dim_1=[0.25])
    config, _ = guess(tmp_path, log=log_path, vectors=vectors_path, item_column="thing")
    assert (config.embeddings[0].id_column, config.embeddings[0].dimension_prefix) == ("thing", "dim_")
    config, note_by_setting = guess(tmp_path, vectors=write_parquet(tmp_path / "none.parquet", id=[7], thing=[7]))
    assert config.embeddings[0].id_column == "id" and unguessed_settings(note_by_setting) == ["embeddings.vector_column"]


def test_a_column_with_a_name_in_another_alphabet_is_not_the_id_column(tmp_path: Path, log_path: str) -> None:
    columns = {"名前": ["a", "b"], "商品コード": ["1", "2"], "embedding": [[0.5], [1.5]]}
    config, note_by_setting = guess(tmp_path, log=log_path, vectors=write_parquet(tmp_path / "vectors.parquet", **columns))
    assert config.embeddings[0].id_column == "<column of the item ids>"
    assert unguessed_settings(note_by_setting) == ["embeddings.id_column"]


def test_the_note_of_the_features_has_the_columns_that_are_left_out(tmp_path: Path, log_path: str) -> None:
    columns = {"item_id": [1, 2], "in stock": [1, 2]} | {f"genre{index}": [1, 2] for index in range(22)}
    config, note_by_setting = guess(tmp_path, log=log_path, items=write_parquet(tmp_path / "items.parquet", **columns))
    assert config.features is not None and config.features.items is not None
    assert [feature.name for feature in config.features.items.features] == [f"genre{index}" for index in range(20)]
    assert note_by_setting["features.items.features"].endswith("; left out: ['in stock', 'genre20', 'genre21']")


def test_a_table_with_titles_alone_has_no_features(tmp_path: Path, log_path: str) -> None:
    items_path = write_parquet(tmp_path / "movies.parquet", movieId=[7], Name=["Up"])
    config, note_by_setting = guess(tmp_path, log=log_path, items=items_path)
    assert config.features is not None and config.features.items is not None
    assert (config.features.items.title_column, config.features.items.features) == ("Name", ())
    assert note_by_setting["features.items.title_column"] == "guessed: column 'Name' is string"


def test_decimals_in_an_item_table_are_numeric_features(tmp_path: Path, log_path: str) -> None:
    items_path = write_parquet(tmp_path / "movies.parquet", movieId=[7], price=pa.array([Decimal("9.90")]))
    config, _ = guess(tmp_path, log=log_path, items=items_path)
    assert config.features is not None and config.features.items is not None
    (feature,) = config.features.items.features
    assert (feature.name, feature.kind, feature.standardise) == ("price", "numeric", True)
    assert config.features.items.title_column is None


def test_partition_folders_are_columns(tmp_path: Path) -> None:
    folder = tmp_path / "log" / "dt=2026-11-19"
    folder.mkdir(parents=True)
    write_parquet(folder / "0.parquet", user=random_ids(200), item=random_ids(50))
    config, _ = guess(tmp_path, log=str(tmp_path / "log"))
    assert columns_of(config.interactions) == ("user", "item", "dt") and config.interactions.paths == ("log",)


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent.parquet"):
        guess(tmp_path, log=str(tmp_path / "absent.parquet"))
