"""Units and numeric limits."""

DAY_S = 86_400
DAY_US = DAY_S * 1_000_000
TICKS_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
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


def format_bytes(num_bytes: float | None) -> str:
    """Format a number of bytes.

    >>> [format_bytes(value) for value in (None, 0, 1536, 64 * 2**30, 3 * 2**40)]
    ['-', '0 B', '1.5 KiB', '64.0 GiB', '3.0 TiB']
    """
    if num_bytes is None:
        return "-"
    for unit, unit_bytes in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_milliseconds(duration_ms: float | None) -> str:
    """Format milliseconds.

    >>> [format_milliseconds(duration_ms) for duration_ms in (None, 0, 0.1234, 12.34, 4321)]
    ['-', '0', '0.12', '12.3', '4,321']
    """
    if duration_ms is None or duration_ms == 0:
        return "-" if duration_ms is None else "0"
    return f"{duration_ms:,.0f}" if duration_ms >= 100 else f"{duration_ms:.1f}" if duration_ms >= 10 else f"{duration_ms:.2g}"


def format_duration(seconds: float | None) -> str:
    """Format a duration.

    >>> [format_duration(seconds) for seconds in (None, 0.42, 59.6, 125, 754, 4_980, 90_000)]
    ['-', '0.4 s', '60 s', '2 min 05 s', '13 min', '1 h 23 min', '25 h 00 min']
    """
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


def format_metric(value: float | None) -> str:
    """Format a metric with four decimals; "-" if it was not measured."""
    return "-" if value is None else f"{value:.4f}"
