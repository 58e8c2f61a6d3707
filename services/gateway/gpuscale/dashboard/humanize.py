"""Numbers and times for people. Pure, except for the clock in `ago`. An unknown value is `-`, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.common.wire import enum_word, seconds, to_datetime

UNKNOWN = "-"
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_SPANS = (("d", 86400), ("h", 3600), ("min", 60))
WORTH: Mapping[str, float] = dict(_UNITS) | dict(_SPANS)
"""The size of each unit, in the smallest of its kind."""

_TERMS = ("GPU", "SM", "PCIe", "NVLink", "NVSwitch", "ECC", "XID", "CRC", "BAR1", "vGPU")
WRITTEN: Mapping[str, str] = {term.lower(): term for term in _TERMS}
"""How words are written that are not in lower case."""


def known(message: Message, field: str) -> float | None:
    """The number in an optional field; None if it is absent."""
    value: float | None = getattr(message, field) if message.HasField(field) else None
    return value


def number(value: float | None, unit: str = "", digits: int = 0) -> str:
    """`37 %`."""
    return UNKNOWN if value is None else f"{value:.{digits}f}{unit and ' ' + unit}"


def size(count: float | None) -> str:
    """`79.2 GiB`."""
    if count is None:
        return UNKNOWN
    for unit, worth in _UNITS:
        if count >= worth:
            return f"{count / worth:.1f} {unit}"
    return f"{count:.0f} B"


def part(count: float | None, total: float | None) -> str:
    """`27.3 / 78.1 TiB`, both in the unit of the total."""
    if count is None or not total:
        return f"{size(count)} / {size(total)}"
    unit, worth = next(((unit, worth) for unit, worth in _UNITS if total >= worth), ("B", 1))
    return f"{count / worth:.1f} / {total / worth:.1f} {unit}"


def power(watts: float | None) -> str:
    """`537 W`, `309.5 kW`."""
    return number(watts, "W") if watts is None or watts < 10_000 else number(watts / 1000.0, "kW", 1)


def span(length: float) -> str:
    """`2 h 5 min`: at most the two largest parts; `1 min` for 60 s."""
    left, parts = max(0, round(length)), list[str]()
    for unit, worth in _SPANS:
        if left >= worth:
            parts.append(f"{left // worth} {unit}")
            left %= worth
    if not parts or (left and len(parts) < 2):
        parts.append(f"{left} s")
    return " ".join(parts[:2])


def length(duration: Duration) -> str:
    """A Duration, as `span` writes it."""
    return span(seconds(duration))


def clock(time: Timestamp) -> str:
    """`2026-11-30 14:05:09`, in UTC."""
    return to_datetime(time).strftime("%Y-%m-%d %H:%M:%S") if time.seconds else UNKNOWN


def ago(time: Timestamp, until: datetime | None = None) -> str:
    """The time from then until a moment, or until now by this host's clock."""
    passed = (until or datetime.now(UTC)) - to_datetime(time)
    return span(passed.total_seconds()) if time.seconds else UNKNOWN


def word(message: Message, field: str) -> str:
    """An enum field in words: `reset required` for GPU_STATE_RESET_REQUIRED; a newer server's value is its number."""
    words = enum_word(message, field).lower().split("_")
    return " ".join(WRITTEN.get(word, word) for word in words) or "unspecified"


def state(text: str) -> str:
    """A state in lower case, and the reason behind it as it is: `quarantined: XID 48`."""
    word, colon, reason = text.partition(":")
    return f"{word.lower()}{colon}{reason}"


def problems(found: Mapping[str, str]) -> str:
    """What cannot be read and why, in one line; sources with the same problem are grouped."""
    alike: dict[str, list[str]] = {}
    for source, problem in sorted(found.items()):
        alike.setdefault(problem, []).append(source)
    return "; ".join(f"{', '.join(sources)}: {problem}" for problem, sources in alike.items())
