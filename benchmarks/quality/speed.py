"""Benchmark of the seconds per epoch of two models on ids only, with two ranks and 800,000 pairs."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.quality.citeulike import FACTORISATION, SIMPLEX
from benchmarks.quality.experiment import Settings, merge_settings, train_only

NUM_USERS, NUM_ITEMS, NUM_PAIRS = 30_000, 41_000, 800_000
NUM_EPOCHS = 3


def measure(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the number of pairs and the seconds of each epoch, by key `speed/<model>/0`."""
    pairs_path = write_pairs(folder)
    results = {}
    for model_name, model_settings in (("SimpleX", SIMPLEX), ("sampled-softmax matrix factorisation", FACTORISATION)):
        model_settings = merge_settings(settings(pairs_path), model_settings, TIMED_SETTINGS)
        epoch_s = epoch_seconds(model_settings, folder=folder / "speed", num_epochs=NUM_EPOCHS)
        results[f"speed/{model_name}/0"] = {"pairs": NUM_PAIRS, "epoch_s": [round(seconds, 1) for seconds in epoch_s]}
    return results


def epoch_seconds(settings: Settings, *, folder: Path, num_epochs: int) -> list[float]:
    """Train, and return the seconds of each epoch except the first, which includes the start of the ranks."""
    end_s_by_epoch = {progress.epoch: time_s for time_s, progress in train_only(settings, folder=folder)}
    return [end_s_by_epoch[epoch] - end_s_by_epoch[epoch - 1] for epoch in range(2, num_epochs + 1)]


TIMED_SETTINGS: Settings = {"loss": {"num_negatives": 1024}, "training": {"epochs": NUM_EPOCHS}}


def settings(pairs_path: Path) -> Settings:
    """Return the settings that both models share."""
    return {
        "interactions": {
            "paths": str(pairs_path),
            "split": {"kind": "files", "test_paths": str(pairs_path.with_name("test.parquet"))},
        },
        "model": {"embedding_dim": 64, "learn_user_embedding": True, "history": {"length": 20, "last_item_feature": False}},
        "training": {"batch_size": 2048, "validation": None, "checkpoint_every_steps": 1_000_000},
    }


def write_pairs(folder: Path) -> Path:
    """Write distinct random pairs with skewed frequencies of users and items. Return the path."""
    rng = np.random.default_rng(0)
    user_ids = rng.permutation(NUM_USERS)[(rng.power(0.6, 2 * NUM_PAIRS) * NUM_USERS).astype(np.int64)]
    item_ids = rng.permutation(NUM_ITEMS)[(rng.random(2 * NUM_PAIRS) ** 3 * NUM_ITEMS).astype(np.int64)]
    pair_keys = rng.permutation(np.unique(user_ids * NUM_ITEMS + item_ids))[:NUM_PAIRS]
    pairs_path = folder / "pairs.parquet"
    table = pa.table({"user_id": pair_keys // NUM_ITEMS, "item_id": pair_keys % NUM_ITEMS})
    pq.write_table(table, pairs_path)
    pq.write_table(table.slice(0, 1_000), pairs_path.with_name("test.parquet"))  # the split requires a test file
    return pairs_path
