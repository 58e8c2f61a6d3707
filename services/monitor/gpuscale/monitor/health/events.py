"""The events that are kept: all that last, and the newest of those that are over. Pure.

Events of a run before may be restored. One that lasted goes on: what ends it is what would have ended it without a restart.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from gpuscale.monitor.model.health import Event, Finding, HealthCheck

MOST_RESOLVED = 1_000
SAME_MOMENT_SECONDS = 5.0
"""A fault whose moment is no later than so much after one that is over is that one, told again."""


_Key = tuple[HealthCheck, str, str, int | None]


class Events:
    """Events by id.

    Attributes:
        changed: ids of the events that began, happened again or were resolved since somebody last emptied it.
        unsaved: the same for who keeps events on disk, with the ids of those that are not kept any more.
    """

    def __init__(self, run: str, most_resolved: int = MOST_RESOLVED) -> None:
        """`run` begins each id: a later run of the fleet has a greater one."""
        self._run = run
        self._most_resolved = most_resolved
        self._numbered = 0
        self._all: dict[str, Event] = {}
        self._resolved: deque[str] = deque()
        self.changed: set[str] = set()
        self.unsaved: set[str] = set()
        self._over: dict[_Key, float] = {}

    def restore(self, before: Iterable[Event]) -> None:
        """Begin with the events of runs before; to be called first."""
        for event in sorted(before, key=lambda event: event.id):
            self._all[event.id] = event
            self._run = max(self._run, f"{int(event.id.partition('-')[0], 16) + 1:08x}")
            if event.resolved_at is not None:
                self._over[_key(event)] = event.last_at
                self._resolved.append(event.id)
        self._drop_oldest()

    def was_over(self, node: str, uuid: str, xid: int, at: float) -> bool:
        """Whether a fault of this moment was over in a run before: its agent tells of it again."""
        last = self._over.get((HealthCheck.XID, node, uuid.lower(), xid))
        return last is not None and at <= last + SAME_MOMENT_SECONDS

    def __len__(self) -> int:
        return len(self._all)

    def get(self, key: str) -> Event | None:
        """An event by its id; None if it is not kept."""
        return self._all.get(key)

    def newest_first(self) -> Iterator[Event]:
        """Every event."""
        return reversed(self._all.values())

    def lasting(self) -> list[Event]:
        """The events that are not resolved, newest first."""
        return [event for event in self.newest_first() if event.resolved_at is None]

    def begin(
        self, check: HealthCheck, node: str, uuid: str, finding: Finding, at: float, xid: int | None = None
    ) -> Event:
        """A new event that lasts."""
        self._numbered += 1
        event = Event(f"{self._run}-{self._numbered:08x}", check, node, uuid, finding, at, at, xid)
        self._all[event.id] = event
        self._note(event)
        return event

    def again(self, event: Event, at: float, finding: Finding) -> None:
        """An event that lasts, or lasted, happened again."""
        event.count += 1
        event.last_at, event.finding = at, finding
        if event.resolved_at is not None:
            event.resolved_at = at
        self._note(event)

    def restate(self, event: Event, finding: Finding) -> None:
        """An event that lasts is to be told in another way."""
        event.finding = finding
        self._note(event)

    def resolve(self, event: Event, at: float) -> None:
        """An event is over; the oldest of those that are over goes where too many are kept."""
        event.resolved_at = at
        self._note(event)
        self._resolved.append(event.id)
        self._drop_oldest()

    def clear(self, events: Iterable[Event]) -> None:
        """An admin says that these no longer keep work away."""
        for event in events:
            event.cleared = True
            self._note(event)

    def _note(self, event: Event) -> None:
        self.changed.add(event.id)
        self.unsaved.add(event.id)

    def _drop_oldest(self) -> None:
        while len(self._resolved) > self._most_resolved:
            key = self._resolved.popleft()
            self._all.pop(key, None)
            self.unsaved.add(key)


def _key(event: Event) -> _Key:
    """What is the same of an event in two runs."""
    return event.check, event.node, event.uuid.lower(), event.xid
