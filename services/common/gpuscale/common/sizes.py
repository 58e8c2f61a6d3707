"""Sizes, durations and counts as people write them: `8GiB`, `500MB`, `1.5TiB`; `60s`, `1h30m`; `1 replica`. Pure."""

import re
from collections.abc import Mapping

_BYTES: Mapping[str, int] = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)},
}
_BYTE_UNITS = {unit.lower(): factor for unit, factor in _BYTES.items()}
_LARGEST_SIZE = 2**63 - 1  # int64 in the contract
_SIZE = r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)"

_SECONDS: Mapping[str, float] = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_LONGEST_DURATION = 315_576_000_000.0  # limit of protobuf's Duration: 10,000 years

_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = rf"(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s)?(?:{_NUMBER}ms)?"


def counted(count: float, one: str, many: str = "") -> str:
    """A count and its noun, with a verb where that changes too: `1 GPU is`, `2 GPUs are`; by default `many` is `one` with an s."""
    return f"{count if isinstance(count, int) else f'{count:g}'} {one if count == 1 else many or f'{one}s'}"


def hours_text(hours: float) -> str:
    """Hours to a tenth; below one hour with two digits, so that what was used does not read 0.0."""
    return f"{hours:.1f}" if hours >= 1 or hours < 0.0001 else f"{hours:.2g}"


def parse_size(text: str) -> int:
    """Bytes of `8GiB`, `500MB`, `1.5TiB` or a plain number of bytes; units in any case, KB = 1000, KiB = 1024.

    Raises ValueError: not a size, or more than an int64 holds.
    """
    found = re.fullmatch(_SIZE, text.strip())
    factor = _BYTE_UNITS.get(found[2].lower()) if found else None
    if found is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write it like 8GiB, 500MB or 1024")
    whole, _, fraction = found[1].partition(".")
    # Integers: a float has only 53 bits.
    size: int = int(whole + fraction) * factor // 10 ** len(fraction)
    if size > _LARGEST_SIZE:
        raise ValueError(f"{text!r} is more than {_LARGEST_SIZE} bytes")
    return size


def parse_duration(text: str) -> float:
    """Seconds of `60s`, `5m`, `1h30m`, `250ms`, `2d` or a plain number of seconds; larger units come first.

    Raises ValueError: not a duration, or longer than 10,000 years.
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


def duration_text(seconds: float) -> str:
    """`397d`, `1h30m`, `100ms`, `0s`: a duration to the millisecond, as `parse_duration` reads it."""
    left, text = round(1000 * seconds), ""
    for unit, worth in _SECONDS.items():
        count, left = divmod(left, round(1000 * worth))
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def to_bytes(size: int | str) -> int:
    """Bytes of a size given as a number or text; ValueError for invalid text."""
    return parse_size(size) if isinstance(size, str) else size


def to_seconds(duration: float | str) -> float:
    """Seconds of a duration given as a number or text; ValueError for invalid text."""
    return parse_duration(duration) if isinstance(duration, str) else duration
