"""A shuffle that computes each index of the permutation on its own, without a permutation array in memory.

The shuffle is a Feistel network. An index is split into a pair (left, right), the coordinates of a cell of a grid. Each round
adds a hash of one coordinate to the other coordinate, modulo the length of the grid in that direction. If the resulting index
is outside [0, n), it goes through the network again until it is inside (cycle walking; Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002). The grid has fewer than n + sqrt(n) cells, so fewer than one index in sqrt(n) needs another
pass. A square grid with sides of a power of two would be simpler, but up to three in four indices would need another pass.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT_29, _SHIFT_32 = np.uint64(29), np.uint64(32)


def shuffled(index: NDArray[np.int64], *, n: int, key: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the image of each index under a permutation of [0, n), which `key` selects.

    >>> sorted(shuffled(np.arange(5), n=5, key=(7, 0)).tolist())
    [0, 1, 2, 3, 4]
    """
    if n < 2:
        return index.copy()
    left_length = math.isqrt(n - 1) + 1
    grid_sides = (np.uint64(left_length), np.uint64(-(-n // left_length)))
    round_keys = _round_keys(key)
    shuffled_index = _feistel(
        np.ascontiguousarray(index, np.int64).view(np.uint64), grid_sides=grid_sides, round_keys=round_keys
    )
    outside_positions = np.flatnonzero(shuffled_index >= n)
    while len(outside_positions):
        next_index = _feistel(shuffled_index[outside_positions], grid_sides=grid_sides, round_keys=round_keys)
        shuffled_index[outside_positions] = next_index
        outside_positions = outside_positions[next_index >= n]
    return shuffled_index.view(np.int64)


@lru_cache
def _round_keys(key: tuple[int, ...]) -> NDArray[np.uint64]:
    keys: NDArray[np.uint64] = np.random.default_rng(list(key)).integers(0, 2**63, ROUNDS, dtype=np.uint64)
    return keys


def _feistel(
    index: NDArray[np.uint64], *, grid_sides: tuple[np.uint64, np.uint64], round_keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    left_coordinate = index // grid_sides[1]
    coordinates = [left_coordinate, index - left_coordinate * grid_sides[1]]
    hash_value, buffer = np.empty_like(index), np.empty_like(index)
    for round_index, round_key in enumerate(round_keys):
        target_coordinate, source_coordinate = coordinates[round_index % 2], coordinates[1 - round_index % 2]
        grid_side = grid_sides[round_index % 2]
        # Hash the source coordinate; the upper 32 bits are well mixed.
        np.bitwise_xor(source_coordinate, round_key, out=hash_value)
        hash_value *= _MULTIPLIER
        np.right_shift(hash_value, _SHIFT_29, out=buffer)
        hash_value ^= buffer
        hash_value *= _MULTIPLIER
        # Scale the upper 32 bits to [0, grid_side). The product fits into 64 bits, because grid_side < 2**32. The probabilities
        # of two values differ by at most 2**-32.
        hash_value >>= _SHIFT_32
        hash_value *= grid_side
        hash_value >>= _SHIFT_32
        # Add modulo grid_side. If the sum is below grid_side, sum - grid_side wraps around to a large unsigned number, and the
        # minimum is the sum itself.
        target_coordinate += hash_value
        np.subtract(target_coordinate, grid_side, out=buffer)
        np.minimum(target_coordinate, buffer, out=target_coordinate)
    shuffled_index: NDArray[np.uint64] = coordinates[0] * grid_sides[1] + coordinates[1]
    return shuffled_index
