"""Columns of tables, and the text of cells: absent readings are `-`, never 0; enum values have no prefix, names no collections."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Generic, Protocol, TypeVar

from google.protobuf.message import Message

from gpuscale.cli.console.output import ABSENT
from gpuscale.cli.grammar.jsonpath import Field, Path
from gpuscale.cli.grammar.parameters import format_duration, format_size, local_text
from gpuscale.common import wire
from gpuscale.common.names import short_holder

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Column(Generic[M]):
    """A column of a table.

    Attributes:
        heading: its heading.
        cell: the text of a cell.
        wide: only `-o wide` shows it.
        moving: it changes with time, such as an age, which is no change to a watch.
        spare: left out if the terminal is too narrow.
        own: words that the field of its name does not have; None if all are.
    """

    heading: str
    cell: Callable[[M], str]
    wide: bool = False
    moving: bool = False
    spare: bool = False
    own: Collection[str] | None = ()


@dataclass(frozen=True)
class View(Generic[M]):
    """How a kind of resource is shown: its key in JSON lists, its columns, the path of its labels, and those that keys of selectors mean."""

    key: str
    columns: Sequence[Column[M]]
    labels: Path = (Field("labels"),)
    paths: Mapping[str, Path] = field(default_factory=dict[str, Path])

    def column(self, heading: str) -> Column[M] | None:
        """The column with this heading, in any case."""
        return next((one for one in self.columns if one.heading.casefold() == heading.casefold()), None)


def short(name: str) -> str:
    """`jobs/r1` of `endpoints/jobs/replicas/r1`: what commands take as a name."""
    return "/".join(name.split("/")[1::2]) or ABSENT


def text(value: str) -> str:
    """The text, or `-` if it is empty."""
    return value or ABSENT


def holder(name: str) -> str:
    """The holder, a replica by its short name; `-` for nobody."""
    return text(short_holder(name))


_MAKER = re.compile(r"^(?:(?:NVIDIA|Tesla|GeForce) )+")
_DETAIL = re.compile(r"-| \d+ ?GB")


class _OfModel(Protocol):
    @property
    def model(self) -> str: ...
    @property
    def simulated(self) -> bool: ...


def gpu_model(gpu: _OfModel) -> str:
    """The product name of a GPU, marked if simulated."""
    return f"{text(gpu.model)}{_simulated(gpu.model)}" if gpu.simulated else text(gpu.model)


def short_model(gpu: _OfModel) -> str:
    """The product name without maker and memory, `H100` of NVIDIA H100 80GB HBM3, marked if simulated."""
    model = _short(gpu.model)
    return f"{text(model)}{_simulated(model)}" if gpu.simulated else text(model)


def _short(model: str) -> str:
    return _DETAIL.split(_MAKER.sub("", model))[0]


def _simulated(model: str) -> str:
    """The mark of a simulated GPU, unless the model says so."""
    return "" if "simulated" in model.lower() else " SIMULATED"


def counted_models(gpus: Collection[_OfModel], *, simulated: bool = False) -> str:
    """`8 x H100`, `2 x A100, 1 x L40S`, marked if simulated; an unknown model is left out."""
    simulated = simulated or any(gpu.simulated for gpu in gpus)
    counts = Counter(_short(gpu.model) for gpu in gpus)
    listed = ", ".join(f"{count} x {model}" if model else str(count) for model, count in counts.items())
    return f"{listed or '0'}{_simulated(listed) if simulated else ''}"


def number(message: Message, field: str, show: Callable[[float], str] = "{:g}".format) -> str:
    """The number in an optional field; `-` if absent."""
    value: object = getattr(message, field)
    return show(value) if message.HasField(field) and isinstance(value, (int, float)) else ABSENT


def percent(value: float) -> str:
    """`37%`."""
    return f"{value:.0f}%"


def size(value: float) -> str:
    """`79.2GiB`."""
    return format_size(int(value))


def memory_used(message: Message) -> str:
    """Used and total memory, as `12GiB/80GiB`, with `-` for an absent part; `-` if both are absent."""
    cell = f"{number(message, 'memory_used_bytes', size)}/{number(message, 'memory_total_bytes', size)}"
    return ABSENT if cell == f"{ABSENT}/{ABSENT}" else cell


def word(message: Message, field: str) -> str:
    """The enum value in a field without its prefix, `ONLINE` of `NODE_STATE_ONLINE`; `-` if unspecified."""
    return wire.enum_word(message, field) or ABSENT


def duration(message: Message, field: str) -> str:
    """The Duration in a field; `-` if absent."""
    seconds = wire.optional_seconds(message, field)
    return ABSENT if seconds is None else format_duration(seconds)


def since(message: Message, field: str, until: str = "") -> str:
    """The age of the Timestamp in a field, by this host's clock or, where it is set, at that in `until`; `-` if absent."""
    if not message.HasField(field):
        return ABSENT
    ended = until and message.HasField(until)
    end = wire.to_datetime(getattr(message, until)) if ended else datetime.now(UTC)
    return format_duration((end - wire.to_datetime(getattr(message, field))).total_seconds())


def granted(reservation: Message) -> str:
    """The field with the time since when a reservation holds its GPUs: one that waited was made before."""
    return "grant_time" if reservation.HasField("grant_time") else "create_time"


def moment(message: Message, field: str) -> str:
    """The Timestamp in a field in local time; `-` if absent."""
    return local_text(wire.to_datetime(getattr(message, field))) if message.HasField(field) else ABSENT
