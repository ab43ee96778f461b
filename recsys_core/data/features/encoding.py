"""From the values of one feature to rows of an embedding table: vocabulary, hash or buckets, and the arrays on disk.

The values stand in DuckDB's table `joined`: `row` (of the user, item or event), `trained` (whether training sees it), and for
feature number n `v<n>` and `w<n>`, value and weight or lists of them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys_core.data.features.config import FeatureConfig
from recsys_core.data.features.numeric import moments, quantiles, standardised
from recsys_core.data.features.vectors import vector_rows
from recsys_core.disk import allocate_npy
from recsys_core.errors import InputError
from recsys_core.manifests import FeatureFacts, IdType
from recsys_core.parquet.duckdb_session import SQL_TYPE, scan

BATCH_ROWS = 1_000_000


@dataclass(frozen=True)
class LastNight:
    """The same feature in last night's run."""

    facts: FeatureFacts
    vocabulary: Path | None


@dataclass(frozen=True)
class Encoding:
    """One feature of one side on its way to disk. `key` is <side>.<name>, `rows` how many users, items or events there are."""

    connection: duckdb.DuckDBPyConnection
    feature: FeatureConfig
    number: int
    key: str
    value_type: IdType | None
    rows: int
    counted: str
    """SQL condition on `joined`: which rows a vocabulary is counted on."""
    last_night: LastNight | None
    out: Path
    vector_ids: Path | None = None
    """Parquet with the value that each pretrained vector belongs to, where the feature has such."""

    @property
    def definition(self) -> str:
        """What has to be the same for a value to keep its row."""
        feature = self.feature
        told: dict[str, Any] = {"kind": feature.kind, "column": feature.source_column, "type": self.value_type}
        told |= {name: getattr(feature, name) for name in ("hash_rows", "buckets", "boundaries")}
        told["standardise"] = feature.standardise or None
        return json.dumps({name: value for name, value in told.items() if value is not None})

    @property
    def continues(self) -> LastNight | None:
        """Last night's feature, where its rows go on."""
        last = self.last_night
        return last if last is not None and last.facts.definition == self.definition else None

    def run(self) -> FeatureFacts:
        """Writes the feature's files into `out`."""
        if self.feature.kind == "numeric":
            return self._numeric()
        source = f"SELECT row, trained, v{self.number} AS value FROM joined"
        if self.feature.is_list:
            weight = f", unnest({self._kept('w')}) AS weight" if self.feature.weight_column else ""
            kept = self._kept("v")
            source = f"SELECT row, trained, unnest({kept}) AS value, unnest(range(len({kept}))) AS place{weight} FROM joined"
        self.connection.execute(f"CREATE VIEW spread AS {source}")
        new_values = self._make_vocabulary() if self.feature.hash_rows is None else 0
        facts = self._write_lists() if self.feature.is_list else self._write_single()
        if self.feature.hash_rows is None:
            self._write_vocabulary()
            table_rows = 1 + self._number("SELECT coalesce(max(row), 0) FROM vocabulary")
            facts = facts.model_copy(update={"with_vector": self._write_vector_rows(table_rows)})
            self.connection.execute("DROP TABLE vocabulary")
        else:
            table_rows = 1 + self.feature.hash_rows
        self.connection.execute("DROP VIEW spread")
        return facts.model_copy(update={"rows": table_rows, "new_values": new_values})

    def _kept(self, prefix: str) -> str:
        column = f"{prefix}{self.number}"
        return column if self.feature.max_values is None else f"{column}[:{self.feature.max_values}]"

    def _number(self, query: str) -> int:
        return int(self.connection.sql(query).fetchall()[0][0])

    def _facts(self, **counts: int) -> FeatureFacts:
        return FeatureFacts(
            kind=self.feature.kind, rows=0, definition=self.definition, continued=self.continues is not None, **counts
        )

    def _make_vocabulary(self) -> int:
        """Table `vocabulary`: value, count, row; last night's rows first, then by falling count. Returns how many are new."""
        connection = self.connection
        connection.execute(
            "CREATE TEMP TABLE counted AS SELECT value, count(*) AS count FROM spread "
            f"WHERE {self.counted} AND value IS NOT NULL GROUP BY value"
        )
        last = self.continues
        if last is not None and last.vocabulary is not None:
            # Line 0 stands for what is out of vocabulary.
            connection.execute(
                "CREATE TEMP TABLE vocabulary AS SELECT last.value, coalesce(counted.count, 0) AS count, last.row FROM "
                f"(SELECT value, file_row_number AS row FROM {scan(last.vocabulary, options='file_row_number = true')} "
                "WHERE file_row_number > 0) last LEFT JOIN counted ON last.value = counted.value"
            )
        else:
            connection.execute(
                f"CREATE TEMP TABLE vocabulary (value {SQL_TYPE[self.value_type or 'string']}, count BIGINT, row BIGINT)"
            )
        before = self._number("SELECT count(*) FROM vocabulary")
        connection.execute(
            f"INSERT INTO vocabulary SELECT value, count, {before} + row_number() OVER (ORDER BY count DESC, value) "
            f"FROM (SELECT * FROM counted ANTI JOIN vocabulary USING (value)) WHERE count >= {self.feature.min_count}"
        )
        connection.execute("DROP TABLE counted")
        return self._number("SELECT count(*) FROM vocabulary") - before

    def _write_vocabulary(self) -> None:
        outside = f"(SELECT count(*) FROM spread WHERE {self.counted}) - (SELECT coalesce(sum(count), 0) FROM vocabulary)"
        reader = self.connection.sql(
            f"SELECT value, count FROM (SELECT NULL AS value, ({outside})::BIGINT AS count, 0 AS row "
            "UNION ALL SELECT * FROM vocabulary) ORDER BY row"
        ).to_arrow_reader(BATCH_ROWS)
        schema = pa.schema([("value", pa.string() if self.value_type == "string" else pa.int64()), ("count", pa.int64())])
        with pq.ParquetWriter(self.out / f"{self.key}.vocabulary.parquet", schema) as writer:
            for batch in reader:
                writer.write_table(pa.Table.from_batches([batch]).cast(schema))

    def _write_vector_rows(self, table_rows: int) -> int:
        """Returns how many values have a vector."""
        if self.vector_ids is None:
            return 0
        array = self._array("vector_row", dtype=np.int64, rows=table_rows)
        found = vector_rows(self.connection, self.vector_ids, into_R=array)
        if not found:
            raise InputError(
                f"embeddings: none of the vectors for {self.key!r} belongs to one of its {table_rows - 1:,} values; do both "
                "use the same ids?"
            )
        return found

    def _coded(self, *columns: str) -> Iterator[tuple[NDArray[np.int64], ...]]:
        """Batches of row, code and `columns` of all values that are there; a null in a list has code 0."""
        if self.feature.hash_rows is not None:
            # md5, since DuckDB's own hash may change from one version to the next.
            code = f"1 + md5_number_lower(CAST(value AS VARCHAR)) % {self.feature.hash_rows}"
            source = "spread"
        else:
            code, source = "vocabulary.row", "spread LEFT JOIN vocabulary USING (value)"
        present = "" if self.feature.is_list else "WHERE value IS NOT NULL"
        others = "".join(f", {column}" for column in columns)
        reader = self.connection.sql(
            f"SELECT spread.row AS row, coalesce({code}, 0)::INTEGER AS code{others} FROM {source} {present}"
        ).to_arrow_reader(BATCH_ROWS)
        for batch in reader:
            yield tuple(column.to_numpy(zero_copy_only=False) for column in batch.columns)

    def _array(self, name: str, *, dtype: type[np.generic], rows: int) -> NDArray[Any]:
        return allocate_npy(self.out / f"{self.key}.{name}.npy", dtype=dtype, shape=(rows,))

    def _write_single(self) -> FeatureFacts:
        array = self._array("row", dtype=np.int32, rows=self.rows)
        present = unknown = 0
        for row, code in self._coded():
            array[row] = code
            present, unknown = present + len(row), unknown + int((code == 0).sum())
        return self._facts(values=self.rows, out_of_vocabulary=unknown, missing=self.rows - present)

    def _write_lists(self) -> FeatureFacts:
        offset = self._array("offset", dtype=np.int64, rows=self.rows + 1)
        lengths = f"SELECT row, len({self._kept('v')}) AS length FROM joined WHERE len(v{self.number}) > 0"
        empty = self.rows
        for batch in self.connection.sql(lengths).to_arrow_reader(BATCH_ROWS):
            offset[1 + batch.column("row").to_numpy()] = batch.column("length").to_numpy()
            empty -= batch.num_rows
        np.cumsum(offset, out=offset)
        values = int(offset[-1])
        array = self._array("row", dtype=np.int32, rows=values)
        weights = self._array("weight", dtype=np.float32, rows=values) if self.feature.weight_column else None
        unknown = 0
        for row, code, place, *weight in self._coded("place", *(["weight"] if weights is not None else [])):
            at = offset[row] + place
            array[at] = code
            if weights is not None:
                weights[at] = weight[0]
            unknown += int((code == 0).sum())
        longest = self.feature.max_values
        cut = 0 if longest is None else self._number(f"SELECT count(*) FROM joined WHERE len(v{self.number}) > {longest}")
        return self._facts(values=values, out_of_vocabulary=unknown, missing=empty, truncated=cut)

    def _numeric(self) -> FeatureFacts:
        """Buckets: row 1 + n for the values from boundary n - 1 up to boundary n. Standardised: row 1, with a weight.

        Row 0 for null and NaN.
        """
        column = f"v{self.number}"
        told = self._standard(column) if self.feature.standardise else self._bounds(column)
        boundaries = np.array(told.get("boundaries", ()), np.float64)
        array = self._array("row", dtype=np.int32, rows=self.rows)
        weight = self._array("weight", dtype=np.float32, rows=self.rows) if self.feature.standardise else None
        present = 0
        reader = self.connection.sql(f"SELECT row, {column} AS value FROM joined").to_arrow_reader(BATCH_ROWS)
        for batch in reader:
            value = batch.column("value").to_numpy(zero_copy_only=False)  # null becomes NaN
            known = ~np.isnan(value)
            place = batch.column("row").to_numpy()[known]
            array[place] = 1 + np.searchsorted(boundaries, value[known], side="right")
            if weight is not None:
                weight[place] = standardised(value[known], mean=told["mean"], std=told["std"])
            present += len(place)
        facts = self._facts(values=self.rows, out_of_vocabulary=0, missing=self.rows - present)
        return facts.model_copy(update=told | {"rows": len(boundaries) + 2})

    def _bounds(self, column: str) -> dict[str, Any]:
        last = self.continues
        if last is not None and last.facts.boundaries is not None:
            return {"boundaries": last.facts.boundaries}
        if self.feature.boundaries is not None:
            return {"boundaries": self.feature.boundaries}
        return {"boundaries": tuple(quantiles(self.connection, column, buckets=self.feature.buckets or 1).tolist())}

    def _standard(self, column: str) -> dict[str, Any]:
        last = self.continues
        if last is not None:
            return {"mean": last.facts.mean, "std": last.facts.std}
        return dict(zip(("mean", "std"), moments(self.connection, column), strict=True))
