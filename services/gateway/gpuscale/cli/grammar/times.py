"""Moments as people type them, and the options `--since`, `--until` and `--at` of everything that is asked for by time."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import TYPE_CHECKING

import click

from gpuscale.cli.grammar.parameters import Parsed, shared
from gpuscale.common.sizes import parse_duration

if TYPE_CHECKING:
    from gpuscale.common.wire import TimeRange

AROUND = timedelta(minutes=5)
"""What happens at a moment is looked for so long before and after it."""
_DAYS = {"today": 0, "yesterday": 1}
_CLOCK = re.compile(r"\d{1,2}:\d{2}(:\d{2})?")


def parse_moment(text: str, now: datetime) -> datetime:
    """The moment that a text names; without a zone it is in the local one.

    `2h` is so long ago, `yesterday` begins at midnight, `yesterday 03:00` says when, `03:00` is the last time it was that late,
    and all else is a date of RFC 3339.

    Raises:
        ValueError: it is none of these, or before the year 1.
    """
    typed = " ".join(text.lower().split())
    local = now.astimezone().replace(tzinfo=None)
    day, _, clock = ("", "", typed) if _CLOCK.fullmatch(typed) else typed.partition(" ")
    try:
        if typed == "now":
            return now
        if _CLOCK.fullmatch(clock) or typed in _DAYS:
            late = time.fromisoformat(clock if clock[2:3] == ":" else f"0{clock}") if clock else time()
            if not day:
                today = datetime.combine(local, late)
                return (today if today <= local else today - timedelta(days=1)).astimezone()
            if day in _DAYS:
                return (datetime.combine(local, late) - timedelta(days=_DAYS[day])).astimezone()
        if re.fullmatch(r"[\d.]+([a-z][a-z\d.]*)?", typed):
            return now - timedelta(seconds=parse_duration(typed))
        found = datetime.fromisoformat(text.strip())
        return found if found.tzinfo else found.astimezone()
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{text!r} is not a time; write it like 2h (ago), yesterday, 03:00 or 2026-03-01T03:00:00Z"
        ) from error


MOMENT = Parsed("time", lambda text: parse_moment(text, datetime.now(UTC)))
"""A moment in the past, most often."""


def local_text(moment: datetime) -> str:
    """A moment on the local clock, as people read it."""
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S}"


@dataclass(frozen=True)
class When:
    """The time that is asked for, as typed."""

    since: datetime | None = shared(
        type=MOMENT, help="From this time on: 2h (ago), yesterday, 03:00 or 2026-03-01T03:00:00Z."
    )
    until: datetime | None = shared(type=MOMENT, help="Until this time; now by default.")
    at: datetime | None = shared(type=MOMENT, help="At this time, in place of --since and --until.")

    def range(self, last: timedelta | None = None, around: timedelta = timedelta()) -> "TimeRange":
        """The time from the one end to the other.

        Args:
            last: so long until now, where nothing was typed.
            around: so long before and after --at.

        Raises:
            click.UsageError: it has no beginning, or is said twice.
        """
        from gpuscale.common.wire import TimeRange

        if self.at is not None:
            if self.since is not None or self.until is not None:
                raise click.UsageError("--at stands in place of --since and --until")
            return TimeRange(self.at - around, self.at + around)
        if self.since is not None and self.until is not None and self.until < self.since:
            raise click.UsageError(
                f"--until ({local_text(self.until)}) must not be before --since ({local_text(self.since)})"
            )
        if self.since is None and self.until is None and last is not None:
            return TimeRange(datetime.now(UTC) - last)
        return TimeRange(self.since, self.until)
