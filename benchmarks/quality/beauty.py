"""Experiments on Amazon Beauty with the usual split: the last item of each user is the test item, and all items are ranked."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.quality.experiment import Experiment, Settings, merge_settings

EPOCHS, LIMITED_EPOCHS = 8, 5
ALL_EVENTS_EPOCHS = 6
"""Epochs of three members with vectors and features. With validation, the best of 8 epochs is the 4th or the 5th.

The validation NDCG@10 after the last epoch is .0780 with a schedule of 6 epochs and .0770 with 4 epochs (one seed).
"""
LEARNED_OFFSETS: Settings = {"model": {"history": {"learn_offsets": True}}, "training": {"epochs": 5}}
"""Offsets of the items in histories. The validation NDCG@10 of three members is .0824 with a schedule of 5 or 8 epochs."""
WIDE_CANDIDATES: Settings = {"model": {"embedding_dim": 128, "candidate": {"layers": [512, 128], "skip_connection": True}}}
"""Vectors of 128 numbers, and layers that change them. Validation NDCG@10 of one seed, in benchmarks/suggestions.json:

- with vectors, features and offsets: .0824 instead of .0797.
- ids alone: .0772 instead of .0731, and with three members .0792 instead of .0760.
"""
MIN_WORD_COUNT = 3
UNFREEZE_SCHEDULE = [{"epoch": 2, "share": 0.25}, {"epoch": 3, "share": 0.5}, {"epoch": 4, "share": 1.0}]
"""Share of the most frequent rows that is trained: no rows in epoch 1, 25 % in epoch 2, 50 % in epoch 3, then all rows."""
CANDIDATE_LAYERS: Settings = {"model": {"candidate": {"layers": [128, 64], "skip_connection": True}}}
"""Layers of the candidate tower, which are trained while the item rows are frozen."""
DECAYED_RATES: Settings = {
    "training": {"table_optimizer": {"lr_decay": "cosine"}, "dense_optimizer": {"lr_decay": "cosine"}},
}
AVERAGED_WEIGHTS: Settings = {"training": {"epochs": 12, "averaged_epochs": 8}}
SELF_ATTENTION: Settings = {
    "model": {
        "history": {
            "length": 50,
            "pooling": "self_attention",
            "num_heads": 2,
            "recency_residual": True,
            "attention_dropout": 0.5,
            "hidden_dropout": 0.5,
        }
    }
}
FOR_IDS: Settings = {
    "model": {"query": {"dropout": 0.0}},
    "loss": {"num_negatives": 512, "mask_negatives": "positive"},
    "training": {"table_optimizer": {"learning_rate": 0.05}},
}
"""Settings for ids alone: nightjar's defaults. The validation NDCG@10 is .0731, and .0704 with the settings of all variants.

With three members, it is .0760; with offsets .0752, with averaged weights .0759 (one seed).
"""
LOG_VECTORS: Settings = {"embeddings": [{"source": "log", "method": "spectral", "dim": 64}]}


def experiments(data_folder: Path, *, folder: Path, seeds: range) -> Iterator[Experiment]:
    """Yield the experiments of each seed.

    There are variants with and without item features, three variants on all events, two for each share of users, and four with
    self-attention or recency over the history.
    """
    base_settings = settings(data_folder)
    vector_settings: Settings = {
        "embeddings": [{"paths": str(data_folder / "item_embeddings.parquet"), "vector_column": "embedding"}]
    }
    feature_settings = item_features(prepare_items(data_folder, folder=folder))
    settings_by_variant = {
        "random": base_settings,
        "pretrained, full": merge_settings(base_settings, vector_settings),
        "pretrained, frozen": merge_settings(
            base_settings, vector_settings, CANDIDATE_LAYERS, {"tables": {"item": {"transfer": "frozen"}}}
        ),
        "pretrained, gradual": merge_settings(
            base_settings,
            vector_settings,
            CANDIDATE_LAYERS,
            {"tables": {"item": {"transfer": "gradual", "unfreeze": UNFREEZE_SCHEDULE}}},
        ),
        "pretrained, residual": merge_settings(
            base_settings, vector_settings, {"tables": {"item": {"transfer": "residual", "id_dropout": 0.3}}}
        ),
        "log vectors, full": merge_settings(base_settings, LOG_VECTORS),
        "log vectors, frozen": merge_settings(
            base_settings, LOG_VECTORS, CANDIDATE_LAYERS, {"tables": {"item": {"transfer": "frozen"}}}
        ),
        "log vectors, residual": merge_settings(
            base_settings, LOG_VECTORS, {"tables": {"item": {"transfer": "residual", "id_dropout": 0.3}}}
        ),
        "log vectors, full, features": merge_settings(base_settings, LOG_VECTORS, feature_settings),
        "random, features": merge_settings(base_settings, feature_settings),
        "pretrained, full, features": merge_settings(base_settings, vector_settings, feature_settings),
    }
    decayed_settings = merge_settings(settings_by_variant["pretrained, full, features"], DECAYED_RATES)
    settings_by_variant["pretrained, full, features, decay"] = decayed_settings
    member_settings = merge_settings(decayed_settings, {"model": {"num_members": 3}})
    settings_by_variant["pretrained, full, features, decay, 3 members"] = member_settings
    settings_by_variant["pretrained, full, features, average, 3 members"] = merge_settings(
        settings_by_variant["pretrained, full, features"], AVERAGED_WEIGHTS, {"model": {"num_members": 3}}
    )
    single_offset_settings = merge_settings(decayed_settings, LEARNED_OFFSETS)
    settings_by_variant["pretrained, full, features, decay, offsets"] = single_offset_settings
    offset_settings = merge_settings(member_settings, LEARNED_OFFSETS)
    settings_by_variant["pretrained, full, features, decay, 3 members, offsets"] = offset_settings
    id_settings = merge_settings(base_settings, FOR_IDS)
    settings_by_variant["random, for ids"] = id_settings
    settings_by_variant["random, for ids, 3 members"] = merge_settings(id_settings, {"model": {"num_members": 3}})
    for variant, narrow_settings in {
        "pretrained, full, features, decay, offsets": single_offset_settings,
        "pretrained, full, features, decay, 3 members, offsets": offset_settings,
        "random, for ids": id_settings,
        "random, for ids, 3 members": merge_settings(id_settings, {"model": {"num_members": 3}}),
    }.items():
        settings_by_variant[f"{variant}, wide"] = merge_settings(narrow_settings, WIDE_CANDIDATES)
    log_member_settings = merge_settings(base_settings, LOG_VECTORS, {"model": {"num_members": 3}})
    settings_by_variant["log vectors, full, 3 members"] = log_member_settings
    all_events = all_events_settings(data_folder, folder=folder)
    all_events_settings_by_variant = {
        "pretrained, full, features, decay, 3 members": merge_settings(
            member_settings, all_events, {"training": {"epochs": ALL_EVENTS_EPOCHS}}
        ),
        "pretrained, full, features, decay, 3 members, offsets": merge_settings(offset_settings, all_events),
        "log vectors, full, 3 members": merge_settings(log_member_settings, all_events),
    }
    sequence_settings_by_variant = sequence_variants(base_settings, vector_settings, attributes(data_folder))
    for seed in seeds:
        for variant, variant_settings in settings_by_variant.items():
            yield Experiment("beauty", variant, seed, variant_settings)
        for variant, variant_settings in all_events_settings_by_variant.items():
            yield Experiment("all_events", variant, seed, variant_settings)
        for variant, variant_settings in sequence_settings_by_variant.items():
            yield Experiment("sequence", variant, seed, variant_settings)
        for percent in (10, 1):
            log_path = limited_log(data_folder, percent=percent, seed=seed, folder=folder)
            few_user_settings = {
                "interactions": {"paths": str(log_path), "weight_column": "weight"},
                "training": {"epochs": LIMITED_EPOCHS},
            }
            yield Experiment("limited", f"random, {percent} % of users", seed, merge_settings(base_settings, few_user_settings))
            yield Experiment(
                "limited",
                f"pretrained, full, {percent} % of users",
                seed,
                merge_settings(base_settings, vector_settings, few_user_settings),
            )


def all_events_settings(data_folder: Path, *, folder: Path) -> Settings:
    """Return the settings for training on all events before the test event of each user, without validation."""
    table = pq.read_table(data_folder / "interactions.parquet")
    last_position = table.group_by("user_id").aggregate([("position", "max")])
    table = table.join(last_position, "user_id").sort_by([("user_id", "ascending"), ("position", "ascending")])
    is_last = pc.equal(table["position"], table["position_max"])
    columns = ["user_id", "item_id", "position"]
    pq.write_table(table.filter(pc.invert(is_last)).select(columns), folder / "before_last.parquet")
    pq.write_table(table.filter(is_last).select(columns), folder / "last.parquet")
    split = {"kind": "files", "test_paths": str(folder / "last.parquet")}
    return {
        "interactions": {"paths": str(folder / "before_last.parquet"), "split": split},
        "training": {"validation": None},
    }


def sequence_variants(base_settings: Settings, vector_settings: Settings, attribute_settings: Settings) -> dict[str, Settings]:
    """Return the settings of the variants that compare self-attention with the weighted mean `recency`."""
    item_settings = merge_settings(vector_settings, attribute_settings)
    decayed_settings = merge_settings(base_settings, DECAYED_RATES)
    return {
        "recency, ids": decayed_settings,
        "self-attention, ids": merge_settings(decayed_settings, SELF_ATTENTION),
        "recency, vectors and attributes": merge_settings(decayed_settings, item_settings),
        "self-attention, vectors and attributes": merge_settings(decayed_settings, item_settings, SELF_ATTENTION),
    }


def attributes(data_folder: Path) -> Settings:
    """Return the settings for attributes as an item feature, with histories encoded by the candidate tower."""
    return {
        "features": {
            "items": {
                "paths": str(data_folder / "items.parquet"),
                "id_column": "item_id",
                "features": [{"name": "attributes", "kind": "list"}],
            }
        },
        "model": {"history": {"item_representation": "candidate_tower"}},
    }


def settings(data_folder: Path) -> Settings:
    """Return the settings that all variants share."""
    return {
        "interactions": {
            "paths": str(data_folder / "interactions.parquet"),
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


def prepare_items(data_folder: Path, *, folder: Path) -> Path:
    """Write items.parquet with the words of the text as a list column. Return its path."""
    table = pq.read_table(data_folder / "items.parquet")
    words = pc.split_pattern_regex(pc.utf8_lower(table["text"]), "[^a-z0-9]+")
    path = folder / "items.parquet"
    pq.write_table(table.append_column("words", words), path)
    return path


def item_features(items_path: Path) -> Settings:
    """Return the settings for attributes and words as item features, with histories encoded by the candidate tower."""
    return {
        "features": {
            "items": {
                "paths": str(items_path),
                "id_column": "item_id",
                "features": [
                    {"name": "attributes", "kind": "list"},
                    {"name": "words", "kind": "list", "min_count": MIN_WORD_COUNT},
                ],
            }
        },
        "model": {"history": {"item_representation": "candidate_tower"}},
    }


def limited_log(data_folder: Path, *, percent: int, seed: int, folder: Path) -> Path:
    """Write the log with weight 1 for events of `percent` % of the users and 0 for other events. All users are evaluated."""
    table = pq.read_table(data_folder / "interactions.parquet")
    user_ids = table["user_id"].to_numpy()
    is_chosen = ((user_ids * 2_654_435_761 + seed * 40_503) % 2**32) % 100 < percent
    path = folder / f"interactions-{percent}-{seed}.parquet"
    pq.write_table(table.append_column("weight", pa.array(is_chosen.astype("float32"))), path)
    return path
