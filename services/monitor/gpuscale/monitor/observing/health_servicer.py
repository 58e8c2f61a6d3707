"""HealthService on the wire, and the observer that passes facts from snapshots to the health register."""

from collections.abc import AsyncGenerator
from typing import Any, cast

from google.protobuf.message import Message

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.errors import NotFoundError
from gpuscale.common.filters import compile_filter, listed
from gpuscale.common.names import GPU, HEALTH_EVENT, NODE, gpu_name, node_name, parse
from gpuscale.common.rpc.feed import FeedView, ResourceFeed
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context
from gpuscale.common.wire import asked_period, seconds
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.fleet.nodes import Directory, Nodes
from gpuscale.monitor.health import checks
from gpuscale.monitor.health.events import Events
from gpuscale.monitor.health.register import HealthRegister
from gpuscale.monitor.observing.samples import Dates
from gpuscale.monitor.wire import Change, Picture

_STATES = {value: name.removeprefix("GPU_STATE_") for name, value in types_api.GpuState.items()}
_ACTIONS = {value: name.removeprefix("RECOVERY_ACTION_") for name, value in types_api.RecoveryAction.items()}


_WATCHED = {
    "ecc_uncorrected": "ecc_volatile_uncorrected_count",
    "remap_failed": "remapped_rows_failed",
    "remap_pending": "remapped_rows_pending",
    "retired_pending": "retired_pages_pending",
    "throttle_reason_mask": "throttle_reason_mask",
}
"""Fields of GpuReading by fact; with the recovery action, they decide whether a GPU looks well."""
_COMPARED = {"pcie_replays": "pcie_replay_count", "nvlinks_active": "nvlink_active_count"}
"""Fields that are compared with earlier values."""


def facts_of(gpu: types_api.Gpu) -> checks.HealthFacts:
    """The facts of a GPU."""
    reading = cast("Message", gpu.reading)
    facts = dict[str, Any]()
    for fact, name in (_WATCHED | _COMPARED).items():
        if reading.HasField(name):
            facts[fact] = getattr(reading, name)
    if gpu.reading.HasField("recovery_action"):
        facts["recovery_action"] = _ACTIONS.get(gpu.reading.recovery_action, "OTHER")
    return checks.HealthFacts(_STATES.get(gpu.state, ""), **facts)


_FINE = frozenset(
    types_api.GpuState.Value(f"GPU_STATE_{word}") for word in ("OK", "DEGRADED", "SLOW", "DIVIDED", "STALE")
)
_SLOWDOWN = checks.SOFTWARE_THERMAL | checks.HARDWARE_THERMAL | checks.POWER_BRAKE
_NO_ACTION = types_api.RecoveryAction.RECOVERY_ACTION_NONE

WATCHED_FIELDS = frozenset(
    types_api.GpuReading.DESCRIPTOR.fields_by_name[name].number
    for name in (*_WATCHED.values(), "recovery_action")
)
"""Field numbers of the readings that decide whether a GPU looks well."""


def looks_well(gpu: types_api.Gpu) -> bool:
    """Whether no check without a past can find anything. Quick, since thousands of GPUs are checked each second.

    Absent readings are 0 in protobuf, which finds nothing here.
    """
    reading = gpu.reading
    return gpu.state in _FINE and not (
        reading.ecc_volatile_uncorrected_count
        or reading.throttle_reason_mask & _SLOWDOWN
        or reading.remapped_rows_failed
        or reading.remapped_rows_pending
        or reading.retired_pages_pending
        or reading.recovery_action > _NO_ACTION
    )


def is_as_before(gpu: types_api.Gpu, past: checks.Past | None, now: float) -> bool:
    """Whether no check that compares with the past can find anything; counts of that past then begin anew, as after a check."""
    now_read = gpu.reading.pcie_replay_count, gpu.reading.nvlink_active_count
    if past is None or (past.replays, past.most_links) != now_read:
        return False
    if now - past.replays_at >= checks.REPLAY_WINDOW_SECONDS:
        past.replays_at = now
    return True


EVERY_SECONDS = 30.0
"""How often all checks of a GPU that looks well are made: the readings they compare are read no more often."""

_log = get_logger(__name__)


class HealthWatch:
    """Observes nodes and passes facts to the register, events to watchers, and quarantines to the index."""

    def __init__(self, clock: Clock, nodes: Nodes) -> None:
        self._clock = clock
        self._nodes = nodes
        self._heard: dict[str, tuple[str, int]] = {}  # epoch and seq of the newest fault, by node
        self._turns: dict[str, float] = {}  # when to check every GPU of a node again
        self.register = HealthRegister(Events(f"{int(clock.wall().timestamp()):08x}"))
        self.feed: ResourceFeed[checks.Event] = ResourceFeed(
            api.WatchHealthResponse, lambda event, _: to_event(event, Dates.of(clock)), shared=1.0
        )

    def resume(self) -> None:
        """Resume unresolved events of earlier runs. Call it once, after restoring the events."""
        self.register.resume()
        for event in reversed(self.register.events.lasting()):
            self.feed.put(event_name(event), event)
        self._nodes.awaited.update(self.register.nodes())

    def observe(self, node: str, picture: Picture, now: float, change: Change | None) -> None:
        """Take in a snapshot; `change` is None for a whole one."""
        register = self.register
        if change is None:
            register.shown(node, picture.boot_id, frozenset(picture.uuids), now, picture.snapshot.gpu_problem)
        every = now >= self._turns.get(node, float("-inf"))
        if every:
            # Spread the turns of nodes that connect at the same time.
            early = 0 if node in self._turns else len(self._turns) % EVERY_SECONDS
            self._turns[node] = now + EVERY_SECONDS - early
        if every or register.eventful(node) or change is None or change.touches(WATCHED_FIELDS):
            # Of every GPU, or of changed ones that do not look well or have events.
            places = None if every or change is None else change.changed_places()
            gpus, uuids = picture.snapshot.gpus, picture.uuids
            eventful, pasts = register.eventful(node), register.pasts(node)
            facts = {
                gpus[place].uuid: facts_of(gpus[place])
                for place in (range(len(uuids)) if places is None else places)
                if not looks_well(gpus[place])
                or uuids[place] in eventful
                or (every and not is_as_before(gpus[place], pasts.get(uuids[place]), now))
            }
            if facts:
                register.observe(node, facts, now)
            self._tell()

    def hear(self, node: str, faults: monitor_internal.ReportedFaults, now: float) -> None:
        """Take in reported faults, ignoring repeated ones."""
        epoch = self._nodes.get(node).epoch.id
        for fault in faults.faults:
            before, last = self._heard.get(node, ("", -1))
            if before != epoch or fault.seq > last:
                self._heard[node] = epoch, fault.seq
                self.register.report(node, fault.uuid, fault.xid, now - seconds(fault.age))
        self._tell()

    def clear(self, node: str, uuid: str) -> list[checks.Event]:
        """Lift the quarantine of a GPU; returns the events that no longer quarantine it."""
        lifted = self.register.clear(node, uuid, self._clock.now())
        self._tell()
        return lifted

    def tick(self) -> None:
        """Apply the passing of time. Call it about once a second."""
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
        register = self.register
        if register.events.changed:
            changed, register.events.changed = register.events.changed, set()
            for key in sorted(changed):
                event = register.events.get(key)
                if event is None:
                    continue
                if event.resolved_at is None:
                    self.feed.put(event_name(event), event)
                else:
                    self.feed.remove(event_name(event), event)
                if event.finding.severity is not checks.HealthSeverity.INFO:
                    _log.warning(
                        "health event" if event.resolved_at is None else "health event resolved",
                        check=event.check.name,
                        node=event.node,
                        uuid=event.uuid,
                        message=event.finding.message,
                        fatal=event.finding.fatal,
                    )
        if register.requarantined:
            requarantined, register.requarantined = register.requarantined, set()
            dates = Dates.of(self._clock)
            for node in requarantined:
                quarantines = {
                    uuid: monitor_internal.Quarantine(
                        uuid=uuid, reason=gpu.reason, start_time=dates.timestamp(gpu.since)
                    )
                    for uuid, gpu in register.quarantines(node).items()
                }
                self._nodes.quarantine(node, quarantines)


def event_name(event: checks.Event) -> str:
    """`healthEvents/{health_event}`."""
    return f"healthEvents/{event.id}"


def to_event(event: checks.Event, dates: Dates) -> api.HealthEvent:
    """An event as a message."""
    return api.HealthEvent(
        name=event_name(event),
        check=api.HealthCheck.Value(f"HEALTH_CHECK_{event.check.name}"),
        severity=api.HealthSeverity.Value(f"HEALTH_SEVERITY_{event.finding.severity.name}"),
        fatal=event.finding.fatal,
        node=node_name(event.node),
        uuid=event.uuid,
        gpu=gpu_name(event.node, event.uuid) if event.uuid else "",
        recommended_action=api.RecommendedAction.Value(f"RECOMMENDED_ACTION_{event.finding.action.name}"),
        xid=event.xid,
        message=event.finding.message,
        start_time=dates.timestamp(event.started_at),
        last_time=dates.timestamp(event.last_at),
        resolved_time=None if event.resolved_at is None else dates.timestamp(event.resolved_at),
        count=event.count,
        cleared=event.cleared,
    )


class HealthServicer(api.HealthServiceServicer):
    """Serves health events and lifts quarantines."""

    def __init__(self, health: HealthWatch, directory: Directory, clock: Clock) -> None:
        self._health = health
        self._directory = directory
        self._clock = clock
        self._dates = Dates.of(clock)

    async def ListHealthEvents(
        self, request: api.ListHealthEventsRequest, context: Context
    ) -> api.ListHealthEventsResponse:
        node, events = _node(request.parent), self._health.register.events
        self._dates = dates = Dates.of(self._clock, self._dates)
        asked = {checks.HealthCheck(check) for check in request.checks}
        period = asked_period(request)

        def is_wanted(event: checks.Event) -> bool:
            return (
                _about(event, node, request.uuid)
                and (not asked or event.check in asked)
                and (request.show_resolved or event.resolved_at is None)
                and (not period or period.meets(*dates.span(event.started_at, event.resolved_at)))
            )

        shown, token = listed(
            lambda last: filter(is_wanted, events.newest_first(last)),
            request,
            api.HealthEvent,
            key=lambda event: event.id,
            encode=lambda event: to_event(event, dates),
            descending=True,
        )
        since = events.kept_since if request.show_resolved else None
        return api.ListHealthEventsResponse(
            health_events=shown,
            next_page_token=token,
            kept_since=None if since is None else dates.timestamp(since),
        )

    async def GetHealthEvent(
        self, request: api.GetHealthEventRequest, context: Context
    ) -> api.GetHealthEventResponse:
        found = self._health.register.events.get(parse(HEALTH_EVENT, request.name)["health_event"])
        event = to_event(NotFoundError.unless(found, request.name), Dates.of(self._clock))
        return api.GetHealthEventResponse(health_event=event)

    async def WatchHealth(self, request: api.WatchHealthRequest, context: Context) -> AsyncGenerator[Any]:
        node = _node(request.parent)
        view: FeedView[checks.Event] = FeedView(
            of=(lambda event: _about(event, node, request.uuid)) if node or request.uuid else None,
            matches=compile_filter(request.filter, api.HealthEvent) if request.filter else None,
        )
        async for message in self._health.feed.stream(request, view):
            yield message

    async def ClearQuarantine(
        self, request: api.ClearQuarantineRequest, context: Context
    ) -> api.ClearQuarantineResponse:
        node = parse(GPU, request.name)["node"]
        [target] = self._directory.gpus([request.name], [])
        lifted = self._health.clear(node, target.uuid)
        dates = Dates.of(self._clock)
        return api.ClearQuarantineResponse(health_events=[to_event(event, dates) for event in lifted])


def _node(parent: str) -> str:
    return parse(NODE, parent, "parent")["node"] if parent else ""


def _about(event: checks.Event, node: str, uuid: str) -> bool:
    return node in {"", event.node} and uuid.lower() in {"", event.uuid.lower()}
