"""The files that a path, glob or folder selects, and the rejection of files outside of allowed_data_root."""

import os
from pathlib import Path

import pytest

from recsys_core.parquet.locations import find_files
from recsys_core.parquet.sources import check_distinct_files, open_sources
from tests.recsys_core.ingest.parquet_files import raises_input_error, write_parquet


def matched_paths(pattern: object, folder: Path, *, allowed_data_root: Path | None = None) -> list[str]:
    """Return the sorted paths of the files that the pattern selects, relative to the folder."""
    sources = open_sources([str(pattern)], setting="paths", allowed_data_root=allowed_data_root)
    return [str(Path(source.name).relative_to(folder)) for source in sources]


def test_a_folder_selects_the_parquet_files_below_it_except_hidden_files(tmp_path: Path) -> None:
    for relative_path in (
        "b.parquet",
        "sub/deep/a.parquet",
        "_SUCCESS",
        "notes.txt",
        "_temporary/half.parquet",
        ".c.parquet",
        "sub/_d.parquet",
    ):
        write_parquet(tmp_path / "log" / relative_path, x=[1])
    assert matched_paths(tmp_path / "log", tmp_path) == ["log/b.parquet", "log/sub/deep/a.parquet"]
    assert matched_paths(f"{tmp_path}/log/", tmp_path) == ["log/b.parquet", "log/sub/deep/a.parquet"]


def test_the_error_names_a_folder_without_parquet_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "log" / "_temporary" / "half.parquet", x=[1])
    (tmp_path / "log" / "notes.txt").write_text("x")
    with raises_input_error("interactions.paths: no *.parquet file in or below the folder ", str(tmp_path / "log")):
        open_sources([str(tmp_path / "log")], setting="interactions.paths")


@pytest.mark.parametrize("marker_file", ["_delta_log/00000000000000000000.json", "metadata/v1.metadata.json"])
def test_folders_of_delta_and_iceberg_tables_are_rejected(tmp_path: Path, marker_file: str) -> None:
    write_parquet(tmp_path / "log" / "data" / "a.parquet", x=[1])
    (tmp_path / "log" / marker_file).parent.mkdir()
    (tmp_path / "log" / marker_file).touch()
    with raises_input_error(f"paths: {tmp_path}/log is a Delta or Iceberg table", "set interactions.format"):
        matched_paths(tmp_path / "log", tmp_path)
    assert matched_paths(tmp_path / "log" / "data", tmp_path) == ["log/data/a.parquet"]


def test_a_glob_skips_hidden_files_unless_it_names_them(tmp_path: Path) -> None:
    for relative_path in ("a.parquet", "_b.parquet", ".c.parquet", "_old/d.parquet"):
        write_parquet(tmp_path / relative_path, x=[1])
    assert matched_paths(tmp_path / "*.parquet", tmp_path) == ["a.parquet"]
    assert matched_paths(tmp_path / "**/*.parquet", tmp_path) == ["a.parquet"]
    assert matched_paths(tmp_path / "_*.parquet", tmp_path) == ["_b.parquet"]
    assert matched_paths(tmp_path / "_old/*.parquet", tmp_path) == ["_old/d.parquet"]
    assert matched_paths(tmp_path / "_b.parquet", tmp_path) == ["_b.parquet"]


def test_a_folder_whose_name_has_a_leading_dot_or_pattern_characters_is_read(tmp_path: Path) -> None:
    for folder in (".hidden", "day[1]", "a*b"):
        write_parquet(tmp_path / folder / "a.parquet", x=[1])
        assert matched_paths(tmp_path / folder, tmp_path) == [f"{folder}/a.parquet"]


def test_the_message_about_a_glob_names_matching_folders(tmp_path: Path) -> None:
    for day in (1, 2):
        write_parquet(tmp_path / f"dt={day}" / "a.parquet", x=[1])
    with raises_input_error("paths: no file matches: ", "dt=*; 2 folders match: append /**/*.parquet"):
        matched_paths(tmp_path / "dt=*", tmp_path)
    assert matched_paths(tmp_path / "dt=*" / "**" / "*.parquet", tmp_path) == ["dt=1/a.parquet", "dt=2/a.parquet"]


def test_relative_patterns_stay_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "log" / "a.parquet", x=[1])
    monkeypatch.chdir(tmp_path)
    for pattern in ("log", "log/*.parquet", "log/a.parquet", "**/*.parquet", "*/a.parquet"):
        assert [source.name for source in open_sources([pattern], setting="paths")] == ["log/a.parquet"]


@pytest.mark.parametrize("stem", ['it\'s "quoted"', "a*b?[c]", "日本 \u202e🚀", "x;DROP TABLE y--"])
def test_a_file_name_may_have_any_characters(tmp_path: Path, stem: str) -> None:
    file_name = f"{stem}.parquet"
    write_parquet(tmp_path / file_name, x=[1])
    (tmp_path / "acb1c.parquet").write_bytes(b"not parquet, and not selected")
    (source,) = open_sources([str(tmp_path / file_name)], setting="paths")
    assert source.path == tmp_path / file_name
    with source.open() as file:
        assert file.read()["x"].to_pylist() == [1]


def test_control_characters_of_a_file_name_are_escaped_in_messages(tmp_path: Path) -> None:
    (tmp_path / "a\n\x1b[31m.parquet").write_bytes(b"")
    with raises_input_error(r"a\n\x1b[31m.parquet: not a readable parquet file (0 bytes): it is empty"):
        open_sources([str(tmp_path)], setting="paths")


def test_a_file_name_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.parquet")).write_bytes(b"")
    with raises_input_error(r"\udcff.parquet: not a readable parquet file (0 bytes): ", "surrogates not allowed"):
        open_sources([str(tmp_path)], setting="paths")


def test_a_path_with_a_null_character_is_rejected() -> None:
    with raises_input_error(r"paths: no such file: a\x00b"):
        open_sources(["a\0b"], setting="paths")


def test_a_file_name_that_is_too_long_is_rejected() -> None:
    long_name = 300 * "a"
    with raises_input_error(f"paths: {long_name}: File name too long; check the path and its permissions"):
        open_sources([long_name], setting="paths")


def test_cyclic_links_are_followed_once(tmp_path: Path) -> None:
    write_parquet(tmp_path / "log" / "a.parquet", x=[1])
    for link_name in ("again", "and_again"):
        (tmp_path / "log" / link_name).symlink_to(tmp_path / "log")
    for pattern in ("log", "log/**/*.parquet"):
        assert matched_paths(tmp_path / pattern, tmp_path) == ["log/a.parquet"]


@pytest.mark.parametrize("link_kind", ["symbolic", "hard", "folder", "partition"])
def test_a_file_that_is_reached_twice_is_rejected_with_both_paths_in_the_message(tmp_path: Path, link_kind: str) -> None:
    original_path = tmp_path / "log" / "dt=2026-11-19" / "day.parquet"
    link_path = (
        tmp_path / "log" / "dt=2026-11-20" / "newest.parquet"
        if link_kind == "partition"
        else original_path.with_name("newest.parquet")
    )
    write_parquet(original_path, x=[1])
    link_path.parent.mkdir(exist_ok=True)
    if link_kind == "hard":
        link_path.hardlink_to(original_path)
    elif link_kind == "folder":
        (tmp_path / "log" / "newest").symlink_to(original_path.parent)
        link_path = tmp_path / "log" / "newest" / "day.parquet"
    else:
        link_path.symlink_to(original_path)
    for patterns in ([tmp_path / "log"], [original_path, link_path], [tmp_path / "log" / "*" / "*.parquet"]):
        with raises_input_error(f"paths: {link_path}: is the same file as {original_path}, through a link or another spelling"):
            open_sources([str(pattern) for pattern in patterns], setting="paths")


def test_a_file_in_two_settings_is_rejected_without_a_hint_at_links(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, x=[1])
    (source,) = open_sources([str(path)], setting="paths")
    with raises_input_error(f"train and test: {path}: is listed twice, so its rows would count twice; list it once"):
        check_distinct_files([source.location, source.location], setting="train and test")


def test_a_file_that_two_patterns_match_counts_once(tmp_path: Path) -> None:
    write_parquet(tmp_path / "log" / "a.parquet", x=[1])
    folder_and_glob = [str(tmp_path / "log"), str(tmp_path / "log" / "*.parquet")]
    assert len(open_sources(folder_and_glob, setting="paths")) == 1
    with raises_input_error("paths: ", "is the same file as "):
        open_sources([*folder_and_glob, f"{tmp_path}/log/../log/a.parquet"], setting="paths")


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    write_parquet(tmp_path / "store" / "a.parquet", x=[1])
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "newest").symlink_to(tmp_path / "store")
    assert matched_paths(tmp_path / "log", tmp_path) == ["log/newest/a.parquet"]


def test_pipes_and_dangling_links_are_skipped(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", x=[1])
    os.mkfifo(tmp_path / "pipe.parquet")
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nowhere")
    assert matched_paths(tmp_path, tmp_path) == ["a.parquet"]
    with raises_input_error("no such file: ", "pipe.parquet"):
        matched_paths(tmp_path / "pipe.parquet", tmp_path)


@pytest.mark.parametrize(
    "pattern", ["root/../secret.parquet", "root/link.parquet", "root/links/*.parquet", "root/l*.parquet", "root"]
)
def test_paths_that_lead_out_of_allowed_data_root_are_rejected(tmp_path: Path, pattern: str) -> None:
    outside_path = write_parquet(tmp_path / "secret.parquet", x=[1])
    (tmp_path / "root" / "links").mkdir(parents=True)
    for link_name in ("link.parquet", "links/a.parquet"):
        (tmp_path / "root" / link_name).symlink_to(outside_path)
    with raises_input_error(
        "paths: ", "root", f"resolves to {outside_path}, which is not below allowed_data_root ({tmp_path / 'root'}); move"
    ):
        matched_paths(tmp_path / pattern, tmp_path, allowed_data_root=tmp_path / "root")
    if pattern != "root":  # the pattern "root" selects both links, which are the same file
        assert len(open_sources([str(tmp_path / pattern)], setting="paths")) == 1


def test_files_below_allowed_data_root_are_read_through_links_and_dots(tmp_path: Path) -> None:
    write_parquet(tmp_path / "root" / "log" / "a.parquet", x=[1])
    (tmp_path / "root" / "link.parquet").symlink_to(tmp_path / "root" / "log" / "a.parquet")
    (tmp_path / "alias").symlink_to(tmp_path / "root")
    for pattern in ("root/log/../log/a.parquet", "root/link.parquet", "alias/log"):
        for root in ("root", "alias", "root/../root"):
            assert len(open_sources([str(tmp_path / pattern)], setting="paths", allowed_data_root=tmp_path / root)) == 1


def test_a_folder_whose_name_begins_with_the_name_of_the_root_is_outside(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with raises_input_error("which is not below allowed_data_root"):
        matched_paths(write_parquet(tmp_path / "root2" / "a.parquet", x=[1]), tmp_path, allowed_data_root=tmp_path / "root")


def test_a_file_uri_is_a_local_path(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a b" / "x.parquet", x=[1])
    for uri in (f"file://{tmp_path}/a%20b", f"file://localhost{tmp_path}/a b/*.parquet"):
        (source,) = open_sources([uri], setting="paths", allowed_data_root=tmp_path)
        assert source.is_local and source.name == f"{tmp_path}/a b/x.parquet"
    with raises_input_error("which is not below allowed_data_root"):
        open_sources([f"file://{tmp_path}/a%20b"], setting="paths", allowed_data_root=tmp_path / "other")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (
            "http://host/log.parquet",
            "paths: http://host/log.parquet: http:// is not supported; use a local path, file://, s3://",
        ),
        ("file://other/log.parquet", "paths: file://other/log.parquet: names another machine"),
        ("s3:///log.parquet", "paths: s3:///log.parquet: names no bucket; write s3://bucket/path"),
    ],
)
def test_an_invalid_uri_is_rejected(uri: str, message: str) -> None:
    with raises_input_error(message):
        list(find_files(uri, setting="paths"))
