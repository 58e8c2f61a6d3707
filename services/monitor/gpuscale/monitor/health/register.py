"""The health of all GPUs and nodes: turns facts and faults into events and quarantines. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from sys import intern

from gpuscale.monitor.health import checks
from gpuscale.monitor.health.events import Conditions, Events, GpuFaults

GONE_SECONDS = 3_600.0
"""A GPU is forgotten, and its events resolved, after this long without being in a snapshot."""

MOST_GPUS_OF_A_NODE = 2_048
"""Faults of further GPUs of a node are ignored, whatever its agent reports."""

_STALE = checks.Finding(
    checks.HealthSeverity.WARNING, checks.HealthAction.CHECK_AGENT, "no fresh snapshot comes in"
)
_UNKNOWN = checks.HealthFacts(state="")


@dataclass(slots=True)
class _Gpu:
    """A GPU with conditions or faults. `missing_since`: when snapshots stopped showing it."""

    uuid: str
    facts: checks.HealthFacts
    conditions: Conditions
    faults: GpuFaults
    missing_since: float | None = None

    @property
    def lasting(self) -> list[checks.Event]:
        return self.conditions.lasting + self.faults.lasting


@dataclass(slots=True)
class _Node:
    """One node. By lower-case UUID: GPUs with conditions or faults, the past of all GPUs, and quarantines."""

    conditions: Conditions
    gpus: dict[str, _Gpu]
    pasts: dict[str, checks.Past]
    quarantines: dict[str, checks.QuarantinedGpu]
    boot_id: str = ""
    stale: bool = False
    problem: str = ""


class HealthRegister:
    """Turns facts and faults into `events`. Call `tick` about once a second.

    `requarantined`: nodes whose quarantines changed; its reader empties it.
    """

    def __init__(self, events: Events) -> None:
        self.events = events
        self.requarantined: set[str] = set()
        self._nodes: dict[str, _Node] = {}

    def resume(self) -> None:
        """Resume unresolved events of earlier runs; nothing of them ends before a snapshot shows their GPUs.

        Call it once, after restoring the events.
        """
        for event in self.events.lasting():
            known = self._node(event.node)
            if not event.uuid:
                known.conditions.resume(event)
                continue
            gpu = known.gpus.get(event.uuid.lower()) or self._begin(event.node, event.uuid, _UNKNOWN)
            if event.xid is None:
                gpu.conditions.resume(event)
            else:
                gpu.faults.resume(event.xid, event)
            self._note(event.node, gpu)

    def eventful(self, node: str) -> Collection[str]:
        """Lower-case UUIDs of GPUs with conditions or faults: always pass the facts of these to `observe`."""
        known = self._nodes.get(node)
        return known.gpus.keys() if known is not None else ()

    def pasts(self, node: str) -> Mapping[str, checks.Past]:
        """The pasts of the GPUs of a node that were checked, by lower-case UUID."""
        return self._node(node).pasts

    def shown(self, node: str, boot_id: str, uuids: Collection[str], now: float, problem: str = "") -> None:
        """Take in the lower-case UUIDs of a node's GPUs, its boot, and why it cannot read GPUs."""
        known = self._node(node)
        known.problem = problem
        for uuid, gpu in known.gpus.items():
            if uuid in uuids:
                gpu.missing_since = None
            elif gpu.missing_since is None:
                gpu.missing_since = now
            gpu.faults.in_boot(boot_id)
        known.boot_id = boot_id
        if known.quarantines:  # the index may have just learned of the node
            self.requarantined.add(node)
        for uuid in known.pasts.keys() - uuids:
            del known.pasts[uuid]

    def observe(self, node: str, facts: Mapping[str, checks.HealthFacts], now: float) -> None:
        """Take in facts of GPUs by UUID: those in `eventful`, unhealthy ones, and others from time to time."""
        known = self._node(node)
        for uuid, shown in facts.items():
            gpu = known.gpus.get(uuid.lower())
            found = self._check(known, uuid.lower(), shown, now)
            if gpu is None and any(found.values()):
                gpu = self._begin(node, uuid, shown)
            if gpu is not None:
                gpu.facts = shown
                self._judge(node, gpu, found, now)

    def report(self, node: str, uuid: str, xid: int, at: float) -> None:
        """Take in a fault that the driver reported at `at`."""
        known = self._node(node)
        gpus = known.gpus
        if uuid.lower() in gpus or len(gpus) < MOST_GPUS_OF_A_NODE:
            gpu = gpus.get(uuid.lower()) or self._begin(node, uuid, _UNKNOWN)
            gpu.faults.report(xid, at, known.boot_id)
            self._note(node, gpu)

    def stale(self, node: str, *, stale: bool, now: float) -> None:
        """Take in whether a node is stale; meanwhile no event of its GPUs is resolved."""
        known = self._node(node)
        known.stale = stale
        if stale or known.conditions:
            known.conditions.apply({checks.HealthCheck.COLLECTION_STALE: _STALE if stale else None}, now)

    def clear(self, node: str, uuid: str, now: float) -> list[checks.Event]:
        """Lift the quarantine of a GPU; returns the events that no longer quarantine it."""
        gpu = self._node(node).gpus.get(uuid.lower())
        if gpu is None:
            return []
        ended = gpu.faults.end(now, fatal_only=True)
        lasting = [event for event in gpu.conditions.lasting if event.quarantines]
        self.events.clear(lasting)
        self._note(node, gpu)
        return ended + lasting

    def tick(self, now: float) -> None:
        """Apply the passing of time."""
        for node, known in self._nodes.items():
            if not known.stale and (known.problem or known.conditions):
                finding = checks.Finding(
                    checks.HealthSeverity.CRITICAL, checks.HealthAction.CHECK_AGENT, known.problem
                )
                unreadable = finding if known.problem else None
                known.conditions.apply({checks.HealthCheck.GPUS_UNREADABLE: unreadable}, now)
            for gpu in list(known.gpus.values()):
                if gpu.missing_since is not None and now - gpu.missing_since > GONE_SECONDS:
                    gpu.conditions.end(now)
                    gpu.faults.end(now)
                    self._note(node, gpu, over=True)
                elif not known.stale:
                    self._judge(node, gpu, self._check(known, gpu.uuid.lower(), gpu.facts, now), now)

    def quarantines(self, node: str) -> Mapping[str, checks.QuarantinedGpu]:
        """The quarantined GPUs of a node, by lower-case UUID."""
        return self._node(node).quarantines

    def forget(self, node: str, now: float) -> None:
        """Resolve all events of a node and forget it."""
        known = self._nodes.pop(node, None)
        if known is not None:
            known.conditions.end(now)
            for gpu in known.gpus.values():
                gpu.conditions.end(now)
                gpu.faults.end(now)

    def nodes(self) -> list[str]:
        """All known nodes."""
        return list(self._nodes)

    def _node(self, node: str) -> _Node:
        found = self._nodes.get(node)
        if found is None:
            found = self._nodes[node] = _Node(Conditions(self.events, node, ""), {}, {}, {})
        return found

    def _begin(self, node: str, uuid: str, facts: checks.HealthFacts) -> _Gpu:
        conditions, faults = Conditions(self.events, node, uuid), GpuFaults(self.events, node, uuid)
        gpu = self._node(node).gpus[uuid.lower()] = _Gpu(uuid, facts, conditions, faults)
        return gpu

    @staticmethod
    def _check(known: _Node, uuid: str, facts: checks.HealthFacts, now: float) -> checks.Results:
        past = known.pasts.get(uuid)
        if past is None:
            past = known.pasts[intern(uuid)] = checks.Past()
        return checks.results(facts) | checks.past_results(past, facts, now)

    def _judge(self, node: str, gpu: _Gpu, found: checks.Results, now: float) -> None:
        state = gpu.facts.state
        if gpu.missing_since is not None:  # old facts resolve nothing
            found = {check: finding for check, finding in found.items() if finding is not None}
            state = ""
        gpu.conditions.apply(found, now)
        gpu.faults.saw(state, now)
        self._note(node, gpu, over=not gpu.conditions and not gpu.faults)

    def _note(self, node: str, gpu: _Gpu, *, over: bool = False) -> None:
        """Update the quarantine of a GPU, and drop it if its events are `over`."""
        known, uuid = self._node(node), gpu.uuid.lower()
        if over:
            del known.gpus[uuid]
        events = [event for event in gpu.lasting if event.quarantines]
        quarantine = None
        if events:
            why = "; ".join(sorted({event.finding.message for event in events}))
            quarantine = checks.QuarantinedGpu(why, min(event.started_at for event in events))
        if quarantine != known.quarantines.get(uuid):
            self.requarantined.add(node)
            if quarantine is None:
                del known.quarantines[uuid]
            else:
                known.quarantines[uuid] = quarantine
