"""What training and export write at least, in bytes: from the model's tables, before a rank is started."""

from pathlib import Path

from recsys_core.models.optimizer_config import TableOptimizer, TableOptimizerKind
from recsys_core.models.spec import ModelSpec, TableSpec
from recsys_core.training.config import TrainingConfig

FLOAT_BYTES = 4
_STATE_PER_ROW: dict[TableOptimizerKind, tuple[int, int]] = {
    "rowwise_adagrad": (1, 0),
    "adagrad": (0, 1),
    "sgd": (0, 0),
    "adam": (0, 2),
    "partial_rowwise_adam": (1, 1),
}
"""Numbers that an optimizer keeps per row, and per number of a row."""


def training_bytes(config: TrainingConfig, *, model: ModelSpec, work: Path, steps_per_epoch: int) -> int:
    """What the checkpoints take at their peak beyond what is in `work` already, which an earlier attempt wrote."""
    checkpoint = sum(_weights(table) + _state(table, default=config.table_optimizer) for table in model.tables.values())
    # The best one is kept apart from the newest, and a new one is complete before an old one is removed.
    most = config.keep_checkpoints + 1 + (config.validation is not None)
    measured = 0 if config.validation is None else config.epochs // config.validation.every_epochs
    saves = max(1, config.epochs * steps_per_epoch // config.checkpoint_every_steps + measured)
    there = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    return max(0, min(most, saves) * checkpoint - there)


def export_bytes(default: TableOptimizer, *, model: ModelSpec) -> int:
    """What the export's arrays take; one of them is on the disk twice while it is put together."""
    widths = model.config.history_dim, model.config.output_dim
    arrays = [model.num_items * width * FLOAT_BYTES for width in widths]
    arrays += [_weights(table) for table in model.tables.values()]
    sums = [
        _state(table, default=default)
        for table in model.tables.values()
        if (table.settings.optimizer or default).kind in ("rowwise_adagrad", "adagrad")
    ]
    return sum(arrays) + sum(sums) + max(arrays)


def _weights(table: TableSpec) -> int:
    return table.num_rows * table.dim * FLOAT_BYTES


def _state(table: TableSpec, *, default: TableOptimizer) -> int:
    if table.frozen:
        return 0
    per_row, per_number = _STATE_PER_ROW[(table.settings.optimizer or default).kind]
    return table.num_rows * (per_row + per_number * table.dim) * FLOAT_BYTES
