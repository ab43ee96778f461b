"""A shuffle that is a function: position -> position, with nothing held in memory.

A Feistel network over pairs (left, right) of a grid that is hardly larger than n: each round adds to one of the two a hash of
the other, modulo its size. Positions that land outside [0, n) are sent through again until they land inside (cycle walking;
Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). On a tight grid that is about one position in sqrt(n): on the
next power of four it would be up to three in four, over and over.
"""

import math

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
    round_keys = np.random.default_rng(list(key)).integers(0, 2**63, ROUNDS, dtype=np.uint64)
    result = _feistel(positions.astype(np.uint64), sizes=sizes, round_keys=round_keys)
    outside = np.flatnonzero(result >= n)
    while len(outside):
        walked = _feistel(result[outside], sizes=sizes, round_keys=round_keys)
        result[outside] = walked
        outside = outside[walked >= n]
    return result.astype(np.int64)


def below(hashed: NDArray[np.uint64], size: np.uint64) -> NDArray[np.uint64]:
    """Numbers in [0, size) from the upper halves of hashes, equally likely up to 1 in 2**32; size < 2**32. In place.

    >>> below(np.array([0, 2**63, 2**64 - 1], np.uint64), np.uint64(10)).tolist()
    [0, 5, 9]
    """
    hashed >>= _32
    hashed *= size
    hashed >>= _32
    return hashed


def hashes(value: NDArray[np.uint64], *, key: np.uint64) -> NDArray[np.uint64]:
    """A hash of each value whose upper half is well mixed."""
    mixed = (value ^ key) * _MIX
    mixed ^= mixed >> _29
    mixed *= _MIX
    return mixed


def _feistel(
    value: NDArray[np.uint64], *, sizes: tuple[np.uint64, np.uint64], round_keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    halves = [value // sizes[1], value]
    halves[1] = value - halves[0] * sizes[1]
    for number, key in enumerate(round_keys):
        changed, other, size = halves[number % 2], halves[1 - number % 2], sizes[number % 2]
        changed += below(hashes(other, key=key), size)
        changed -= size * (changed >= size)
    return halves[0] * sizes[1] + halves[1]
