"""From findings that come and go, and faults that the driver reports, to events that begin and end. Pure.

A finding must last for a while until it is an event, and must be gone for a while until that is resolved; while nothing
can be told, nothing changes. What happened to a program (a fault with an XID number) is over at once, and is the same
event when it happens again soon. What the GPU needs a reset for lasts until the GPU was away (reset, released, lost, or
the node booted) and answered again for a while.

Events of a run before may be restored. One that lasted goes on: what ends it is what would have ended it without a restart.

The meaning of XID numbers follows NVIDIA's public catalogue of XID errors (docs.nvidia.com/deploy/xid-errors); names and
judgement are ours. A fault is fatal where the catalogue asks for a reset, a reboot or a replacement before the GPU can
be used again. A fault of a program (a bad address, an illegal instruction) says nothing against the GPU.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpuscale.monitor.health.checks import ANSWERING, AWAY, HOLDS, Results
from gpuscale.monitor.model.health import Event, Finding, HealthAction, HealthCheck, HealthSeverity


class Xid(NamedTuple):
    """One number: what happened, how bad it is, what to do, and whether the GPU is unusable until that is done."""

    name: str
    severity: HealthSeverity
    action: HealthAction
    fatal: bool = False


_INFO, _WARNING, _CRITICAL = HealthSeverity.INFO, HealthSeverity.WARNING, HealthSeverity.CRITICAL

XIDS: Mapping[int, Xid] = {
    8: Xid("a channel made no progress", _WARNING, HealthAction.RESTART_WORKLOAD),
    13: Xid("a program caused a graphics engine exception", _WARNING, HealthAction.RESTART_WORKLOAD),
    31: Xid("a program accessed memory that it has not", _WARNING, HealthAction.RESTART_WORKLOAD),
    32: Xid("a stream of commands was corrupt", _WARNING, HealthAction.RESTART_WORKLOAD),
    38: Xid("the driver's firmware failed", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    43: Xid("a program's channel was reset", _INFO, HealthAction.RESTART_WORKLOAD),
    45: Xid("a program's channels were removed before it ended", _INFO, HealthAction.NONE),
    46: Xid("the GPU stopped processing", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    48: Xid("a memory error could not be corrected", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    54: Xid("auxiliary power is not connected", _CRITICAL, HealthAction.CHECK_HARDWARE, fatal=True),
    61: Xid("the power controller's firmware stopped", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    62: Xid("the power controller halted", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    63: Xid("memory with errors was noted for replacement", _WARNING, HealthAction.DRAIN),
    64: Xid(
        "memory with errors could not be noted for replacement", _CRITICAL, HealthAction.RESET_GPU, fatal=True
    ),
    66: Xid("a program made an illegal access of the driver", _WARNING, HealthAction.RESTART_WORKLOAD),
    68: Xid("the video processor failed", _WARNING, HealthAction.RESTART_WORKLOAD),
    69: Xid("a program caused an exception of the engine's class", _WARNING, HealthAction.RESTART_WORKLOAD),
    74: Xid("an NVLink failed", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    78: Xid("a virtual GPU could not be started", _WARNING, HealthAction.RESTART_WORKLOAD),
    79: Xid("the GPU fell off the bus", _CRITICAL, HealthAction.REBOOT_NODE, fatal=True),
    92: Xid("memory errors that are corrected come too often", _WARNING, HealthAction.DRAIN),
    94: Xid("a memory error was contained to one program", _WARNING, HealthAction.RESTART_WORKLOAD),
    95: Xid("a memory error was not contained", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    109: Xid("switching between programs timed out", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    110: Xid("a security fault", _CRITICAL, HealthAction.REBOOT_NODE, fatal=True),
    119: Xid("the system processor did not answer", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    120: Xid("the system processor failed", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    121: Xid("the link to the CPU saw an error that was corrected", _INFO, HealthAction.NONE),
    122: Xid("the power controller could not read its memory", _WARNING, HealthAction.CONTACT_SUPPORT),
    123: Xid("the power controller could not write its memory", _WARNING, HealthAction.RESET_GPU),
    136: Xid("training of a link failed", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    140: Xid("memory has an error that was not recovered", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    143: Xid("the GPU could not be initialized", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    144: Xid("an NVLink saw a fault of its serializer", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    145: Xid("an NVLink saw a fault of its link layer", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    149: Xid("an NVLink failed to come up", _CRITICAL, HealthAction.RESET_GPU, fatal=True),
    154: Xid("the driver changed what the GPU needs to recover", _WARNING, HealthAction.DRAIN),
    155: Xid("an NVLink went down", _WARNING, HealthAction.DRAIN),
    156: Xid("memory of a link was retired", _WARNING, HealthAction.DRAIN),
}
"""What is known of each number."""

_UNKNOWN = Xid(
    "a fault that this version does not know", HealthSeverity.WARNING, HealthAction.CONTACT_SUPPORT
)


def xid_finding(xid: int) -> Finding:
    """What a fault with that number means."""
    known = XIDS.get(xid, _UNKNOWN)
    return Finding(known.severity, known.action, f"XID {xid}: {known.name}", known.fatal)


MOST_RESOLVED = 1_000
SAME_MOMENT_SECONDS = 5.0
"""A fault at most this much later than one that is over is the same one, repeated."""


_Key = tuple[HealthCheck, str, str, int | None]
"""What is the same of an event in two runs."""


class Events:
    """Events by id. `changed`: those that began, recurred or were resolved since it was emptied; `unsaved`: for the disk."""

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
                self._over[event.check, event.node, event.uuid.lower(), event.xid] = event.last_at
        over = [
            (event.resolved_at, event.id) for event in self._all.values() if event.resolved_at is not None
        ]
        self._resolved.extend(key for _, key in sorted(over))
        self._drop_oldest()

    def was_over(self, node: str, uuid: str, xid: int, at: float) -> bool:
        """Whether a fault of this moment was over in a run before: its agent tells of it again."""
        last = self._over.get((HealthCheck.XID, node, uuid.lower(), xid))
        return last is not None and at <= last + SAME_MOMENT_SECONDS

    def __len__(self) -> int:
        return len(self._all)

    @property
    def kept_since(self) -> float | None:
        """When the first event was over from when on none is dropped; None where all are kept."""
        return (
            self._all[self._resolved[0]].resolved_at if len(self._resolved) >= self._most_resolved else None
        )

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
        """Change the finding of an event that lasts."""
        event.finding = finding
        self._note(event)

    def resolve(self, event: Event, at: float) -> None:
        """An event is over; the oldest resolved one is dropped where too many are kept."""
        event.resolved_at = at
        self._note(event)
        self._resolved.append(event.id)
        self._drop_oldest()

    def clear(self, events: Iterable[Event]) -> None:
        """An admin cleared these: they no longer keep work away."""
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


@dataclass(slots=True)
class HealthCondition:
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
        self._all: dict[HealthCheck, HealthCondition] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def lasting(self) -> list[Event]:
        """Events that are not resolved."""
        return [condition.event for condition in self._all.values() if condition.event is not None]

    def resume(self, event: Event) -> None:
        """An event of a run before goes on."""
        self._all[event.check] = HealthCondition(event.started_at, event)

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
        condition = self._all.setdefault(check, HealthCondition(now))
        condition.good_since = None
        if condition.event is None:
            if now - condition.bad_since >= HOLDS[check].raise_after:
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
        if now - condition.good_since >= HOLDS[check].resolve_after:
            self._events.resolve(condition.event, now)
            del self._all[check]


SAME_WITHIN_SECONDS = 60.0


@dataclass(slots=True)
class _Fault:
    """One number on one GPU. `resumed`: a run before heard of it, and its agent has told of nothing newer."""

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
        """Events that are not resolved."""
        return [fault.event for fault in self._all.values() if fault.event.resolved_at is None]

    def resume(self, xid: int, event: Event) -> None:
        """An event of a run before goes on."""
        self._all[xid] = _Fault(event, resumed=True)

    def report(self, xid: int, at: float, boot_id: str) -> None:
        """The driver reported a fault at `at`, in that boot of the node."""
        finding = xid_finding(xid)
        fault = self._all.get(xid)
        if fault is not None and fault.resumed and at <= fault.event.last_at + SAME_MOMENT_SECONDS:
            return  # its agent tells of it again
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
        """The GPU was seen in a state."""
        for xid, fault in list(self._all.items()):
            if fault.event.resolved_at is not None:
                if now - fault.event.last_at > SAME_WITHIN_SECONDS:
                    del self._all[xid]
            elif state in AWAY:
                fault.away, fault.good_since = True, None
            elif state in ANSWERING and fault.away:
                self._good(xid, fault, now)

    def in_boot(self, boot_id: str) -> None:
        """The node is in this boot: every GPU was reset since a fault in another one."""
        for fault in self._all.values():
            fault.event.boot_id = fault.event.boot_id or boot_id
            if boot_id not in {"", fault.event.boot_id}:
                fault.away = True

    def end(self, now: float, *, fatal_only: bool = False) -> list[Event]:
        """Resolve what lasts: an admin cleared it, or the GPU is gone; returns the events."""
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
