"""Sizes and durations as people write them: `8GiB`, `500MB`, `60s`, `1h30m`; and back, for tables.

Pure: no clock, no wire types. Sizes are whole bytes; durations are seconds.
"""

from gpuscale.common.sizes import parse_duration, parse_size

__all__ = ["format_duration", "format_size", "parse_duration", "parse_size"]


def format_size(size: int) -> str:
    """`79.2GiB`: the largest binary unit of which there is at least one, to one decimal; exact when whole."""
    for power, letter in ((5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "K")):
        unit = 1024**power
        if size >= unit:
            return f"{size // unit}{letter}iB" if size % unit == 0 else f"{size / unit:.1f}{letter}iB"
    return f"{size}B"


def format_duration(seconds: float) -> str:
    """`850ms`, `12s`, `3m5s`, `2h7m`, `4d1h`: the two largest units, rounded down."""
    if seconds < 1:
        return f"{int(max(seconds, 0) * 1000)}ms"
    whole = int(seconds)
    for (large, small), (high, low) in zip(
        ((86400, 3600), (3600, 60), (60, 1)), (("d", "h"), ("h", "m"), ("m", "s")), strict=True
    ):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large}{high}{rest}{low}" if rest else f"{whole // large}{high}"
    return f"{whole}s"
