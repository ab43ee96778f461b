"""Files in an object store, which are read like local files."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from recsys_core.parquet import locations
from recsys_core.parquet.local_copies import local_files
from recsys_core.parquet.sources import open_sources
from tests.recsys_core.ingest.parquet_files import raises_input_error, write_parquet
from tests.recsys_core.parquet.fake_s3 import ACCESS_KEY_ID, FakeStore, run_store


@pytest.fixture(scope="module")
def server() -> Iterator[FakeStore]:
    """Return the object store that all tests of this module share."""
    with run_store() as running_server:
        yield running_server


@pytest.fixture
def store(server: FakeStore, monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """Empty the object store and set its credentials in the environment. Return the store."""
    for variable in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(variable, raising=False)
    aws_variables = {
        "ACCESS_KEY_ID": ACCESS_KEY_ID,
        "SECRET_ACCESS_KEY": "secret",
        "DEFAULT_REGION": "us-east-1",
        "EC2_METADATA_DISABLED": "true",
    }
    for variable, value in aws_variables.items():
        monkeypatch.setenv(f"AWS_{variable}", value)
    server.objects, server.num_reads_to_drop, server.read_ranges = {}, 0, []
    return server


def write_days(folder: Path, store: FakeStore, *, num_rows: int = 10) -> None:
    """Write three days of a log to the disk and to the store."""
    for day in (17, 18, 19):
        key = f"log/dt=2026-11-{day}/part-0.parquet"
        ids = np.arange(num_rows) + day
        write_parquet(
            folder / key,
            row_group_size=4,
            user_id=ids,
            item_id=[f"é{id_number}" for id_number in ids],
            vector=[[0.5, float(id_number)] for id_number in ids],
        )
        store.objects[key] = (folder / key).read_bytes()
    store.objects["log/_SUCCESS"] = b""
    store.objects["log/_temporary/half.parquet"] = b"PAR1"
    for skipped_path in ("log/_SUCCESS", "log/_temporary/half.parquet"):
        (folder / skipped_path).parent.mkdir(exist_ok=True)
        (folder / skipped_path).write_bytes(store.objects[skipped_path])


@pytest.mark.parametrize(
    "pattern", ["log", "log/", "log/dt=*/*.parquet", "log/**/*.parquet", "log/dt=2026-11-1[89]/part-?.parquet", "log/**"]
)
def test_a_pattern_matches_the_same_files_in_a_store_and_on_a_disk(tmp_path: Path, store: FakeStore, pattern: str) -> None:
    write_days(tmp_path, store)
    local_sources = open_sources([str(tmp_path / pattern)], setting="paths")
    remote_sources = open_sources([store.uri(pattern)], setting="paths")
    assert [source.name for source in remote_sources] == [
        "s3://bucket/" + str(source.path.relative_to(tmp_path)) for source in local_sources
    ]
    matched_days = ["2026-11-17", "2026-11-18", "2026-11-19"][-len(remote_sources) :]
    assert [source.partition_values["dt"] for source in remote_sources] == matched_days
    for local_source, remote_source in zip(local_sources, remote_sources, strict=True):
        assert (local_source.schema, local_source.partition_values, local_source.partition_types) == (
            remote_source.schema,
            remote_source.partition_values,
            remote_source.partition_types,
        )
        assert local_source.record.footer_sha256 == remote_source.record.footer_sha256
        assert local_source.record.size_bytes == remote_source.record.size_bytes
        assert local_source.record.num_rows == remote_source.record.num_rows
        with local_source.open() as local_file, remote_source.open() as remote_file:
            assert local_file.read() == remote_file.read()
    assert remote_sources[0].record.path == remote_sources[0].name
    assert remote_sources[0].record.modified_ns > 0


def test_remote_files_are_copied_with_the_requested_columns_and_deleted_afterwards(tmp_path: Path, store: FakeStore) -> None:
    write_days(tmp_path, store)
    sources = open_sources([str(tmp_path / "log"), store.uri("log")], setting="paths")
    assert [source.is_local for source in sources] == [True] * 3 + [False] * 3
    with local_files(sources, columns=["vector", "user_id", "dt"], scratch_folder=tmp_path / "scratch") as files:
        assert files[:3] == [source.path for source in sources[:3]]
        for source, file in zip(sources[3:], files[3:], strict=True):
            with source.open() as source_file:
                assert pq.read_table(file) == source_file.read(columns=["vector", "user_id"]).select(["vector", "user_id"])
        copied_files = files[3:]
    assert not any(file.exists() for file in copied_files)
    assert list((tmp_path / "scratch").iterdir()) == []
    assert all(source.path.exists() for source in sources[:3])


def test_a_copy_with_hive_keys_only_has_all_rows(tmp_path: Path, store: FakeStore) -> None:
    write_days(tmp_path, store)
    sources = open_sources([store.uri("log")], setting="paths")
    with local_files(sources, columns=["dt"], scratch_folder=tmp_path / "scratch") as files:
        assert [pq.read_metadata(file).num_rows for file in files] == [10, 10, 10]


def test_only_the_requested_columns_are_fetched(tmp_path: Path, store: FakeStore) -> None:
    rng = np.random.default_rng(0)
    large_path = write_parquet(
        tmp_path / "b.parquet", row_group_size=20_000, ballast=rng.random(200_000), id=np.arange(200_000) % 7
    )
    store.objects["b.parquet"] = Path(large_path).read_bytes()
    sources = open_sources([store.uri("b.parquet")], setting="paths")
    store.read_ranges.clear()
    with local_files(sources, columns=["id"], scratch_folder=tmp_path) as files:
        assert pq.read_table(files[0])["id"].to_numpy().tolist() == (np.arange(200_000) % 7).tolist()
    assert sum(num_bytes for _, _, num_bytes in store.read_ranges) < len(store.objects["b.parquet"]) / 4


def test_a_copy_starts_again_from_the_first_row_group_after_the_connection_is_lost(
    tmp_path: Path, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_days(tmp_path, store, num_rows=50)
    (source,) = open_sources([store.uri("log/dt=2026-11-19/part-0.parquet")], setting="paths")
    expected_table = source.open().read(columns=["user_id", "item_id"])
    read_row_groups: list[list[int]] = []

    class UnreliableFile(pq.ParquetFile):
        """A file whose third and fifth reading of a row group lose the connection after the first batch."""

        def iter_batches(self, *args: Any, **kwargs: Any) -> Iterator[pa.RecordBatch]:
            read_row_groups.append(kwargs["row_groups"])
            batches = super().iter_batches(3, **kwargs)
            yield next(batches)
            if len(read_row_groups) in (3, 5):
                raise OSError("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 52")
            yield from batches

    monkeypatch.setattr("recsys_core.parquet.local_copies.pq.ParquetFile", UnreliableFile)
    with local_files([source], columns=["user_id", "item_id"], scratch_folder=tmp_path) as (file,):
        assert pq.read_table(file) == expected_table
    assert read_row_groups[:6] == [[0], [1], [2], [0], [1], [0]]


def test_a_store_that_stops_answering_is_reported_and_no_copy_is_left(
    tmp_path: Path, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_days(tmp_path, store)
    (source,) = open_sources([store.uri("log/dt=2026-11-19/part-0.parquet")], setting="paths")

    def lose_connection(*_: Any, **__: Any) -> Iterator[pa.RecordBatch]:
        raise OSError("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 52")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lose_connection)
    local_copies = local_files([source], columns=["user_id"], scratch_folder=tmp_path / "scratch")
    with (
        raises_input_error("s3://bucket/log/dt=2026-11-19/part-0.parquet: the store stopped answering: ", "curlCode: 52"),
        local_copies,
    ):
        raise AssertionError
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_request_is_repeated_after_a_lost_connection(tmp_path: Path, store: FakeStore) -> None:
    write_days(tmp_path, store)
    store.num_reads_to_drop = 2
    assert len(open_sources([store.uri("log")], setting="paths")) == 3
    assert store.num_reads_to_drop == 0


def test_a_damaged_page_of_a_file_in_a_store_is_found_while_the_file_is_copied(tmp_path: Path, store: FakeStore) -> None:
    ids = np.random.default_rng(0).integers(0, 2**60, 1000)
    pq.write_table(
        pa.table({"id": ids}), tmp_path / "a.parquet", write_page_checksum=True, use_dictionary=False, compression="none"
    )
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[content.find(ids[500].tobytes())] ^= 1
    store.objects["a.parquet"] = bytes(content)
    sources = open_sources([store.uri("a.parquet")], setting="paths")
    local_copies = local_files(sources, columns=["id"], scratch_folder=tmp_path)
    with raises_input_error("s3://bucket/a.parquet: damaged, or not readable: "), local_copies:
        raise AssertionError


def test_a_full_disk_is_reported_before_any_file_is_copied(
    tmp_path: Path, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_days(tmp_path, store)
    sources = open_sources([store.uri("log")], setting="paths")
    monkeypatch.setattr("recsys_core.disk.shutil.disk_usage", lambda _: SimpleNamespace(free=7))
    local_copies = local_files(sources, columns=["user_id"], scratch_folder=tmp_path)
    with (
        raises_input_error(
            "the copy of s3://bucket/log/dt=", "part-0.parquet takes at least ", "the disk has 0.000 GiB free; free some space"
        ),
        local_copies,
    ):
        raise AssertionError


def test_a_missing_object_is_reported_with_its_name(store: FakeStore) -> None:
    store.objects["log/notes.txt"] = b"x"
    for pattern, message in (
        ("gone.parquet", "paths: no such file: s3://bucket/gone.parquet"),
        ("log/*.parquet", "paths: no file matches: s3://bucket/log/*.parquet"),
        ("lo*", "paths: no file matches: s3://bucket/lo*; 1 folders match"),
        ("log", "paths: no *.parquet file in or below the folder s3://bucket/log"),
    ):
        with raises_input_error(message):
            open_sources([store.uri(pattern)], setting="paths")
    with raises_input_error("paths: no such bucket: s3://elsewhere"):
        open_sources([store.uri("x").replace("bucket", "elsewhere")], setting="paths")


def test_rejected_credentials_are_reported(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stranger")
    with raises_input_error("paths: s3://bucket/log: the store rejects the credentials from the environment; check them"):
        open_sources([store.uri("log")], setting="paths")


def test_the_options_of_a_uri_are_not_part_of_names_and_records(tmp_path: Path, store: FakeStore) -> None:
    write_days(tmp_path, store)
    for source in open_sources([store.uri("log")], setting="paths"):
        assert "endpoint" not in repr(source.record) + source.name


def test_names_in_a_store_may_hold_any_character(tmp_path: Path, store: FakeStore) -> None:
    content = Path(write_parquet(tmp_path / "a.parquet", x=[1])).read_bytes()
    for folder_name in ('it\'s "é" 🚀', "a+b&c=d", "100%25"):
        store.objects = {f"{folder_name}/a.parquet": content}
        (source,) = open_sources([store.uri(folder_name.replace("100%25", "100%2525"))], setting="paths")
        assert source.name == f"s3://bucket/{folder_name}/a.parquet"


def test_an_object_that_is_replaced_after_the_check_is_rejected(tmp_path: Path, store: FakeStore) -> None:
    write_days(tmp_path, store)
    source = open_sources([store.uri("log")], setting="paths")[0]
    store.objects["log/dt=2026-11-17/part-0.parquet"] += b"x"
    with raises_input_error("s3://bucket/log/dt=2026-11-17/part-0.parquet: changed while it was being read; run again"):
        source.open()


def test_files_in_a_store_are_rejected_if_allowed_data_root_is_set(tmp_path: Path, store: FakeStore) -> None:
    with raises_input_error("paths: s3://bucket/log: is in an object store, not below allowed_data_root", str(tmp_path)):
        open_sources([store.uri("log")], setting="paths", allowed_data_root=tmp_path)


def test_a_gs_uri_is_opened_with_the_google_filesystem() -> None:
    filesystem, path, prefix = locations.connect(
        "gs://anonymous@bucket/log/*.parquet?endpoint_override=127.0.0.1:1", setting="paths"
    )
    assert isinstance(filesystem, pafs.GcsFileSystem)
    assert (path, prefix) == ("bucket/log/*.parquet", "gs:/")
