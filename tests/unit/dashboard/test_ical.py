"""The calendar of bookings as calendar programs read it, and the secret in its address."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpuscale.api.allocator import v1 as api
from gpuscale.common.wire import to_timestamp
from gpuscale.dashboard.pages.reservations import calendar_secret, ical

START = datetime(2026, 11, 30, 14, tzinfo=UTC)


def booking(**fields: object) -> api.Booking:
    one = api.Booking(name="bookings/demo", owner="ann", gpus=["nodes/a/gpus/1", "nodes/b/gpus/2"], **fields)
    one.start_time.CopyFrom(to_timestamp(START))
    one.end_time.CopyFrom(to_timestamp(START + timedelta(hours=2)))
    one.create_time.CopyFrom(to_timestamp(START - timedelta(days=1)))
    return one


def test_lines_are_escaped_and_folded_as_rfc_5545_says() -> None:
    title = "Vorführung; groß, mit \\ und\r\nBEGIN:VEVENT " + "ü" * 80
    shown = ical([booking(title=title, state=api.Booking.STATE_BOOKED)])
    assert shown.endswith(b"END:VCALENDAR\r\n")
    lines = shown.split(b"\r\n")
    assert all(len(line) <= 75 for line in lines)
    whole = re.sub(r"\r\n ", "", shown.decode())
    assert [line.decode() for line in lines], "no character is cut"
    assert whole.count("BEGIN:VEVENT\r\n") == 1, "a title begins no event"
    assert "SUMMARY:2 GPUs\\, ann: Vorführung\\; groß\\, mit \\\\ und\\nBEGIN:VEVENT ü" in whole
    assert "DTSTART:20261130T140000Z\r\nDTEND:20261130T160000Z\r\n" in whole
    assert "LOCATION:a\\, b\r\n" in whole
    assert "STATUS:CONFIRMED\r\n" in whole


def test_what_was_cancelled_is_taken_away_and_keeps_its_id() -> None:
    before, after = (
        ical([booking(state=state)]) for state in (api.Booking.STATE_BOOKED, api.Booking.STATE_CANCELLED)
    )
    assert b"STATUS:CANCELLED" in after
    uid = re.compile(rb"UID:\S+")
    assert uid.findall(before) == uid.findall(after)


def test_the_address_outlasts_a_restart_and_is_void_without_its_file(tmp_path: Path) -> None:
    file = tmp_path / "calendar"
    first = calendar_secret(file)
    assert len(first) >= 32
    assert file.stat().st_mode & 0o077 == 0
    assert calendar_secret(file) == first
    file.unlink()
    assert calendar_secret(file) != first
