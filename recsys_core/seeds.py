"""Random seeds: fixed seeds for samples, and functions that derive other seeds from `training.seed`.

A derived seed depends only on the arguments of its function, never on earlier draws. A resumed run therefore draws the same
numbers as an uninterrupted run. A change to one of these functions changes the results of every training.

Two other modules use `training.seed` directly: `sharded_model.build_model` initialises the layers of the towers with it, and
`dataset/shuffle.py` derives the order of the examples in an epoch from `training.seed` and the epoch.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

EVALUATION_USERS_SEED = 0
"""Sample of the test users, if there are more than evaluation.max_users."""
VALIDATION_USERS_SEED = 1
"""Sample of the validation users, if there are more than training.validation.max_users."""
TIE_ORDER_SEED = 0
"""Order of items with equal scores in an exact ranking."""
INDEX_ORDER_SEED = 0
"""Order in which item vectors are added to a FAISS index. It decides between items with equal scores."""
INDEX_SAMPLE_SEED = 0
"""Sample of vectors that train a FAISS index, and sample of queries that measure its recall."""
SMOKE_TEST_USERS_SEED = 0
"""Sample of users for the queries in the smoke test of a served model."""
GOLDEN_QUERIES_SEED = 0
"""Histories of the golden queries of a package."""
REFRESH_QUERIES_SEED = 0
"""Sample of users and items whose searches measure the index of a refreshed package."""
CLOSED_FORM_SEED = 0
"""Sample of users from which models in closed form are computed, and start of their truncated decompositions."""
BOOTSTRAP_SEED = 0
"""Resamples of the users in the comparison of two versions."""


def step_seed(seed: int, *, step: int, rank: int) -> int:
    """Return the seed of the dropout of one training step on one rank.

    All seeds differ in a run with fewer than 1,000,003 steps and 4,099 ranks.

    >>> step_seed(7, step=2, rank=1)
    28693094278
    """
    return (seed * 1_000_003 + step) * 4_099 + rank


def table_chunk_seed(seed: int, *, table: str, chunk: int) -> int:
    """Return the seed for the random initial values of one chunk of the rows of `table`. chunk: index of the chunk.

    >>> table_chunk_seed(7, table="item", chunk=0)
    2927366891489041854
    """
    digest = hashlib.sha256(f"{seed}/{table}/{chunk}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # 63 bits: torch requires signed 64-bit seeds


def negatives_key(seed: int, *, epoch: int, rank: int, for_known: bool = False) -> NDArray[np.uint64]:
    """Return the key (two numbers) of the Philox generator that draws the negatives of one epoch on one rank.

    for_known: whether the key is for the draws of known negatives in an unordered log.
    """
    return (
        np.random.SeedSequence([seed, epoch, rank, *[1] * for_known]).generate_state(2, np.uint64).astype(np.uint64, copy=False)
    )


def trial_seed(seed: int, *, trial: int) -> int:
    """Return the seed of Optuna's sampler for one trial of `nightjar tune`.

    Each trial gets a new sampler. If all samplers had the same seed, they would all draw the same random settings.

    >>> trial_seed(7, trial=2)
    700023
    """
    return seed * 100_003 + trial
