"""Benchmark of the seconds per epoch of two models on ids only, with two ranks and 800,000 pairs."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.quality.citeulike import FACTORISATION, SIMPLEX
from benchmarks.quality.experiment import Settings, merge_settings, train_only

USERS, ITEMS, PAIRS = 30_000, 41_000, 800_000
EPOCHS = 3


def measure(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the number of pairs and the seconds of each epoch, by key `speed/<model>/0`."""
    data = write_pairs(folder)
    results = {}
    for name, model in (("SimpleX", SIMPLEX), ("sampled-softmax matrix factorisation", FACTORISATION)):
        lines = train_only(merge_settings(settings(data), model, TIMED_SETTINGS), folder=folder / "speed")
        end_s = {line.epoch: time_s for time_s, line in lines}
        # The first epoch is left out, because it includes the start of the ranks.
        epoch_s = [round(end_s[epoch] - end_s[epoch - 1], 1) for epoch in range(2, EPOCHS + 1)]
        results[f"speed/{name}/0"] = {"pairs": PAIRS, "epoch_s": epoch_s}
    return results


TIMED_SETTINGS: Settings = {"loss": {"num_negatives": 1024}, "training": {"epochs": EPOCHS}}


def settings(data: Path) -> Settings:
    """Return the settings of both models: batch 2,048 per rank, dimension 64, no validation."""
    return {
        "interactions": {"paths": str(data), "split": {"kind": "files", "test_paths": str(data.with_name("test.parquet"))}},
        "model": {"embedding_dim": 64, "learn_user_embedding": True, "history": {"length": 20, "last_item_feature": False}},
        "training": {"batch_size": 2048, "validation": None, "checkpoint_every_steps": 1_000_000},
    }


def write_pairs(folder: Path) -> Path:
    """Write distinct random pairs with skewed activity of users and popularity of items."""
    rng = np.random.default_rng(0)
    user = rng.permutation(USERS)[(rng.power(0.6, 2 * PAIRS) * USERS).astype(np.int64)]
    item = rng.permutation(ITEMS)[(rng.random(2 * PAIRS) ** 3 * ITEMS).astype(np.int64)]
    key = rng.permutation(np.unique(user * ITEMS + item))[:PAIRS]
    path = folder / "pairs.parquet"
    table = pa.table({"user_id": key // ITEMS, "item_id": key % ITEMS})
    pq.write_table(table, path)
    pq.write_table(table.slice(0, 1_000), path.with_name("test.parquet"))  # required by the split, never used
    return path
