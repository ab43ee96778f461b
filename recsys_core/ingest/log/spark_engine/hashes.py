"""DuckDB's hash of texts in Spark's SQL, so that both engines draw the same events and order ties in the same way.

The hash is a variant of MurmurHash64A over blocks of 8 bytes; see `Hash(string_t)` and `CombineHash` in DuckDB's source. The
Spark session disables ANSI arithmetic, so that a product keeps its lower 64 bits.
"""

_MULTIPLIER = 0xD6E8FEB86659FD93 - 2**64
_LENGTH_MULTIPLIER = 0xC6A4A7935BD1E995 - 2**64
_SEED = 0xE17A1465
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F
"""Mask of the lower four bits of each byte."""


def hash_sql(*texts_sql: str) -> str:
    """Return SQL for the hash of one or several texts: a signed 64-bit integer."""
    first_sql, *other_texts_sql = texts_sql
    combined_sql = _text_hash_sql(first_sql)
    for text_sql in other_texts_sql:
        mixed_sql = f"aggregate(array({combined_sql}), 0L, (_, h) -> (h ^ shiftrightunsigned(h, 32)) * ({_MULTIPLIER}L))"
        combined_sql = f"({mixed_sql} ^ {_text_hash_sql(text_sql)})"
    return combined_sql


def draw_sql(*texts_sql: str) -> str:
    """Return SQL for the hash of the texts, read as an unsigned integer, modulo 1,000,000."""
    # With h = 2q + b, h modulo 2m is 2 (q modulo m) + b. Spark has no unsigned integers, and q has only 63 bits.
    return (
        f"aggregate(array({hash_sql(*texts_sql)}), 0L, "
        "(_, h) -> 2 * (shiftrightunsigned(h, 1) % 500000) + (h & 1), draw -> CAST(draw AS INT))"
    )


def _text_hash_sql(text_sql: str) -> str:
    # A block is a little-endian number of 8 bytes. Reversing its hexadecimal digits reverses the bytes, but also the two digits
    # of each byte, which `block_sql` swaps back.
    digits_sql = f"reverse(hex(substr(CAST({text_sql} AS BINARY), 8 * i + 1, 8)))"
    block_sql = (
        f"aggregate(array(CAST(conv({digits_sql}, 16, -10) AS BIGINT)), 0L, "
        f"(_, x) -> ((x & {_LOW_NIBBLES}L) << 4) | (shiftrightunsigned(x, 4) & {_LOW_NIBBLES}L))"
    )
    blocks_sql = f"transform(sequence(0, octet_length({text_sql}) DIV 8), i -> {block_sql})"
    start_sql = f"({_SEED}L ^ (octet_length({text_sql}) * ({_LENGTH_MULTIPLIER}L)))"
    num_blocks_sql = f"(octet_length({text_sql}) + 7) DIV 8"
    mixed_blocks_sql = (
        f"aggregate(slice({blocks_sql}, 1, CAST({num_blocks_sql} AS INT)), {start_sql}, (h, x) -> (h ^ x) * ({_MULTIPLIER}L))"
    )
    # At the end, the hash is mixed twice.
    return (
        f"aggregate(array(1, 2), {mixed_blocks_sql}, (h, _) -> (h ^ shiftrightunsigned(h, 32)) * ({_MULTIPLIER}L), "
        "h -> h ^ shiftrightunsigned(h, 32))"
    )
