"""How far readings may move before a receiver is told, and which of them did. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import ne

Bands = tuple[float, ...]
"""The dead-band of each field of a reading, in their order; 0 where every change is told."""


@dataclass(frozen=True, slots=True)
class DeadBands:
    """How far a reading may move untold, by its unit: the last word of its name. Other readings are told exactly."""

    percent: float = 0.5
    bytes: float = 1024.0 * 1024.0
    celsius: float = 0.5
    watts: float = 1.0
    mhz: float = 15.0
    joules: float = 1000.0
    age_seconds: float = 0.25

    def of(self, fields: Iterable[str]) -> Bands:
        """The bands of fields by their names."""
        units = {name: float(getattr(self, name)) for name in self.__slots__}
        return tuple(units.get(name.rpartition("_")[2], 0.0) for name in fields)


def moves(before: Sequence[object], after: Sequence[object], bands: Bands) -> list[int]:
    """Places of all readings that differ, once any of them has moved by more than its dead-band; none until then."""
    if before == after:
        return []
    differ = list(compress(count(), map(ne, before, after)))
    if all(is_near(before[place], after[place], bands[place]) for place in differ):
        return []
    return differ


def is_near(before: object, after: object, band: float) -> bool:
    """Whether both are absent, or both are numbers that are no further from each other than a dead-band."""
    if before is None or after is None:
        return before is after
    if isinstance(before, int | float) and isinstance(after, int | float):
        return abs(after - before) <= band
    return False
