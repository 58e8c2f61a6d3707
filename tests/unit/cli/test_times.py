"""Moments as people type them."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import click
import pytest

from gpuscale.cli.grammar.parameters import When, parse_moment

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
    with pytest.raises(click.UsageError, match="--at stands in place of"):
        When(early, None, NOW).range()
