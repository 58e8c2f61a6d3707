"""Sizes and durations as people write them: `8GiB`, `500MB`, `60s`, `1h30m`; and back, for tables.

Pure: no clock, no wire types. Sizes are whole bytes; durations are seconds.
"""

import re
from collections.abc import Mapping

from gpuscale.common.sizes import parse_size

__all__ = ["format_duration", "format_size", "parse_duration", "parse_size"]

_SECONDS: Mapping[str, float] = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_LONGEST_DURATION = 315_576_000_000.0  # what a Duration of protobuf holds: 10,000 years

_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = rf"(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s)?(?:{_NUMBER}ms)?"


def parse_duration(text: str) -> float:
    """Seconds of `60s`, `5m`, `1h30m`, `250ms`, `2d` or a plain number of seconds; larger units come first.

    Raises:
        ValueError: not a duration, or longer than 10,000 years.
    """
    plain = text.strip()
    found = re.fullmatch(_DURATION, f"{plain}s" if re.fullmatch(_NUMBER, plain) else plain)
    if not plain or found is None:
        raise ValueError(f"{text!r} is not a duration; write it like 60s, 5m or 1h30m")
    parts = zip(found.groups(), _SECONDS.values(), strict=True)
    seconds = sum(float(number) * unit for number, unit in parts if number)
    if seconds > _LONGEST_DURATION:
        raise ValueError(f"{text!r} is longer than 10,000 years")
    return seconds


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
