"""Opening of parquet files: their order and records, and the rejection of invalid files before a row is read."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys_core.errors import InputError
from recsys_core.parquet.columns import id_type, require_column
from recsys_core.parquet.sources import open_sources, reject_copies
from tests.recsys_core.ingest.parquet_files import raises_input_error, write_parquet


def test_sources_are_sorted_and_each_file_occurs_once(tmp_path: Path) -> None:
    for stem in ("b", "a", "c"):
        write_parquet(tmp_path / f"{stem}.parquet", x=[1, 2])
    sources = open_sources([str(tmp_path / "b.parquet"), str(tmp_path / "*.parquet")], setting="paths")
    assert [source.path.name for source in sources] == ["a.parquet", "b.parquet", "c.parquet"]
    assert [source.record.num_rows for source in sources] == [2, 2, 2]


def test_folders_that_match_a_glob_are_skipped(tmp_path: Path) -> None:
    write_parquet(tmp_path / "one" / "a.parquet", x=[1])
    assert len(open_sources([str(tmp_path / "**")], setting="paths")) == 1


def test_the_record_changes_with_the_content(tmp_path: Path) -> None:
    footer_digests = set()
    for column_values in ([1, 2], [1, 3], [1.0, 3.0]):
        path = write_parquet(tmp_path / "a.parquet", x=column_values)
        footer_digests.add(open_sources([path], setting="paths")[0].record.footer_sha256)
        assert open_sources([path], setting="paths")[0].record.size_bytes == Path(path).stat().st_size
    assert len(footer_digests) == 3


def test_the_error_names_a_glob_without_a_match(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", x=[1])
    with raises_input_error("embeddings.paths: no file matches: ", str(tmp_path / "*.pq")):
        open_sources([str(tmp_path / "*.parquet"), str(tmp_path / "*.pq")], setting="embeddings.paths")


def test_tables_without_rows_are_rejected_but_one_empty_file_among_others_is_not(tmp_path: Path) -> None:
    no_values = pa.array([], pa.int64())
    for stem in ("a", "b", "c"):
        write_parquet(tmp_path / f"{stem}.parquet", x=no_values)
    with raises_input_error("paths: ", str(tmp_path / "a.parquet"), "and 2 more", "no rows"):
        open_sources([str(tmp_path / "*.parquet")], setting="paths")
    write_parquet(tmp_path / "d.parquet", x=[1])
    assert len(open_sources([str(tmp_path / "*.parquet")], setting="paths")) == 4


def test_the_message_about_a_missing_column_has_the_nearest_name(tmp_path: Path) -> None:
    (source,) = open_sources([write_parquet(tmp_path / "a.parquet", userid=[1], item=[2])], setting="paths")
    with raises_input_error("a.parquet", "no column 'user_id'", "interactions.user_column", "did you mean 'userid'?", "'item'"):
        require_column(source, "user_id", setting="interactions.user_column")
    with raises_input_error("no column 'zzz' (user_column); it has ['userid', 'item']"):
        require_column(source, "zzz", setting="user_column")


def test_a_repeated_column_is_rejected(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["id", "id"]), tmp_path / "a.parquet")
    (source,) = open_sources([str(tmp_path / "a.parquet")], setting="paths")
    with raises_input_error("a.parquet", "2 columns are named 'id'", "rename"):
        require_column(source, "id", setting="user_column")


@pytest.mark.parametrize(
    ("ids", "expected_type"),
    [
        (pa.array([1], pa.int8()), "int64"),
        (pa.array([1], pa.uint64()), "int64"),
        (pa.array([1]).dictionary_encode(), "int64"),
        (pa.array(["a"]), "string"),
        (pa.array(["a"], pa.large_string()), "string"),
        (pa.array(["a"]).dictionary_encode(), "string"),
    ],
)
def test_ids_of_every_integer_or_string_type_are_int64_or_string(tmp_path: Path, ids: pa.Array, expected_type: str) -> None:
    sources = open_sources([write_parquet(tmp_path / "a.parquet", id=ids)], setting="paths")
    assert id_type(sources, "id", setting="user_column") == expected_type


@pytest.mark.parametrize("ids", [pa.array([1.0]), pa.array([True]), pa.array([b"a"]), pa.array([[1]]), pa.nulls(1)])
def test_ids_of_any_other_type_are_rejected(tmp_path: Path, ids: pa.Array) -> None:
    sources = open_sources([write_parquet(tmp_path / "a.parquet", id=ids)], setting="paths")
    with raises_input_error("a.parquet: column 'id' is ", "ids are integers or strings"):
        id_type(sources, "id", setting="user_column")


def test_the_error_names_two_files_with_ids_of_different_types(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", id=[1])
    write_parquet(tmp_path / "b.parquet", id=["1"])
    sources = open_sources([str(tmp_path / "*.parquet")], setting="paths")
    with raises_input_error("b.parquet: column 'id' is string, but int64 in ", "a.parquet; write one type in all files"):
        id_type(sources, "id", setting="user_column")


def test_a_byte_copy_of_a_file_is_rejected_unless_it_is_in_another_partition(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2]})
    for relative_path in ("dt=1/x.parquet", "dt=2/x.parquet", "dt=2/y.parquet", "dt=2/empty-1.parquet", "dt=2/empty-2.parquet"):
        (tmp_path / relative_path).parent.mkdir(exist_ok=True)
        pq.write_table(table if "empty" not in relative_path else table.slice(0, 0), tmp_path / relative_path)
    # y and z of the first partition have different values but equal footers, because they are written without statistics.
    pq.write_table(pa.table({"a": [3, 4]}), tmp_path / "dt=1/y.parquet", write_statistics=False, use_dictionary=False)
    pq.write_table(pa.table({"a": [5, 6]}), tmp_path / "dt=1/z.parquet", write_statistics=False, use_dictionary=False)
    with pytest.raises(InputError, match=r"^log: .*dt=2/y\.parquet is a byte copy of .*dt=2/x\.parquet, so its 2 rows would"):
        reject_copies(open_sources([str(tmp_path)], setting="log"), setting="log")
    (tmp_path / "dt=2/y.parquet").unlink()
    reject_copies(open_sources([str(tmp_path)], setting="log"), setting="log")
