"""How far readings may move before a receiver is told, and which of them did."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

Listed = Sequence[tuple[FieldDescriptor, Any]]
"""The fields of a reading that are there, by number, as protobuf lists them."""
Bands = dict[int, float]
"""Dead-bands of the fields that have one, by number; of ages in seconds."""


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

    def by_number(self, kind: type[Message]) -> Bands:
        """The bands of the fields of a message type that have one."""
        units = {name: getattr(self, name) for name in self.__slots__}
        named = {field.number: units.get(field.name.rpartition("_")[2]) for field in kind.DESCRIPTOR.fields}
        ages = {
            field.number: self.age_seconds
            for field in kind.DESCRIPTOR.fields
            if field.message_type is Duration.DESCRIPTOR
        }
        return {number: band for number, band in named.items() if band is not None} | ages


@dataclass(frozen=True, slots=True)
class Difference:
    """How a reading differs from one that was sent.

    Attributes:
        listed: the reading as a receiver has it once it was told.
        changed: fields that are there and are not as they were sent, with their values.
        cleared: numbers of fields that are not there any more.
    """

    listed: Listed
    changed: Listed
    cleared: list[int]


def difference(sent: Listed, listed: Listed, bands: Bands) -> Difference | None:
    """What to tell of a reading, all of it exactly; None while nothing came, went, or moved beyond its dead-band.

    Ages within their band are not told: a receiver counts on from each message those that it has.
    """
    fields = [field for field, _ in listed]
    if fields == [field for field, _ in sent]:
        return _moves(sent, listed, bands)
    before = dict(sent)
    changed = [(field, value) for field, value in listed if field not in before or before[field] != value]
    return Difference(listed, changed, [field.number for field in before if field not in fields])


def _moves(sent: Listed, listed: Listed, bands: Bands) -> Difference | None:
    """The difference of two readings that have the same fields."""
    moved = False
    told = list(listed)
    changed: list[tuple[FieldDescriptor, Any]] = []
    different = [place for place, (one, before) in enumerate(zip(listed, sent, strict=True)) if one != before]
    for place in different:
        field, value = listed[place]
        near = is_near(sent[place][1], value, bands.get(field.number, 0.0))
        if near and field.message_type is not None:
            told[place] = sent[place]
        else:
            moved = moved or not near
            changed.append(listed[place])
    return Difference(told, changed, []) if moved else None


def is_near(before: Any, value: Any, band: float) -> bool:
    """Whether a value is within a dead-band of another."""
    if band == 0.0:
        return False
    if isinstance(value, Duration):
        return bool(abs(value.ToNanoseconds() - before.ToNanoseconds()) <= band * 1e9)
    return bool(abs(value - before) <= band)
