"""The events that are kept: all that last, and the newest of those that are over. Pure."""

from collections import deque
from collections.abc import Iterable, Iterator

from gpuscale.monitor.health.model import Event, Finding, HealthCheck

MOST_RESOLVED = 1_000


class Events:
    """Events by id.

    Attributes:
        changed: ids of the events that began, happened again or were resolved since somebody last emptied it.
    """

    def __init__(self, run: str, most_resolved: int = MOST_RESOLVED) -> None:
        """`run` begins each id: a later run of the fleet has a greater one."""
        self._run = run
        self._most_resolved = most_resolved
        self._numbered = 0
        self._all: dict[str, Event] = {}
        self._resolved: deque[str] = deque()
        self.changed: set[str] = set()

    def __len__(self) -> int:
        return len(self._all)

    def get(self, key: str) -> Event | None:
        """An event by its id; None if it is not kept."""
        return self._all.get(key)

    def newest_first(self) -> Iterator[Event]:
        """Every event."""
        return reversed(self._all.values())

    def begin(
        self, check: HealthCheck, node: str, uuid: str, finding: Finding, at: float, xid: int | None = None
    ) -> Event:
        """A new event that lasts."""
        self._numbered += 1
        event = Event(f"{self._run}-{self._numbered:08x}", check, node, uuid, finding, at, at, xid)
        self._all[event.id] = event
        self.changed.add(event.id)
        return event

    def again(self, event: Event, at: float, finding: Finding) -> None:
        """An event that lasts, or lasted, happened again."""
        event.count += 1
        event.last_at, event.finding = at, finding
        if event.resolved_at is not None:
            event.resolved_at = at
        self.changed.add(event.id)

    def restate(self, event: Event, finding: Finding) -> None:
        """An event that lasts is to be told in another way."""
        event.finding = finding
        self.changed.add(event.id)

    def resolve(self, event: Event, at: float) -> None:
        """An event is over; the oldest of those that are over goes where too many are kept."""
        event.resolved_at = at
        self.changed.add(event.id)
        self._resolved.append(event.id)
        while len(self._resolved) > self._most_resolved:
            self._all.pop(self._resolved.popleft(), None)

    def clear(self, events: Iterable[Event]) -> None:
        """An admin says that these no longer keep work away."""
        for event in events:
            event.cleared = True
            self.changed.add(event.id)
