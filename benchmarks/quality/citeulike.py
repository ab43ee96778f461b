"""citeulike_t: articles and who saved them. Cold articles among cold ones; warm ones with and without the text."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.quality.experiment import Experiment, Settings, merged


def experiments(data: Path, *, folder: Path, seeds: range) -> Iterator[Experiment]:
    """Cold start, warm with and without text, and two models of the literature on ids alone."""
    vectors: Settings = {"embeddings": [{"paths": str(data / "item_embeddings.parquet"), "vector_column": "embedding"}]}
    known: Settings = {"embeddings": [{"paths": str(known_vectors(data, folder=folder)), "vector_column": "embedding"}]}
    cold = merged(settings(data, test="cold"), ARTICLES, known, TEXT, COLD)
    pairs = settings(data, test="warm")
    warm = merged(pairs, ARTICLES)
    variants = {
        "cold": {"text, residual": cold, "text, residual, all articles": merged(cold, ALL_ARTICLES)},
        "warm": {"with text": merged(warm, vectors, WARM_TEXT), "without text": warm},
        "collaborative": {
            "SimpleX": merged(pairs, SIMPLEX),
            "sampled-softmax matrix factorisation": merged(pairs, FACTORISATION),
        },
    }
    for seed in seeds:
        for part, ones in variants.items():
            for name, one in ones.items():
                yield Experiment(part, name, seed, one)


def known_vectors(data: Path, *, folder: Path) -> Path:
    """Vectors of the articles in the training log and of the cold ones: what only the warm test has is no candidate."""
    known = pa.concat_arrays(
        [
            pq.read_table(data / name, columns=["item_id"])["item_id"].combine_chunks()
            for name in ("train.parquet", "test_cold.parquet")
        ]
    )
    table = pq.read_table(data / "item_embeddings.parquet")
    path = folder / "known_embeddings.parquet"
    pq.write_table(table.filter(pc.is_in(table["item_id"], known.unique())), path)
    return path


ARTICLES: Settings = {
    "model": {"candidate": {"layers": [512, 128], "skip_connection": True}},
    "tables": {"user": {"init_std": 1e-4, "optimizer": {"learning_rate": 0.02}}},
    "loss": {"kind": "softmax", "num_negatives": 0, "mask_negatives": "seen"},
    "training": {"epochs": 10, "dense_optimizer": {"lr_decay": "cosine"}},
}
SMALL_STEPS: Settings = {"optimizer": {"learning_rate": 0.02}}
TEXT: Settings = {
    # Vectors of length 1, so that an offset, which moves by about the learning rate times 11 at first, does not drown them.
    "tables": {"item": {"transfer": "residual", "init_std": 128**-0.5, "id_dropout": 0.5}, "item_offset": SMALL_STEPS}
}
"""Frozen text vectors beside a learned offset, so that an article without an interaction lies among the others."""
COLD: Settings = {
    "model": {"history": {"item_representation": "candidate_tower"}},
    "training": {"epochs": 12, "validation": {"candidates": "cold"}},
}
ALL_ARTICLES: Settings = {
    "interactions": {"split": {"validation_share": 0.0, "validation_by": "pair"}},
    "training": {"validation": None},
}
"""Nothing held out: as many epochs as the runs that hold articles out found best."""
WARM_TEXT: Settings = merged(TEXT, {"tables": {"item": {"id_dropout": 0.1}}})
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


def settings(data: Path, *, test: str) -> Settings:
    """Common to all variants. Held out for validation: 10 % of the articles for cold ones, else 10 % of the pairs."""
    return {
        "interactions": {
            "paths": str(data / "train.parquet"),
            "split": {
                "kind": "files",
                "test": str(data / f"test_{test}.parquet"),
                "validation_share": 0.1,
                "validation_by": "item" if test == "cold" else "pair",
            },
        },
        "model": {
            "embedding_dim": 128,
            "user_id": True,
            "history": {"length": 20, "last_item": False},
            "query": {"layers": []},
        },
        "training": {"batch_size": 1024, "validation": {"metric": "recall", "k": 20}},
        "evaluation": {"ks": [10, 20]},
    }
