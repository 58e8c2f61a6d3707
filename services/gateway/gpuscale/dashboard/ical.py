"""The bookings as an iCalendar feed (RFC 5545), and the secret in its address.

Calendar programs cannot sign in, so anyone with the address can read the feed; it shows only what every visitor of the dashboard
sees. The secret is kept in a file, so that subscriptions survive a restart. Deleting the file revokes the address.
"""

import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.secrets import write_private
from gpuscale.common.wire import to_datetime
from gpuscale.dashboard import humanize

PATH = "/calendar/"
_LINE = 73
"""Bytes of a line before it is folded: 75 with the space that begins the next one, less one."""
_ESCAPED = str.maketrans({"\\": "\\\\", ";": "\\;", ",": "\\,", "\n": "\\n", "\r": None})
_VOID = allocator_api.Booking.STATE_CANCELLED, allocator_api.Booking.STATE_EXPIRED


def calendar_secret(file: Path) -> str:
    """The secret in a file that only this user can read; created if missing. Raises OSError."""
    with suppress(FileNotFoundError):
        if known := file.read_text().strip():
            return known
    made = secrets.token_urlsafe(24)
    write_private(file, f"{made}\n".encode())
    return made


def ical(bookings: Iterable[allocator_api.Booking]) -> bytes:
    """The calendar. Cancelled and released bookings appear as CANCELLED, so that calendar programs remove them."""
    lines = [
        "BEGIN:VCALENDAR",
        "VERSION:2.0",
        "PRODID:-//gpuscale//bookings//EN",
        "X-WR-CALNAME:GPU bookings",
    ]
    lines += ["REFRESH-INTERVAL;VALUE=DURATION:PT15M", "X-PUBLISHED-TTL:PT15M"]
    for one in bookings:
        lines += _event(one)
    return b"".join(_folded(line) for line in [*lines, "END:VCALENDAR"])


def _event(one: allocator_api.Booking) -> Iterator[str]:
    nodes = ", ".join(dict.fromkeys(gpu.split("/")[1] for gpu in one.gpus))
    said = (f"{humanize.word(one, 'state')}, booked by {one.owner}", *one.gpus, one.note)
    yield "BEGIN:VEVENT"
    yield f"UID:{one.name.removeprefix('bookings/')}-{one.create_time.seconds}@gpuscale"
    yield f"DTSTAMP:{_moment(one.create_time)}"
    yield f"DTSTART:{_moment(one.start_time)}"
    yield f"DTEND:{_moment(one.end_time)}"
    yield f"SUMMARY:{_escaped(f'{len(one.gpus)} GPUs, {one.owner}' + (f': {one.title}' if one.title else ''))}"
    yield f"LOCATION:{_escaped(nodes)}"
    yield f"DESCRIPTION:{_escaped(chr(10).join(filter(None, said)))}"
    yield f"STATUS:{'CANCELLED' if one.state in _VOID else 'CONFIRMED'}"
    yield "END:VEVENT"


def _moment(at: Timestamp) -> str:
    moment: datetime = to_datetime(at)
    return f"{moment:%Y%m%dT%H%M%SZ}"


def _escaped(text: str) -> str:
    return "".join(one for one in text.translate(_ESCAPED) if one >= " ")


def _folded(line: str) -> bytes:
    """A line folded at 75 bytes, between characters."""
    parts, size = [""], 0
    for one in line:
        size += (length := len(one.encode()))
        if size > _LINE:
            parts.append("")
            size = length
        parts[-1] += one
    return "\r\n ".join(parts).encode() + b"\r\n"
