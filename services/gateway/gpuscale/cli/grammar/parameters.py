"""Types of options, options shared as a dataclass, and times, sizes and durations as people type and read them."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, tzinfo
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from gpuscale.cli.grammar.jsonpath import parse_form
from gpuscale.common.sizes import parse_duration, to_bytes, to_seconds

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
V = TypeVar("V")


class Parsed(click.ParamType[Any]):
    """A value parsed by a function, whose ValueError is a usage error."""

    def __init__(self, name: str, read: Callable[[str], object]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse text; other values, such as defaults, are unchanged."""
        if not isinstance(value, str):
            return value
        try:
            return self._read(decoded(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def decoded(text: str) -> str:
    """Text of the command line, which Python reads as surrogates in a locale without UTF-8; bytes that are not UTF-8 stay so."""
    return text.encode(errors="surrogateescape").decode(errors="surrogateescape")


def _size(typed: str) -> int:
    size = to_bytes(typed)
    if typed.strip().isdecimal() and 0 < size < _LEAST_SIZE:
        raise ValueError(f"{typed} would be bytes; write {typed}GiB")
    return size


def _time_limit(typed: str) -> float:
    seconds, plain = parse_duration(typed), typed.strip()
    if plain[-1].isdecimal():
        raise ValueError(f"{plain!r} has no unit: write {plain}m or {plain}s")
    return seconds


def _watts(typed: str) -> float:
    number = typed.strip().removesuffix("W")
    if not number.replace(".", "", 1).isdecimal():
        raise ValueError(f"{typed!r} is not a number of watts, such as 300W")
    return float(number)


def _share(text: str) -> int:
    try:
        milli = round(float(text) * 1000)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{text!r} is not a share; write it like 0.5") from error
    if float(text) > 1 or milli < 1:
        raise ValueError(f"{text!r} is not between 0.001 and 1")
    return milli


def _gpu_name(text: str) -> str:
    if "/" not in text and not re.match("[A-Z]{3}-[0-9A-Fa-f]", text):
        meant = f"did you mean --gpus {text}? " if text.isdecimal() else ""
        raise ValueError(f"{text!r} is not a GPU: {meant}--gpu takes NODE/INDEX or the beginning of its UUID")
    return text


def pair(text: str, what: str = "a label", example: str = "KEY=VALUE") -> tuple[str, str]:
    """The text before and after the first `=`. Raises ValueError: there is no `=`, or nothing before it."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"{text!r} is not {what}; write it like {example}")
    return name, value


_LEAST_SIZE = 1 << 10
"""Least bytes without a unit: 20 means GiB."""
SIZE = Parsed("size", _size)
"""A size in bytes, such as 8GiB."""
DURATION = Parsed("duration", to_seconds)
"""A duration in seconds, such as 1h30m."""
TIME_LIMIT = Parsed("duration", _time_limit)
"""The same with a unit: a number alone is minutes in Slurm, and the end of a job."""
SHARE = Parsed("0-1", _share)
"""A share of a GPU in thousandths, such as 0.5."""
GPU_NAME = Parsed("gpu", _gpu_name)
"""A GPU by any of its names."""
TEXT = Parsed("text", str)
"""Text in any letters."""
LABEL = Parsed("key=value", pair)
FORM = Parsed("format", parse_form)
"""A format of output."""
WATTS = Parsed("watts", _watts)
"""Watts, such as 300W."""
PERCENT = click.FloatRange(0, 100)


class _Count(click.IntRange):
    name = "number"


COUNT, POSITIVE = _Count(min=0), _Count(min=1)


def option(*names: str, **attributes: Any) -> Callable[[Decorated], Decorated]:
    """`click.option` whose help shows a default that is not empty; text may have any letters."""
    attributes.setdefault("show_default", bool(attributes.get("default")))
    if isinstance(attributes.get("default", ""), str) and "is_flag" not in attributes and "/" not in names[0]:
        attributes.setdefault("type", TEXT)
    return click.option(*names, **attributes)


def repeated(*names: str, **attributes: Any) -> Callable[[Decorated], Decorated]:
    """An option that may be repeated, and says so."""
    attributes["help"] = f"{attributes['help'].removesuffix('.')}; may be repeated."
    return option(*names, multiple=True, **attributes)


YES = option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")


def shared(*names: str, many: bool = False, **attributes: Any) -> Any:
    """A field of a dataclass that is an option, as for `option`, of commands that `takes` gives the class."""
    return dataclasses.field(metadata={"make": repeated if many else option, "names": names, **attributes})


def takes(name: str, kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: gives a command the options of the dataclass `kind`, and passes an object of it as `name`."""
    fields = dataclasses.fields(kind)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(*given: Any, **typed: Any) -> None:
            made = kind(**{field.name: typed.pop(field.name) for field in fields})
            command(*given, **{name: made}, **typed)

        for field in reversed(fields):
            attributes = dict(field.metadata)
            make, names = attributes.pop("make"), attributes.pop("names")
            make(*(names or (f"--{field.name.replace('_', '-')}",)), field.name, **attributes)(run)
        return run

    return decorate


def once(pairs: Iterable[tuple[str, V]]) -> dict[str, V]:
    """NAME=VALUE options by name; a usage error where a name has two values."""
    found: dict[str, V] = {}
    for name, value in pairs:
        if found.setdefault(name, value) != value:
            raise click.BadParameter(f"{name!r} was given twice, with different values")
    return found


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


if TYPE_CHECKING:
    from gpuscale.common.wire import TimeRange

AROUND = timedelta(minutes=5)
"""How long before and after --at to look for events."""
_DAYS = {"today": 0, "yesterday": 1}
_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")


@dataclass
class ShownClock:
    """The clock of times that people type and read: local, or UTC."""

    utc: bool = False

    def shown(self, moment: datetime) -> datetime:
        """A moment on this clock; without a zone, it is already."""
        if moment.tzinfo is None and self.utc:
            return moment.replace(tzinfo=UTC)
        return moment.astimezone(UTC if self.utc else None)


CLOCK: Final = ShownClock()


def parse_moment(text: str, now: datetime) -> datetime:
    """A moment in the past, by default on the shown clock.

    `2h` is two hours ago, `yesterday` begins at midnight, `yesterday 03:00` and `03:00`, the last time it was 3, are on the
    clock; else it is a date of RFC 3339. Raises ValueError: it is none of these, or before the year 1.
    """
    typed = " ".join(text.lower().split())
    local = CLOCK.shown(now).replace(tzinfo=None)
    day, _, clock = ("", "", typed) if _CLOCK.fullmatch(typed) else typed.partition(" ")
    try:
        if typed == "now":
            return now
        if _CLOCK.fullmatch(clock) or typed in _DAYS:
            late = time.fromisoformat(clock if clock[2:3] == ":" else f"0{clock}") if clock else time()
            if not day:
                today = datetime.combine(local, late)
                return CLOCK.shown(today if today <= local else today - timedelta(days=1))
            if day in _DAYS:
                return CLOCK.shown(datetime.combine(local, late) - timedelta(days=_DAYS[day]))
        if re.fullmatch(r"[\d.]+([a-z][a-z\d.]*)?", typed):
            return now - timedelta(seconds=parse_duration(typed))
        found = datetime.fromisoformat(text.strip())
        return found if found.tzinfo else CLOCK.shown(found)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{text!r} is not a time; write it like 2h (ago), yesterday, 03:00 or 2026-03-01T03:00:00Z"
        ) from error


_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def parse_coming(text: str, now: datetime, zone: tzinfo | None = None) -> datetime:
    """A moment in the future, by default in `zone`, or local.

    `2h` is in two hours, `14:00` the next time it is 14:00, `mon 14:00` on the next Monday, `tomorrow` begins at midnight;
    else it is a date of RFC 3339. A time that occurs twice, as when summer ends, is the first.

    Raises ValueError: it is none of these, or a time that does not occur, as when summer begins.
    """
    typed = " ".join(text.lower().split())
    day, _, clock = ("", "", typed) if _CLOCK.fullmatch(typed) else typed.partition(" ")
    local = now.astimezone(zone).replace(tzinfo=None)
    named = day in ("", "today", "tomorrow") or day[:3] in _WEEKDAYS
    try:
        if typed == "now":
            return now
        if typed and named and (not clock or _CLOCK.fullmatch(clock)):
            late = time.fromisoformat(clock if clock[2:3] == ":" else f"0{clock}") if clock else time()
            ahead = 1 if day == "tomorrow" else 0
            if day[:3] in _WEEKDAYS:
                ahead = (_WEEKDAYS.index(day[:3]) - local.weekday()) % 7
            found = datetime.combine(local + timedelta(days=ahead), late)
            if found <= local and day not in ("today", "tomorrow"):
                found += timedelta(days=7 if day else 1)
        elif re.fullmatch(r"[\d.]+([a-z][a-z\d.]*)", typed):
            return now + timedelta(seconds=parse_duration(typed))
        else:
            found = datetime.fromisoformat(text.strip())
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{text!r} is not a time; write it like 14:00, 'Mon 14:00', tomorrow, 2h (from now) or 2026-03-01T14:00+01:00"
        ) from error
    if found.tzinfo:
        return found
    moment = found.replace(tzinfo=zone) if zone else found.astimezone()
    if moment.astimezone(UTC).astimezone(zone).replace(tzinfo=None) != found:
        raise ValueError(f"{text!r}: clocks are set forward over {found:%H:%M} on {found:%Y-%m-%d}")
    return moment


COMING = Parsed("time", lambda text: parse_coming(text, datetime.now(UTC)))
"""A moment in the future."""
MOMENT = Parsed("time", lambda text: parse_moment(text, datetime.now(UTC)))
"""A moment, usually in the past."""


def local_text(moment: datetime) -> str:
    """A moment with its zone, for people: local, or UTC with `--utc`."""
    return f"{CLOCK.shown(moment):%Y-%m-%d %H:%M:%S %Z}"


def utc_text(moment: datetime) -> str:
    """A moment in RFC 3339, UTC, for programs."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class When:
    """The time range of a command, as typed."""

    since: datetime | None = shared(
        type=MOMENT, help="From this time on: 2h (ago), yesterday, 03:00 or 2026-03-01T03:00:00Z."
    )
    until: datetime | None = shared(type=MOMENT, help="Until this time; now by default.")
    at: datetime | None = shared(type=MOMENT, help="At this time, instead of --since and --until.")

    def range(self, last: timedelta | None = None, around: timedelta = timedelta()) -> "TimeRange":
        """The time range: by default the `last` until now; --at has `around` before and after it.

        Raises click.UsageError: the options contradict each other.
        """
        from gpuscale.common.wire import TimeRange

        if self.at is not None:
            if self.since is not None or self.until is not None:
                raise click.UsageError("--at replaces --since and --until")
            return TimeRange(self.at - around, self.at + around)
        if self.since is not None and self.until is not None and self.until < self.since:
            raise click.UsageError(
                f"--until ({local_text(self.until)}) must not be before --since ({local_text(self.since)})"
            )
        if self.since is None and self.until is None and last is not None:
            return TimeRange(datetime.now(UTC) - last)
        return TimeRange(self.since, self.until)
