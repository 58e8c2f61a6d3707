"""From findings that come and go to events that begin and end, with patience in both directions. Pure.

A finding must last for a while until it is an event, and must be gone for a while until that is resolved. While nothing
can be told, nothing changes.
"""

from dataclasses import dataclass

from gpuscale.monitor.health.checks import PATIENCE, Results
from gpuscale.monitor.health.events import Events
from gpuscale.monitor.model.health import Event, Finding, HealthCheck


@dataclass(slots=True)
class Condition:
    """One check of one GPU or node that finds something, or did a moment ago."""

    bad_since: float
    event: Event | None = None
    good_since: float | None = None


class Conditions:
    """The conditions of one GPU or node."""

    def __init__(self, events: Events, node: str, uuid: str) -> None:
        self._events = events
        self._node = node
        self._uuid = uuid
        self._all: dict[HealthCheck, Condition] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def lasting(self) -> list[Event]:
        """Events that are not resolved."""
        return [condition.event for condition in self._all.values() if condition.event is not None]

    def resume(self, event: Event) -> None:
        """An event of a run before goes on."""
        self._all[event.check] = Condition(event.started_at, event)

    def apply(self, results: Results, now: float) -> None:
        """Take in what the checks found at `now`."""
        for check, finding in results.items():
            if finding is not None:
                self._bad(check, finding, now)
            elif check in self._all:
                self._good(check, now)

    def end(self, now: float) -> None:
        """The GPU is no longer there: what lasted is over."""
        for event in self.lasting:
            self._events.resolve(event, now)
        self._all.clear()

    def _bad(self, check: HealthCheck, finding: Finding, now: float) -> None:
        condition = self._all.setdefault(check, Condition(now))
        condition.good_since = None
        if condition.event is None:
            if now - condition.bad_since >= PATIENCE[check].raise_after:
                event = self._events.begin(check, self._node, self._uuid, finding, condition.bad_since)
                event.last_at = now
                condition.event = event
            return
        condition.event.last_at = now
        if condition.event.finding != finding:
            self._events.restate(condition.event, finding)

    def _good(self, check: HealthCheck, now: float) -> None:
        condition = self._all[check]
        if condition.event is None:
            del self._all[check]
            return
        if condition.good_since is None:
            condition.good_since = now
        if now - condition.good_since >= PATIENCE[check].resolve_after:
            self._events.resolve(condition.event, now)
            del self._all[check]
