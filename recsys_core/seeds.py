"""All random seeds of nightjar: fixed seeds of samples, and seeds that are derived from the configured one.

A derived seed is a function of its arguments alone, never of earlier draws. A resumed run therefore draws the same numbers as
an uninterrupted one. A changed derivation changes the results of every training.

Two seeds are derived where they are used, because the library does it: the towers' layers start from `training.seed` itself
(sharded_model.build_model), and the order of the examples in an epoch is keyed by (`training.seed`, epoch) (data/shuffle.py).
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

EVALUATION_USERS_SEED = 0
"""Which users are evaluated if evaluation.max_users is smaller than their number."""
VALIDATION_USERS_SEED = 1
"""Which users are validated if training.validation.max_users is smaller than their number."""
TIE_ORDER_SEED = 0
"""The order of items with equal scores in an exact ranking."""
INDEX_ORDER_SEED = 0
"""The order in which item vectors are added to a FAISS index, which decides between equal scores."""
INDEX_SAMPLE_SEED = 0
"""Which vectors train a FAISS index, and which queries measure it."""
SMOKE_TEST_USERS_SEED = 0
"""Which users the smoke test of a served model queries."""


def step_seed(seed: int, *, step: int, rank: int) -> int:
    """Return the seed of the dropout of one training step on one rank.

    The function is one-to-one for fewer than 1,000,003 steps and 4,099 ranks.

    >>> step_seed(7, step=2, rank=1)
    28693094278
    """
    return (seed * 1_000_003 + step) * 4_099 + rank


def table_chunk_seed(seed: int, *, table: str, chunk: int) -> int:
    """Return the seed of the random initial values of one chunk of rows of an embedding table.

    >>> table_chunk_seed(7, table="item", chunk=0)
    2927366891489041854
    """
    digest = hashlib.sha256(f"{seed}/{table}/{chunk}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # 63 bits: torch takes signed 64-bit seeds


def negatives_key(seed: int, *, epoch: int, rank: int) -> NDArray[np.uint64]:
    """Return the key [2] of the counter-based generator (Philox) that draws the negatives of one epoch on one rank."""
    return np.random.SeedSequence([seed, epoch, rank]).generate_state(2, np.uint64).astype(np.uint64, copy=False)


def trial_seed(seed: int, *, trial: int) -> int:
    """Return the seed of Optuna's sampler for one trial of `nightjar tune`.

    The sampler starts again in each process: with one seed for all trials it would repeat its first suggestion.

    >>> trial_seed(7, trial=2)
    700023
    """
    return seed * 100_003 + trial
