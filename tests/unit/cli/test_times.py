"""Moments as people type them."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import click
import pytest

from gpuscale.cli.grammar.parameters import When, parse_coming, parse_moment

NOW = datetime(2026, 3, 29, 10, 30, tzinfo=UTC)
"""12:30 in Berlin, where clocks went from 2 to 3 that night."""


@pytest.fixture(autouse=True)
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2h", "2026-03-29T08:30:00Z"), ("1d30m", "2026-03-28T10:00:00Z"),
        ("90", "2026-03-29T10:28:30Z"), ("now", "2026-03-29T10:30:00Z"),
        ("today", "2026-03-28T23:00:00Z"), ("Yesterday", "2026-03-27T23:00:00Z"),
        ("yesterday  22:15:30", "2026-03-28T21:15:30Z"), ("today 3:00", "2026-03-29T01:00:00Z"),
        ("03:00", "2026-03-29T01:00:00Z"), ("12:31", "2026-03-28T11:31:00Z"),
        ("2026-03-01", "2026-02-28T23:00:00Z"), ("2026-03-01 03:00", "2026-03-01T02:00:00Z"),
        ("2026-03-01T03:00:00Z", "2026-03-01T03:00:00Z"), ("2026-03-01T03:00:00.5-08:00", "2026-03-01T11:00:00.500Z"),
    ],
)  # fmt: skip
def test_a_moment(text: str, moment: str) -> None:
    assert parse_moment(text, NOW) == datetime.fromisoformat(moment)


@pytest.mark.parametrize(
    "text",
    ["", "25:00", "yesterday 25:00", "yesterday noon", "tomorrow", "-2h", "2 h ago", "9999d99999", "9" * 12],
)
def test_no_moment(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time; write it like 2h"):
        parse_moment(text, NOW)


def test_what_was_typed_is_a_time_with_two_ends() -> None:
    early, late = NOW - timedelta(hours=1), NOW
    assert (found := When(early, late, None).range()).since == early
    assert found.until == late
    assert not When(None, None, None).range()
    assert (around := When(None, None, NOW).range(around=timedelta(minutes=5))).since == NOW - timedelta(
        minutes=5
    )
    assert around.until == NOW + timedelta(minutes=5)
    with pytest.raises(
        click.UsageError, match=r"--until \(2026-03-29 11:30:00 CEST\) must not be before --since"
    ):
        When(late, early, None).range()
    with pytest.raises(click.UsageError, match="--at replaces"):
        When(early, None, NOW).range()


FRIDAY = datetime(2026, 3, 27, 12, 0, tzinfo=UTC)  # a Friday, 13:00 in Berlin, two days before summer begins
BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("now", "2026-03-27T12:00"), ("2h", "2026-03-27T14:00"), ("13:30", "2026-03-27T12:30"), ("13:00", "2026-03-28T12:00"),
        ("tomorrow", "2026-03-27T23:00"), ("tomorrow 9:00", "2026-03-28T08:00"), ("Mon 14:00", "2026-03-30T12:00"),
        ("monday 14:00", "2026-03-30T12:00"), ("fri 12:59", "2026-04-03T10:59"), ("fri 13:01", "2026-03-27T12:01"),
        ("2026-10-25 02:30", "2026-10-25T00:30"), ("2026-10-25T02:30+01:00", "2026-10-25T01:30"), ("2026-06-01", "2026-05-31T22:00"),
    ],
)  # fmt: skip
def test_a_time_to_come_is_by_the_clock_of_its_zone(typed: str, found: str) -> None:
    moment = parse_coming(typed, FRIDAY, BERLIN).astimezone(UTC)
    assert f"{moment:%Y-%m-%dT%H:%M}" == found


@pytest.mark.parametrize("typed", ["sun 02:30", "2026-03-29 02:00", "noon", "25:00", "moon 9:00", "2", ""])
def test_a_time_that_is_not_there_is_none(typed: str) -> None:
    with pytest.raises(ValueError, match=r"set forward over|is not a time"):
        parse_coming(typed, FRIDAY, BERLIN)
