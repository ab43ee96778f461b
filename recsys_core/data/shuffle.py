"""A shuffle that is a function: position -> position, with nothing held in memory.

A Feistel network permutes the smallest square power of two that covers n; positions that land outside [0, n) are sent
through again until they land inside (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
_MIX = np.uint64(0x9E3779B97F4A7C15)


def shuffled(positions: NDArray[np.int64], *, n: int, key: tuple[int, ...]) -> NDArray[np.int64]:
    """Where the permutation of [0, n) that belongs to `key` sends `positions`.

    >>> sorted(shuffled(np.arange(5), n=5, key=(7, 0)).tolist())
    [0, 1, 2, 3, 4]
    """
    if n < 2:
        return positions.copy()
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    round_keys = np.random.default_rng(list(key)).integers(0, 2**63, ROUNDS, dtype=np.uint64)
    result = _feistel(positions.astype(np.uint64), half=half, round_keys=round_keys)
    outside = np.flatnonzero(result >= n)
    while len(outside):
        walked = _feistel(result[outside], half=half, round_keys=round_keys)
        result[outside] = walked
        outside = outside[walked >= n]
    return result.astype(np.int64)


def _feistel(value: NDArray[np.uint64], *, half: np.uint64, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for key in round_keys:
        mixed = (right ^ key) * _MIX
        mixed ^= mixed >> np.uint64(29)
        mixed *= _MIX
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << half) | right
