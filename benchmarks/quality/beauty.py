"""Experiments on Amazon Beauty with the usual split: the last item of each user is the test item, and all items are ranked."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.quality.experiment import Experiment, Settings, merge_settings

EPOCHS, LIMITED_EPOCHS = 8, 5
MIN_WORD_COUNT = 3
UNFREEZE = [{"epoch": 2, "share": 0.25}, {"epoch": 3, "share": 0.5}, {"epoch": 4, "share": 1.0}]
"""Share of the most frequent rows that is trained: no rows in epoch 1, 25 % in epoch 2, 50 % in epoch 3, then all rows."""
LAYERS: Settings = {"model": {"candidate": {"layers": [128, 64], "skip_connection": True}}}
"""Layers of the candidate tower, which are trained while the item rows are frozen."""


def experiments(data: Path, *, folder: Path, seeds: range) -> Iterator[Experiment]:
    """Yield, for each seed, five variants without item features, two variants with them, and two for each share of users."""
    base = settings(data)
    vectors: Settings = {"embeddings": [{"paths": str(data / "item_embeddings.parquet"), "vector_column": "embedding"}]}
    features = item_features(prepare_items(data, folder=folder))
    variants = {
        "random": base,
        "pretrained, full": merge_settings(base, vectors),
        "pretrained, frozen": merge_settings(base, vectors, LAYERS, {"tables": {"item": {"transfer": "frozen"}}}),
        "pretrained, gradual": merge_settings(
            base, vectors, LAYERS, {"tables": {"item": {"transfer": "gradual", "unfreeze": UNFREEZE}}}
        ),
        "pretrained, residual": merge_settings(
            base, vectors, {"tables": {"item": {"transfer": "residual", "id_dropout": 0.3}}}
        ),
        "random, features": merge_settings(base, features),
        "pretrained, full, features": merge_settings(base, vectors, features),
    }
    for seed in seeds:
        for name, variant in variants.items():
            yield Experiment("beauty", name, seed, variant)
        for percent in (10, 1):
            log = limited_log(data, percent=percent, seed=seed, folder=folder)
            few_users = {
                "interactions": {"paths": str(log), "weight_column": "weight"},
                "training": {"epochs": LIMITED_EPOCHS},
            }
            yield Experiment("limited", f"random, {percent} % of users", seed, merge_settings(base, few_users))
            yield Experiment(
                "limited", f"pretrained, full, {percent} % of users", seed, merge_settings(base, vectors, few_users)
            )


def settings(data: Path) -> Settings:
    """Return the settings that all variants share."""
    return {
        "interactions": {
            "paths": str(data / "interactions.parquet"),
            "order_column": "position",
            "split": {"kind": "leave_last_out"},
        },
        "model": {
            "history": {"length": 20, "pooling": "recency"},
            "query": {"skip_connection": True, "dropout": 0.3},
        },
        "loss": {"kind": "softmax", "num_negatives": 2048, "mask_negatives": "seen"},
        "training": {
            "epochs": EPOCHS,
            "batch_size": 512,
            "table_optimizer": {"learning_rate": 0.03},
            "validation": {"metric": "ndcg", "k": 10, "patience": None, "max_users": 10_000},
        },
        "evaluation": {"ks": [10, 20]},
    }


def prepare_items(data: Path, *, folder: Path) -> Path:
    """Write items.parquet with the words of the text as a list column."""
    table = pq.read_table(data / "items.parquet")
    words = pc.split_pattern_regex(pc.utf8_lower(table["text"]), "[^a-z0-9]+")
    path = folder / "items.parquet"
    pq.write_table(table.append_column("words", words), path)
    return path


def item_features(items: Path) -> Settings:
    """Return the settings for attributes and words as item features, with histories encoded by the candidate tower."""
    return {
        "features": {
            "items": {
                "paths": str(items),
                "id_column": "item_id",
                "features": [
                    {"name": "attributes", "kind": "list"},
                    {"name": "words", "kind": "list", "min_count": MIN_WORD_COUNT},
                ],
            }
        },
        "model": {"history": {"item_representation": "candidate_tower"}},
    }


def limited_log(data: Path, *, percent: int, seed: int, folder: Path) -> Path:
    """Write the log with event weight 1 for `percent` % of the users and 0 for the others. All users are evaluated."""
    table = pq.read_table(data / "interactions.parquet")
    user = table["user_id"].to_numpy()
    is_chosen = ((user * 2_654_435_761 + seed * 40_503) % 2**32) % 100 < percent
    path = folder / f"interactions-{percent}-{seed}.parquet"
    pq.write_table(table.append_column("weight", pa.array(is_chosen.astype("float32"))), path)
    return path
