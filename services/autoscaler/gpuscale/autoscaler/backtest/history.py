"""The history of an endpoint's queues, and the workload derived from it. Pure.

Arrivals are measured if the broker reports them. Otherwise they are computed: arrivals are departures plus growth, and requests
in hand leave after their service time (Little's law), which follows from the rates if it is not given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from gpuscale.client.traces import MOST_REQUESTS, Request

SPACING = 30.0
"""Least seconds between two recorded readings."""
KEPT = 2_880
"""Readings kept per endpoint: a day's."""
LONGEST_GAP = 10 * SPACING
"""Longer gaps between readings are left out: nobody knows what arrived in them."""
LONGEST_HELD = 3_600.0
"""Unchanged readings are recorded once in this time, and when they change."""
UNKNOWN = -1.0
"""Stands for an unknown rate."""


class NoWorkloadError(Exception):
    """No workload can be derived from a history; the text says why."""


@dataclass(frozen=True, slots=True)
class RecordedReading:
    """All queues of an endpoint at a time: messages ready and in hand, and arrivals and deliveries per second.

    `at`: seconds since 1970, which survive a restart. `since`: all readings from then on were the same; None if unknown.
    """

    at: float
    ready: float
    unacked: float
    published: float = UNKNOWN
    delivered: float = UNKNOWN
    since: float | None = None

    @property
    def weight(self) -> float:
        """The number of readings that it represents."""
        return 1.0 if self.since is None else (self.at - self.since) / SPACING

    def goes_on_from(self, before: RecordedReading) -> bool:
        """Whether it equals the previous reading, which is recent enough to cover the time between."""
        return (
            replace(self, at=before.at, since=before.since) == before
            and 0 <= self.at - before.at <= LONGEST_GAP
        )


def workload(readings: Sequence[RecordedReading], service: float | None = None) -> list[Request]:
    """The requests of a history, oldest first, evenly spread between readings; `service` seconds each, or learned."""
    if len(readings) < 2:
        raise NoWorkloadError(f"less than {2 * SPACING:g} s of it were recorded")
    if service is None:
        told = [one for one in readings if one.delivered >= 0]
        delivered = sum(one.delivered * one.weight for one in told)
        busy = sum(one.unacked * one.weight for one in told)
        if delivered <= 0 or busy <= 0:
            raise NoWorkloadError("its watchers tell no rates, so the service time must be given")
        service = busy / delivered
    found = list(islice(_requests(readings, service), MOST_REQUESTS + 1))
    if not found:
        raise NoWorkloadError("nothing arrived in its recorded history")
    if len(found) > MOST_REQUESTS:
        raise NoWorkloadError(f"more than {MOST_REQUESTS} requests arrived, which are too many to run")
    return found


def _requests(readings: Sequence[RecordedReading], service: float) -> Iterator[Request]:
    begin, owed = readings[0].at, 0.0
    for _ in range(int(readings[0].ready + readings[0].unacked)):
        yield Request(0.0, service)
    for one, other in pairwise(readings):
        gap = other.at - one.at
        held = other.since is not None and other.since <= one.at
        if gap > LONGEST_GAP and not held:
            begin += gap
            continue
        if one.published >= 0 and other.published >= 0:
            came = gap * (one.published + other.published) / 2
        else:
            growth = other.ready + other.unacked - one.ready - one.unacked
            left = gap * (one.unacked + other.unacked) / 2 / service if service > 0 else 0.0
            came = max(0.0, growth + left)
        count = int(came + owed)
        owed += came - count
        for number in range(count):
            yield Request(one.at - begin + gap * (number + 0.5) / count, service)
