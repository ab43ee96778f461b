"""Experiments on citeulike_t (users and their saved articles): cold articles, and warm articles with or without text."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.quality.experiment import Experiment, Settings, merge_settings


def experiments(data_folder: Path, *, folder: Path, seeds: range) -> Iterator[Experiment]:
    """Yield the experiments on cold articles, on warm articles, and with two published models."""
    vector_settings: Settings = {
        "embeddings": [{"paths": str(data_folder / "item_embeddings.parquet"), "vector_column": "embedding"}]
    }
    known_vector_settings: Settings = {
        "embeddings": [{"paths": str(write_known_vectors(data_folder, folder=folder)), "vector_column": "embedding"}]
    }
    cold_settings = merge_settings(
        settings(data_folder, test_kind="cold"), ARTICLE_MODEL, known_vector_settings, TEXT_TABLES, COLD_TRAINING
    )
    warm_data_settings = settings(data_folder, test_kind="warm")
    warm_settings = merge_settings(warm_data_settings, ARTICLE_MODEL)
    text_settings = merge_settings(warm_settings, vector_settings, WARM_TEXT_TABLES)
    variants_by_part = {
        "cold": {"text, residual": cold_settings, "text, residual, all articles": merge_settings(cold_settings, NO_VALIDATION)},
        "warm": {
            "with text": text_settings,
            "with text, popularity": merge_settings(text_settings, POPULARITY),
            "with text, popularity, all pairs": merge_settings(text_settings, POPULARITY, ALL_PAIRS),
            "without text": warm_settings,
            "without text, popularity, all pairs": merge_settings(warm_settings, POPULARITY, ALL_PAIRS),
            "without text, log vectors": merge_settings(warm_settings, LOG_VECTORS),
        },
        "collaborative": {
            "SimpleX": merge_settings(warm_data_settings, SIMPLEX),
            "sampled-softmax matrix factorisation": merge_settings(warm_data_settings, FACTORISATION),
        },
    }
    for seed in seeds:
        for part, settings_by_variant in variants_by_part.items():
            for variant, variant_settings in settings_by_variant.items():
                yield Experiment(part, variant, seed, variant_settings)


def write_known_vectors(data_folder: Path, *, folder: Path) -> Path:
    """Write the vectors of training and cold articles, so that other articles are not ranked. Return the path."""
    known_ids = pa.concat_arrays(
        [
            pq.read_table(data_folder / file_name, columns=["item_id"])["item_id"].combine_chunks()
            for file_name in ("train.parquet", "test_cold.parquet")
        ]
    )
    table = pq.read_table(data_folder / "item_embeddings.parquet")
    path = folder / "known_embeddings.parquet"
    pq.write_table(table.filter(pc.is_in(table["item_id"], known_ids.unique())), path)
    return path


ARTICLE_MODEL: Settings = {
    "model": {"candidate": {"layers": [512, 128], "skip_connection": True}},
    "tables": {"user": {"init_std": 1e-4, "optimizer": {"learning_rate": 0.02}}},
    "loss": {"kind": "softmax", "num_negatives": 0, "mask_negatives": "seen"},
    "training": {"epochs": 10, "dense_optimizer": {"lr_decay": "cosine"}},
}
LOG_VECTORS: Settings = {"embeddings": [{"source": "log", "method": "spectral", "dim": 128}]}
SMALL_STEPS: Settings = {"optimizer": {"learning_rate": 0.02}}
TEXT_TABLES: Settings = {
    # The text vectors have norm 1 and width 128. The first step of the optimizer moves an offset by the learning rate times the
    # square root of 128, about 11. This step must be small compared with the vectors.
    "tables": {"item": {"transfer": "residual", "init_std": 128**-0.5, "id_dropout": 0.5}, "item_offset": SMALL_STEPS}
}
"""Frozen text vectors plus a learned offset, so that articles with and without interactions are comparable."""
COLD_TRAINING: Settings = {
    "model": {"history": {"item_representation": "candidate_tower"}},
    "training": {"epochs": 12, "validation": {"candidates": "cold"}},
}
NO_VALIDATION: Settings = {
    "interactions": {"split": {"validation_share": 0.0, "validation_unit": "pair"}},
    "training": {"validation": None},
}
"""Training on all articles. The number of epochs in COLD_TRAINING was chosen in the experiments with validation."""
POPULARITY: Settings = {"model": {"popularity": {"kind": "fixed", "weight": 0.2}}}
"""A popularity term in the scores. Otherwise, articles without events are ranked as high as similar articles with events.

The weight 0.2 has the best Recall@20 of held-out training pairs among 0, 0.1, 0.2 and 0.3, with and without text.
"""
ALL_PAIRS: Settings = merge_settings(NO_VALIDATION, {"training": {"epochs": 7}})
"""Training on all pairs. With validation, the best epochs of three seeds are 6, 7 and 7 with text, and 7, 7 and 8 without."""
WARM_TEXT_TABLES: Settings = merge_settings(TEXT_TABLES, {"tables": {"item": {"id_dropout": 0.1}}})
SIMPLEX: Settings = {
    "model": {
        "embedding_dim": 64,
        "history": {"length": 100, "include_target": True},
        "query": {"layers": [64], "skip_connection": False},
    },
    "loss": {"kind": "cosine_contrastive", "num_negatives": 1000, "margin": 0.4, "negative_weight": 100},
    "training": {"epochs": 40},
}
FACTORISATION: Settings = {
    "model": {"embedding_dim": 64, "history": {"length": 0}, "query": {"layers": []}},
    "loss": {"in_batch_negatives": False, "num_negatives": 2048, "logq_correction": "none"},
    "training": {"epochs": 40},
}


def settings(data_folder: Path, *, test_kind: str) -> Settings:
    """Return the settings that all variants share. Validation has 10 % of the articles (`cold`) or of the pairs."""
    return {
        "interactions": {
            "paths": str(data_folder / "train.parquet"),
            "split": {
                "kind": "files",
                "test_paths": str(data_folder / f"test_{test_kind}.parquet"),
                "validation_share": 0.1,
                "validation_unit": "item" if test_kind == "cold" else "pair",
            },
        },
        "model": {
            "embedding_dim": 128,
            "learn_user_embedding": True,
            "history": {"length": 20, "last_item_feature": False},
            "query": {"layers": []},
        },
        "training": {"batch_size": 1024, "validation": {"metric": "recall", "k": 20}},
        "evaluation": {"ks": [10, 20]},
    }
