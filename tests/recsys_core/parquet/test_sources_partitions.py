"""Hive partition keys in folder names, and columns with the same name in several files."""

from datetime import date
from pathlib import Path

import pyarrow as pa
import pytest

from recsys_core.parquet.columns import id_type, require_column, require_same_type_in_files
from recsys_core.parquet.sources import open_sources
from tests.recsys_core.ingest.parquet_files import raises_input_error, write_parquet


def test_hive_keys_are_columns_with_a_type_that_fits_all_files(tmp_path: Path) -> None:
    for day, shop, code in (("2026-11-18", "01", "7"), ("2026-11-19", "2", "x")):
        write_parquet(tmp_path / f"dt={day}" / f"shop={shop}" / f"code={code}" / "a.parquet", x=[1])
    sources = open_sources([str(tmp_path)], setting="paths")
    assert [require_column(sources[0], key, setting="context_columns") for key in ("dt", "shop", "code")] == [
        pa.date32(),
        pa.int64(),
        pa.string(),
    ]
    assert [[source.partition_value(key) for key in ("dt", "shop", "code")] for source in sources] == [
        [date(2026, 11, 18), 1, "7"],
        [date(2026, 11, 19), 2, "x"],
    ]
    assert sources[0].columns == ("x", "dt", "shop", "code")
    assert id_type(sources, "shop", setting="context_columns") == "int64"


@pytest.mark.parametrize("key_text", ["9223372036854775808", "2026-02-31", "1.5", "", "٣"])
def test_hive_keys_other_than_integers_and_dates_are_text(tmp_path: Path, key_text: str) -> None:
    write_parquet(tmp_path / f"key={key_text}" / "a.parquet", x=[1])
    (source,) = open_sources([str(tmp_path)], setting="paths")
    assert require_column(source, "key", setting="context_columns") == pa.string()
    assert source.partition_value("key") == key_text


def test_files_with_different_keys_are_rejected(tmp_path: Path) -> None:
    write_parquet(tmp_path / "dt=1" / "a.parquet", x=[1])
    write_parquet(tmp_path / "dt=1" / "hour=2" / "b.parquet", x=[1])
    with raises_input_error("hour=2/b.parquet: its folders have the keys ['dt', 'hour'], but ['dt'] in ", "dt=1/a.parquet"):
        open_sources([str(tmp_path)], setting="paths")


def test_a_key_that_occurs_twice_in_the_path_is_rejected(tmp_path: Path) -> None:
    write_parquet(tmp_path / "dt=1" / "dt=2" / "a.parquet", x=[1])
    with raises_input_error("a.parquet: two folders in the path have the key 'dt'"):
        open_sources([str(tmp_path)], setting="paths")


def test_a_null_key_is_rejected_if_it_is_used(tmp_path: Path) -> None:
    write_parquet(tmp_path / "dt=__HIVE_DEFAULT_PARTITION__" / "a.parquet", x=[1])
    write_parquet(tmp_path / "dt=3" / "a.parquet", x=[1])
    source_with_null_key, source_with_key = sorted(
        open_sources([str(tmp_path)], setting="paths"), key=lambda source: "HIVE" not in source.name
    )
    assert require_column(source_with_key, "dt", setting="context_columns") == pa.int64()
    with raises_input_error("the key 'dt' of its path is null (context_columns)"):
        require_column(source_with_null_key, "dt", setting="context_columns")


@pytest.mark.parametrize(
    "column",
    [[1, 2], pa.array([2, None]), pa.array([2.0, 2.5]), [True, True], [[2], [2]]],
    ids=["other value", "null", "float", "bool", "list"],
)
def test_a_hive_key_and_a_column_of_one_name_have_to_agree(tmp_path: Path, column: object) -> None:
    write_parquet(tmp_path / "shop=2" / "a.parquet", shop=column)
    (source,) = open_sources([str(tmp_path)], setting="paths")
    with raises_input_error(
        "a.parquet: column 'shop' (context_columns) is '2' in the path, but the file has a column of that name"
    ):
        require_column(source, "shop", setting="context_columns")


def test_a_text_in_the_path_may_also_be_a_column_of_the_file(tmp_path: Path) -> None:
    write_parquet(tmp_path / "shop=2" / "a.parquet", shop=["2", "2"])
    (source,) = open_sources([str(tmp_path)], setting="paths")
    assert require_column(source, "shop", setting="context_columns") == pa.string()


def test_a_day_in_the_path_may_also_be_a_column_of_the_file(tmp_path: Path) -> None:
    for day_type in (pa.date32(), pa.timestamp("us"), pa.string()):
        write_parquet(tmp_path / "dt=2026-11-19" / "a.parquet", dt=pa.array(["2026-11-19"] * 2).cast(day_type))
        (source,) = open_sources([str(tmp_path)], setting="paths")
        assert require_column(source, "dt", setting="context_columns") == day_type


def test_the_message_about_a_missing_key_has_the_nearest_key(tmp_path: Path) -> None:
    write_parquet(tmp_path / "country=NO" / "a.parquet", x=[1])
    (source,) = open_sources([str(tmp_path)], setting="paths")
    with raises_input_error("no column 'contry' (context_columns); did you mean 'country'? it has ['x', 'country']"):
        require_column(source, "contry", setting="context_columns")


@pytest.mark.parametrize(
    ("first_column", "second_column"),
    [
        (pa.array([1]), pa.array(["1"])),
        (pa.array([1]), pa.array([1.0])),
        (pa.array([1], pa.timestamp("us")), pa.array([1], pa.timestamp("us", "UTC"))),
        (pa.array([[1.0]]), pa.array([1.0])),
        (pa.array([["a"]]), pa.array([[1]])),
        (pa.array([1]), pa.array([True])),
    ],
)
def test_columns_of_different_types_are_rejected_with_both_files_and_types(
    tmp_path: Path, first_column: pa.Array, second_column: pa.Array
) -> None:
    write_parquet(tmp_path / "a.parquet", y=[0], x=first_column)
    write_parquet(tmp_path / "b.parquet", y=[0], x=second_column)
    sources = open_sources([str(tmp_path)], setting="paths")
    require_same_type_in_files(sources, "y", setting="context_columns")
    with raises_input_error(
        "b.parquet: column 'x' is ",
        str(second_column.type)[:4],
        ", but ",
        str(first_column.type)[:4],
        "a.parquet; write one type in all files",
    ):
        require_same_type_in_files(sources, "x", setting="context_columns")


@pytest.mark.parametrize(
    ("first_column", "second_column"),
    [
        (pa.array([1], pa.int8()), pa.array([1], pa.uint64())),
        (pa.array([1.0], pa.float32()), pa.array([1.0])),
        (pa.array(["a"]), pa.array(["a"], pa.large_string()).dictionary_encode()),
        (pa.array([1], pa.timestamp("ns")), pa.array([1], pa.timestamp("ms"))),
        (pa.array([[1.0]], pa.list_(pa.float32(), 1)), pa.array([[1.0]], pa.large_list(pa.float64()))),
    ],
)
def test_the_widths_and_units_of_a_column_may_differ_between_files(
    tmp_path: Path, first_column: pa.Array, second_column: pa.Array
) -> None:
    write_parquet(tmp_path / "a.parquet", x=first_column)
    write_parquet(tmp_path / "b.parquet", x=second_column)
    sources = open_sources([str(tmp_path)], setting="paths")
    assert len({source.schema.field("x").type for source in sources}) == 2
    require_same_type_in_files(sources, "x", setting="context_columns")
