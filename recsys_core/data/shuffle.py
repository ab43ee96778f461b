"""A shuffle that is a function: position -> position, with nothing held in memory.

A Feistel network over pairs (left, right) of a grid that is hardly larger than n: each round adds to one of the two a hash of
the other, modulo its size. Positions that land outside [0, n) are sent through again until they land inside (cycle walking;
Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). On a tight grid that is about one position in sqrt(n): on the
next power of four it would be up to three in four, over and over.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
_MIX = np.uint64(0x9E3779B97F4A7C15)
_29, _32 = np.uint64(29), np.uint64(32)


def shuffled(positions: NDArray[np.int64], *, n: int, key: tuple[int, ...]) -> NDArray[np.int64]:
    """Where the permutation of [0, n) that belongs to `key` sends `positions`.

    >>> sorted(shuffled(np.arange(5), n=5, key=(7, 0)).tolist())
    [0, 1, 2, 3, 4]
    """
    if n < 2:
        return positions.copy()
    left_size = math.isqrt(n - 1) + 1
    sizes = (np.uint64(left_size), np.uint64(-(-n // left_size)))
    round_keys = _round_keys(key)
    result = _feistel(np.ascontiguousarray(positions, np.int64).view(np.uint64), sizes=sizes, round_keys=round_keys)
    outside = np.flatnonzero(result >= n)
    while len(outside):
        walked = _feistel(result[outside], sizes=sizes, round_keys=round_keys)
        result[outside] = walked
        outside = outside[walked >= n]
    return result.view(np.int64)


@lru_cache
def _round_keys(key: tuple[int, ...]) -> NDArray[np.uint64]:
    keys: NDArray[np.uint64] = np.random.default_rng(list(key)).integers(0, 2**63, ROUNDS, dtype=np.uint64)
    return keys


def _feistel(
    value: NDArray[np.uint64], *, sizes: tuple[np.uint64, np.uint64], round_keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    left = value // sizes[1]
    halves = [left, value - left * sizes[1]]
    hashed, spare = np.empty_like(value), np.empty_like(value)
    for number, key in enumerate(round_keys):
        changed, other, size = halves[number % 2], halves[1 - number % 2], sizes[number % 2]
        # A hash of `other` whose upper half is well mixed,
        np.bitwise_xor(other, key, out=hashed)
        hashed *= _MIX
        np.right_shift(hashed, _29, out=spare)
        hashed ^= spare
        hashed *= _MIX
        # and from that half a number in [0, size), all equally likely up to 1 in 2**32 (size < 2**32),
        hashed >>= _32
        hashed *= size
        hashed >>= _32
        # which is added modulo size: what is below zero without a sign is larger than what it was.
        changed += hashed
        np.subtract(changed, size, out=spare)
        np.minimum(changed, spare, out=changed)
    found: NDArray[np.uint64] = halves[0] * sizes[1] + halves[1]
    return found
