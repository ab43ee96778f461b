"""Checks of table settings against the model's tables and the pretrained vectors; used by the config and by ModelSpec."""

from collections.abc import Collection, Iterable

from recsys_core.errors import InputError
from recsys_core.models.tables.table_config import OFFSET_TABLE, TableConfig

ID_TABLES = ("item", "user")
"""Tables in which each item or user has exactly one row, so that single rows can be frozen."""


def check_table_names(setting_name: str, table_names: Iterable[str], *, tables: Collection[str]) -> None:
    """Raise InputError if `setting_name` (such as "tables") names a table that the model does not have."""
    for table_name in table_names:
        if table_name not in tables:
            advice = (
                "set model.learn_user_embedding to true" if table_name == "user" else "name one of them, or declare the feature"
            )
            raise InputError(f"{setting_name}.{table_name}: the model has no such table; it has {sorted(tables)}; {advice}")


def check_vectors_exist(table_name: str, settings: TableConfig, *, tables_with_vectors: Collection[str]) -> None:
    """Raise InputError if table `table_name` has a transfer that needs pretrained vectors, but there are none."""
    if settings.transfer != "full" and table_name not in tables_with_vectors:
        raise InputError(
            f"tables.{table_name}.transfer is {settings.transfer}, but embeddings has no vectors of table {table_name!r} (it "
            f"has {sorted(tables_with_vectors) or 'none'}); add them, or set transfer to full"
        )


def check_distillation(tables_with_vectors: Collection[str]) -> None:
    """Raise InputError if there are no pretrained item vectors, which loss.distillation needs."""
    if "item" not in tables_with_vectors:
        raise InputError(
            "loss.distillation keeps the similarities of the pretrained item vectors, but embeddings has no vectors of table "
            f"'item' (it has {sorted(tables_with_vectors) or 'none'}); add them, or leave loss.distillation out"
        )


def check_width(vector_dim: int, table_dim: int | None, *, table: str) -> None:
    """Raise InputError if a table cannot have the width of its pretrained vectors.

    Args:
        table_dim: the setting `dim` of the table; None if the table takes the width of its vectors.
    """
    if table_dim is None and vector_dim % 4:
        pca_advice = f"set embeddings.pca_dim to {vector_dim // 4 * 4}" if vector_dim > 4 else "add zeros to them"
        raise InputError(
            f"embeddings: the vectors of table {table!r} have {vector_dim} numbers, but the width of a table is a multiple of "
            f"4; {pca_advice}"
        )
    if table_dim not in (None, vector_dim):
        raise InputError(
            f"embeddings: the vectors of table {table!r} have {vector_dim} numbers, but tables.{table}.dim is {table_dim}; "
            f"leave it out, and the table takes the width of its vectors"
            + (f", or set embeddings.pca_dim to {table_dim}" if table_dim is not None and vector_dim > table_dim else "")
        )


def check_table_settings(table_name: str, settings: TableConfig) -> None:
    """Raise InputError if table `table_name` does not support one of its settings."""
    tables_with_decay = [*ID_TABLES, OFFSET_TABLE]
    if settings.optimizer is not None and settings.optimizer.weight_decay and table_name not in tables_with_decay:
        raise InputError(f"tables.{table_name}.optimizer.weight_decay is only for the tables {tables_with_decay}; leave it out")
    if settings.transfer == "gradual" and table_name not in ID_TABLES:
        raise InputError(
            f"tables.{table_name}.transfer is gradual, which is only for the tables {list(ID_TABLES)}; set it to full or frozen"
        )
    if settings.transfer == "residual" and table_name != "item":
        raise InputError(
            f"tables.{table_name}.transfer is residual, which is only for the table item; set it to full or frozen"
        )
    if settings.lookup is not None and table_name != "user":
        raise InputError(f"tables.{table_name}.lookup is only for the table user; leave it out")
