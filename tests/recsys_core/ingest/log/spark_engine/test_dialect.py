"""Hashes of texts, which Spark must compute as DuckDB does."""

from pathlib import Path

import duckdb
import numpy as np
import pytest

from tests.recsys_core.ingest.parquet_files import write_parquet

pytestmark = pytest.mark.usefixtures("spark")


def test_hashes_and_draws_equal_the_results_of_duckdb(tmp_path: Path) -> None:
    from pyspark.sql import SparkSession

    from recsys_core.ingest.log.spark_engine.session import SparkLogSession

    rng = np.random.default_rng(0)
    texts = ["", "\0", "é" * 9, *("".join(map(chr, rng.integers(1, 0x2FFF, length))) for length in range(1, 40))]
    path = write_parquet(tmp_path / "texts.parquet", text=texts, second_text=texts[::-1])
    duckdb_rows = duckdb.sql(
        "SELECT hash(text) >> 1, hash(text, second_text, 'validation') % 1000000, hash(text, 'validation') % 1000000 "
        f"FROM read_parquet('{path}')"
    ).fetchall()
    active_session = SparkSession.getActiveSession()
    assert active_session is not None
    session = SparkLogSession(active_session, tmp_path / "tables")
    columns_sql = "ordering_hash(text), pair_draw(text, second_text), item_draw(text)"
    assert session.fetch_rows(f"SELECT {columns_sql} FROM {session.scan_sql(Path(path))}") == duckdb_rows
