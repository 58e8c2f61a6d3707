"""Faults that the driver reported by their XID number. Pure.

What happened to a program is over at once; when the same happens again soon it is the same event. What the GPU needs a
reset for lasts until the GPU was away (reset, released, lost, or the node booted) and answered again for a while.
"""

from dataclasses import dataclass

from gpuscale.monitor.health.checks import ANSWERING, AWAY, PATIENCE
from gpuscale.monitor.health.events import SAME_MOMENT_SECONDS, Events
from gpuscale.monitor.health.xids import xid_finding
from gpuscale.monitor.model.health import Event, HealthCheck

SAME_WITHIN_SECONDS = 60.0


@dataclass(slots=True)
class _Fault:
    """One number on one GPU. `resumed`: a run before heard of it, and its agent has told of nothing newer."""

    event: Event
    away: bool = False
    good_since: float | None = None
    resumed: bool = False


class Faults:
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
        """What lasts is over, by an admin's word, or since the GPU is no longer there; the events that ended."""
        ended = [event for event in self.lasting if event.finding.fatal or not fatal_only]
        for event in ended:
            self._events.resolve(event, now)
        return ended

    def _good(self, xid: int, fault: _Fault, now: float) -> None:
        if fault.good_since is None:
            fault.good_since = now
        if now - fault.good_since >= PATIENCE[HealthCheck.XID].resolve_after:
            self._events.resolve(fault.event, now)
            del self._all[xid]
