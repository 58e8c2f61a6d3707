"""Health of the fleet's nodes: an observer of what they stream, and what the judgement is told to."""

from dataclasses import dataclass

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.wire import seconds
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.watch import Watchers
from gpuscale.monitor.health.events import Events
from gpuscale.monitor.health.facts import WATCHED_FIELDS, facts_of, looks_well
from gpuscale.monitor.health.register import HealthRegister
from gpuscale.monitor.health.translate import to_quarantines
from gpuscale.monitor.model.health import Event, GpuFacts, HealthSeverity
from gpuscale.monitor.wire.dates import Dates
from gpuscale.monitor.wire.merging import Change, Picture

EVERY_SECONDS = 30.0
"""A GPU that looks well is looked at closely this often: what then is compared with before is read no more often."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Heard:
    """The newest fault that a node's agent told of."""

    epoch: str
    seq: int


class HealthWatch:
    """Judges what nodes stream, tells watchers of each change, and the index of each quarantine."""

    def __init__(self, clock: Clock, nodes: Nodes) -> None:
        self._clock = clock
        self._nodes = nodes
        self._heard: dict[str, _Heard] = {}
        self._turns: dict[str, float] = {}  # when every GPU of a node is to be looked at again
        self.register = HealthRegister(Events(f"{int(clock.wall().timestamp()):08x}"))
        self.watchers = Watchers()

    def resume(self) -> None:
        """What lasted in runs before goes on; to be called first, once the events were restored."""
        self.register.resume()
        self._nodes.awaited.update(self.register.nodes())

    def observe(self, node: str, picture: Picture, now: float, change: Change | None) -> None:
        """Take in a snapshot. `change`: what changed; None for a whole snapshot."""
        register = self.register
        if change is None:
            snapshot = picture.snapshot
            uuids = {gpu.uuid.lower() for gpu in snapshot.gpus}
            register.shown(node, snapshot.host.boot_id, uuids, now, snapshot.gpu_problem)
        eventful = register.eventful(node)
        every = now >= self._turns.get(node, float("-inf"))
        if not (every or eventful or change is None or change.touches(WATCHED_FIELDS)):
            return
        if every:
            self._turns[node] = now + EVERY_SECONDS
        gpus = picture.snapshot.gpus
        changed = None if every or change is None else change.changed_places()
        facts: dict[str, GpuFacts] = {}
        for gpu in gpus if changed is None else [gpus[place] for place in changed]:
            if every or not looks_well(gpu) or (eventful and gpu.uuid.lower() in eventful):
                facts[gpu.uuid] = facts_of(gpu)
        if facts:
            register.observe(node, facts, now)
        self._tell()

    def hear(self, node: str, faults: monitor_api.ReportedFaults, now: float) -> None:
        """Take in faults that an agent told of; one that it tells of again counts once."""
        epoch = self._nodes.get(node).epoch.id
        for fault in faults.faults:
            heard = self._heard.get(node)
            if heard is None or heard.epoch != epoch or fault.seq > heard.seq:
                self._heard[node] = _Heard(epoch, fault.seq)
                self.register.report(node, fault.uuid, fault.xid, now - seconds(fault.age))
        self._tell()

    def clear(self, node: str, uuid: str) -> list[Event]:
        """Lift the quarantine of a GPU; the events that no longer keep work away."""
        lifted = self.register.clear(node, uuid, self._clock.now())
        self._tell()
        return lifted

    def tick(self) -> None:
        """Let time pass."""
        now = self._clock.now()
        silence = dict(self._nodes.silence(now))
        for node in self.register.nodes():
            if node not in silence and node not in self._nodes.awaited:
                self.register.forget(node, now)
                self._heard.pop(node, None)
                self._turns.pop(node, None)
        for node, silent in silence.items():
            self.register.stale(node, stale=silent, now=now)
        self.register.tick(now)
        self._tell()

    def _tell(self) -> None:
        """Tell of what changed since the last time."""
        register = self.register
        if register.events.changed:
            changed, register.events.changed = register.events.changed, set()
            for key in changed:
                self.watchers.mark(key)
                _note(register.events.get(key))
        if register.requarantined:
            requarantined, register.requarantined = register.requarantined, set()
            dates = Dates.of(self._clock)
            for node in requarantined:
                self._nodes.quarantine(node, to_quarantines(register.quarantines(node), dates))


def _note(event: Event | None) -> None:
    """A line in the log for what an operator should see."""
    if event is None or event.finding.severity is HealthSeverity.INFO:
        return
    _log.warning(
        "a health event" if event.resolved_at is None else "a health event is resolved",
        check=event.check.name,
        node=event.node,
        uuid=event.uuid,
        message=event.finding.message,
        fatal=event.finding.fatal,
    )
