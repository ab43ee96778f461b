"""Units and numeric limits."""

DAY_S = 86_400
DAY_US = DAY_S * 1_000_000
MIB = 2**20
GIB = 2**30
INT64_MAX = 2**63 - 1
FLOAT32_MAX = 3.4028234663852886e38
"""The largest finite float32."""


def format_gib(num_bytes: int, *, digits: int = 1) -> str:
    """Format a size in GiB for a message.

    >>> format_gib(1_342_177_280, digits=3), format_gib(2**33)
    ('1.250 GiB', '8.0 GiB')
    """
    return f"{num_bytes / GIB:,.{digits}f} GiB"
