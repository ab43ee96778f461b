"""Experiments on ml1m (MovieLens-1M as pairs of ids): matrix factorisation with a softmax over the whole catalogue."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.quality.experiment import Experiment, Settings, merge_settings


def experiments(data_folder: Path, *, seeds: range) -> Iterator[Experiment]:
    """Yield the experiments with validation, and the experiments on all pairs with the same number of epochs."""
    factorisation = merge_settings(settings(data_folder), FACTORISATION)
    exponents = merge_settings(factorisation, EXPONENTS)
    settings_by_variant = {
        "exponents": exponents,
        "exponents, all pairs": merge_settings(exponents, NO_VALIDATION),
        "exponents, block": merge_settings(exponents, {"model": {"spectral_block": BLOCK}}),
        "exponents, block, all pairs": merge_settings(
            exponents, {"model": {"spectral_block": {**BLOCK, "weights": [BLOCK_WEIGHT]}}}, NO_VALIDATION
        ),
        "plain": factorisation,
        "plain, all pairs": merge_settings(factorisation, NO_VALIDATION),
    }
    for seed in seeds:
        for variant, variant_settings in settings_by_variant.items():
            yield Experiment("ml1m", variant, seed, variant_settings)


REPLICATED: Settings = {"sharding_types": ["data_parallel"]}
FACTORISATION: Settings = {
    "model": {
        "embedding_dim": 64,
        "learn_user_embedding": True,
        "history": {"length": 0, "last_item_feature": False},
        "query": {"layers": []},
        "temperature": 0.2,
    },
    "loss": {"negatives": "all", "logq_correction": "none"},
    "training": {
        "epochs": 12,
        "batch_size": 8192,
        "validation": {"metric": "ndcg", "k": 20},
        "table_optimizer": {"kind": "adam", "learning_rate": 0.01, "lr_decay": "linear"},
    },
    "sharding": {"tables": {"item": REPLICATED, "user": REPLICATED}},  # Adam on a CPU requires data_parallel
}
EXPONENTS: Settings = {"model": {"temperature": 0.18}, "loss": {"negatives_exponent": 1.1, "user_exponent": -0.5}}
BLOCK: Settings = {"dim": 80, "item_exponent": 0.4, "output_dim": 64}
BLOCK_WEIGHT = 0.25
"""The weight that the validation of "exponents, block" chose with the first seed."""
NO_VALIDATION: Settings = {"interactions": {"split": {"validation_share": 0.0}}, "training": {"validation": None}}
"""Training on all pairs for the epochs of FACTORISATION, whose number was chosen before a test metric was read."""


def settings(data_folder: Path) -> Settings:
    """Return the settings that all variants share. 10 % of the pairs are for validation."""
    return {
        "interactions": {
            "paths": str(data_folder / "train.parquet"),
            "split": {"kind": "files", "test_paths": str(data_folder / "test.parquet"), "validation_share": 0.1},
        },
        "evaluation": {"ks": [10, 20]},
    }
