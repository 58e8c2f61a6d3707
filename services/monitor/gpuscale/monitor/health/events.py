"""Health events, from findings and from faults (XIDs) that the driver reports. Pure.

A finding must last a while to become an event, and be gone a while to resolve it. A non-fatal fault is resolved at once, and
recurs as the same event within a minute. A fatal one lasts until the GPU was away (reset, released, lost, or the node rebooted)
and has answered again for a while. Unresolved events of an earlier run are resumed, and end as they would have without a restart.

Severity and action of XIDs follow NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors): a fault is fatal if it asks for a
reset, a reboot or a replacement. Faults of programs do not count against the GPU.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpuscale.monitor.health.checks import (
    ANSWERING,
    AWAY,
    HOLDS,
    Event,
    Finding,
    HealthAction,
    HealthCheck,
    HealthSeverity,
    Results,
)


class Xid(NamedTuple):
    """The meaning of an XID; `fatal`: the GPU is unusable until the action is taken."""

    name: str
    severity: HealthSeverity
    action: HealthAction
    fatal: bool = False


_INFO, _WARNING, _CRITICAL = HealthSeverity.INFO, HealthSeverity.WARNING, HealthSeverity.CRITICAL

XIDS: Mapping[int, Xid] = {
    8: Xid("a channel made no progress", _WARNING, HealthAction.RESTART_WORKLOAD),
    13: Xid("a program caused a graphics engine exception", _WARNING, HealthAction.RESTART_WORKLOAD),
    31: Xid("a program accessed invalid memory", _WARNING, HealthAction.RESTART_WORKLOAD),
    32: Xid("a stream of commands was corrupt", _WARNING, HealthAction.RESTART_WORKLOAD),
    38: Xid("the driver's firmware failed", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    43: Xid("a program's channel was reset", _INFO, HealthAction.RESTART_WORKLOAD),
    45: Xid("a program's channels were removed before it ended", _INFO, HealthAction.NONE),
    46: Xid("the GPU stopped processing", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    48: Xid("a memory error could not be corrected", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    54: Xid("auxiliary power is not connected", _CRITICAL, HealthAction.CHECK_HARDWARE, fatal=True),
    61: Xid("the power controller's firmware stopped", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    62: Xid("the power controller halted", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    63: Xid("faulty memory was marked for replacement", _WARNING, HealthAction.DRAIN),
    64: Xid(
        "faulty memory could not be marked for replacement", _CRITICAL, HealthAction.RESET_GPU, fatal=True
    ),
    66: Xid("a program made an illegal driver access", _WARNING, HealthAction.RESTART_WORKLOAD),
    68: Xid("the video processor failed", _WARNING, HealthAction.RESTART_WORKLOAD),
    69: Xid("a program caused a graphics engine class error", _WARNING, HealthAction.RESTART_WORKLOAD),
    74: Xid("an NVLink failed", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    78: Xid("a virtual GPU could not be started", _WARNING, HealthAction.RESTART_WORKLOAD),
    79: Xid("the GPU fell off the bus", _CRITICAL, HealthAction.REBOOT_NODE, fatal=True),
    92: Xid("corrected memory errors are too frequent", _WARNING, HealthAction.DRAIN),
    94: Xid("a memory error was contained to one program", _WARNING, HealthAction.RESTART_WORKLOAD),
    95: Xid("a memory error was not contained", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    109: Xid("switching between programs timed out", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    110: Xid("a security fault", _CRITICAL, HealthAction.REBOOT_NODE, fatal=True),
    119: Xid("the system processor did not answer", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    120: Xid("the system processor failed", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    121: Xid("the link to the CPU had a corrected error", _INFO, HealthAction.NONE),
    122: Xid("the power controller could not read its memory", _WARNING, HealthAction.CONTACT_SUPPORT),
    123: Xid("the power controller could not write its memory", _WARNING, HealthAction.RESET_GPU),
    136: Xid("training of a link failed", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    140: Xid("memory has an unrecovered error", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    143: Xid("the GPU could not be initialized", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    144: Xid("an NVLink had a serializer fault", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    145: Xid("an NVLink had a link layer fault", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    149: Xid("an NVLink failed to come up", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    154: Xid("the driver changed what the GPU needs to recover", _WARNING, HealthAction.DRAIN),
    155: Xid("an NVLink went down", _WARNING, HealthAction.DRAIN),
    156: Xid("memory of a link was retired", _WARNING, HealthAction.DRAIN),
}
_UNKNOWN = Xid("an unknown fault", _WARNING, HealthAction.CONTACT_SUPPORT)


def xid_finding(xid: int) -> Finding:
    """The finding of a fault with that number."""
    known = XIDS.get(xid, _UNKNOWN)
    return Finding(known.severity, known.action, f"XID {xid}: {known.name}", known.fatal)


MOST_RESOLVED = 1_000
SAME_MOMENT_SECONDS = 5.0
"""A fault at most this much later than a resolved one is the same, reported again."""


_Key = tuple[HealthCheck, str, str, int | None]
"""What identifies a fault across runs: check, node, UUID, XID."""


class Events:
    """Events by id. `changed` and `unsaved`: ids changed since the owner last emptied the set."""

    def __init__(self, run: str, most_resolved: int = MOST_RESOLVED) -> None:
        """`run` is the prefix of ids and grows with each run of the fleet."""
        self._run = run
        self._most_resolved = most_resolved
        self._numbered = 0
        self._all: dict[str, Event] = {}
        self._ids: list[str] = []  # in order: each new one is the last
        self._resolved: deque[str] = deque()
        self.changed: set[str] = set()
        self.unsaved: set[str] = set()
        self._over: dict[_Key, float] = {}

    def restore(self, before: Iterable[Event]) -> None:
        """Add the events of earlier runs. Call it first."""
        for event in sorted(before, key=lambda event: event.id):
            self._put(event)
            self._run = max(self._run, f"{int(event.id.partition('-')[0], 16) + 1:08x}")
            if event.resolved_at is not None:
                self._over[event.check, event.node, event.uuid.lower(), event.xid] = event.last_at
        over = [
            (event.resolved_at, event.id) for event in self._all.values() if event.resolved_at is not None
        ]
        self._resolved.extend(key for _, key in sorted(over))
        self._drop_oldest()

    def was_over(self, node: str, uuid: str, xid: int, at: float) -> bool:
        """Whether this fault was resolved in an earlier run and is only reported again."""
        last = self._over.get((HealthCheck.XID, node, uuid.lower(), xid))
        return last is not None and at <= last + SAME_MOMENT_SECONDS

    def __len__(self) -> int:
        return len(self._all)

    @property
    def kept_since(self) -> float | None:
        """Since when resolved events are complete; None if none was dropped."""
        full = len(self._resolved) >= self._most_resolved
        return self._all[self._resolved[0]].resolved_at if full else None

    def get(self, key: str) -> Event | None:
        """An event by id; None if it is not kept."""
        return self._all.get(key)

    def newest_first(self, before: str = "") -> Iterator[Event]:
        """All events, newest first; only those with lower ids than `before`, if there is one."""
        end = bisect_left(self._ids, before) if before else len(self._ids)
        return map(self._all.__getitem__, reversed(self._ids[:end]))

    def lasting(self) -> list[Event]:
        """Unresolved events, newest first."""
        return [event for event in self.newest_first() if event.resolved_at is None]

    def begin(
        self, check: HealthCheck, node: str, uuid: str, finding: Finding, at: float, xid: int | None = None
    ) -> Event:
        """Add an unresolved event."""
        self._numbered += 1
        event = Event(f"{self._run}-{self._numbered:08x}", check, node, uuid, finding, at, at, xid)
        self._put(event)
        self._note(event)
        return event

    def again(self, event: Event, at: float, finding: Finding) -> None:
        """Note that an event happened again."""
        event.count += 1
        event.last_at, event.finding = at, finding
        if event.resolved_at is not None:
            event.resolved_at = at
        self._note(event)

    def restate(self, event: Event, finding: Finding) -> None:
        """Change the finding of an unresolved event."""
        event.finding = finding
        self._note(event)

    def resolve(self, event: Event, at: float) -> None:
        """Resolve an event. Drops the oldest resolved one if there are too many."""
        event.resolved_at = at
        self._note(event)
        self._resolved.append(event.id)
        self._drop_oldest()

    def clear(self, events: Iterable[Event]) -> None:
        """Clear the quarantines of these events."""
        for event in events:
            event.cleared = True
            self._note(event)

    def _put(self, event: Event) -> None:
        self._all[event.id] = event
        self._ids.append(event.id)

    def _note(self, event: Event) -> None:
        self.changed.add(event.id)
        self.unsaved.add(event.id)

    def _drop_oldest(self) -> None:
        while len(self._resolved) > self._most_resolved:
            key = self._resolved.popleft()
            if self._all.pop(key, None):
                del self._ids[bisect_left(self._ids, key)]
            self.unsaved.add(key)


@dataclass(slots=True)
class HealthCondition:
    """A check that finds something, or did a moment ago."""

    bad_since: float
    event: Event | None = None
    good_since: float | None = None


class Conditions:
    """The conditions of one GPU or node."""

    def __init__(self, events: Events, node: str, uuid: str) -> None:
        self._events = events
        self._node = node
        self._uuid = uuid
        self._all: dict[HealthCheck, HealthCondition] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def lasting(self) -> list[Event]:
        """Unresolved events."""
        return [condition.event for condition in self._all.values() if condition.event is not None]

    def resume(self, event: Event) -> None:
        """Resume an event of an earlier run."""
        self._all[event.check] = HealthCondition(event.started_at, event)

    def apply(self, results: Results, now: float) -> None:
        """Apply the results of checks at `now`."""
        for check, finding in results.items():
            if finding is None:
                if check in self._all:
                    self._good(check, now)
                continue
            condition = self._all.setdefault(check, HealthCondition(now))
            condition.good_since = None
            if condition.event is not None:
                condition.event.last_at = now
                if condition.event.finding != finding:
                    self._events.restate(condition.event, finding)
            elif now - condition.bad_since >= HOLDS[check].raise_after:
                event = self._events.begin(check, self._node, self._uuid, finding, condition.bad_since)
                event.last_at = now
                condition.event = event

    def end(self, now: float) -> None:
        """Resolve all events: the GPU or node is gone."""
        for event in self.lasting:
            self._events.resolve(event, now)
        self._all.clear()

    def _good(self, check: HealthCheck, now: float) -> None:
        condition = self._all[check]
        if condition.event is None:
            del self._all[check]
            return
        if condition.good_since is None:
            condition.good_since = now
        if now - condition.good_since >= HOLDS[check].resolve_after:
            self._events.resolve(condition.event, now)
            del self._all[check]


SAME_WITHIN_SECONDS = 60.0


@dataclass(slots=True)
class _Fault:
    """A fault of one XID. `resumed`: known from an earlier run, with no newer report."""

    event: Event
    away: bool = False
    good_since: float | None = None
    resumed: bool = False


class GpuFaults:
    """The faults of one GPU."""

    def __init__(self, events: Events, node: str, uuid: str) -> None:
        self._events = events
        self._node = node
        self._uuid = uuid
        self._all: dict[int, _Fault] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def lasting(self) -> list[Event]:
        """Unresolved events."""
        return [fault.event for fault in self._all.values() if fault.event.resolved_at is None]

    def resume(self, xid: int, event: Event) -> None:
        """Resume an event of an earlier run."""
        self._all[xid] = _Fault(event, resumed=True)

    def report(self, xid: int, at: float, boot_id: str) -> None:
        """Take in a fault that the driver reported at `at`, in that boot of the node."""
        finding = xid_finding(xid)
        fault = self._all.get(xid)
        if fault is not None and fault.resumed and at <= fault.event.last_at + SAME_MOMENT_SECONDS:
            return  # reported again
        if fault is None and self._events.was_over(self._node, self._uuid, xid, at):
            return
        kept = fault is not None and self._events.get(fault.event.id) is not None
        if fault is not None and kept and (fault.event.resolved_at is None or not finding.fatal):
            fault.away, fault.good_since, fault.resumed = False, None, False
            fault.event.cleared, fault.event.boot_id = False, boot_id
            self._events.again(fault.event, at, finding)
            return
        event = self._events.begin(HealthCheck.XID, self._node, self._uuid, finding, at, xid)
        event.boot_id = boot_id
        self._all[xid] = _Fault(event)
        if not finding.fatal:
            self._events.resolve(event, at)

    def saw(self, state: str, now: float) -> None:
        """Take in the state of the GPU."""
        for xid, fault in list(self._all.items()):
            if fault.event.resolved_at is not None:
                if now - fault.event.last_at > SAME_WITHIN_SECONDS:
                    del self._all[xid]
            elif state in AWAY:
                fault.away, fault.good_since = True, None
            elif state in ANSWERING and fault.away:
                self._good(xid, fault, now)

    def in_boot(self, boot_id: str) -> None:
        """Take in the boot of the node: a reboot has reset the GPU since earlier faults."""
        for fault in self._all.values():
            fault.event.boot_id = fault.event.boot_id or boot_id
            if boot_id not in {"", fault.event.boot_id}:
                fault.away = True

    def end(self, now: float, *, fatal_only: bool = False) -> list[Event]:
        """Resolve unresolved events, or only fatal ones; returns them."""
        ended = [event for event in self.lasting if event.finding.fatal or not fatal_only]
        for event in ended:
            self._events.resolve(event, now)
        return ended

    def _good(self, xid: int, fault: _Fault, now: float) -> None:
        if fault.good_since is None:
            fault.good_since = now
        if now - fault.good_since >= HOLDS[HealthCheck.XID].resolve_after:
            self._events.resolve(fault.event, now)
            del self._all[xid]
