"""HealthService on the wire."""

from collections.abc import AsyncGenerator, Sequence

from gpuscale.api.monitor import v1 as api
from gpuscale.common.errors import NotFoundError
from gpuscale.common.names import GPU, HEALTH_EVENT, NODE, gpu_name, node_name, parse
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context
from gpuscale.common.wire import asked_period, page
from gpuscale.monitor.fleet.directory import Directory
from gpuscale.monitor.model.health import Event, HealthCheck
from gpuscale.monitor.observing.health_watch import HealthWatch
from gpuscale.monitor.wire.values import Dates

EVENTS_PER_MESSAGE = 500


class HealthServicer(api.HealthServiceServicer):
    """Tells what is wrong, and lifts quarantines."""

    def __init__(self, health: HealthWatch, directory: Directory, clock: Clock) -> None:
        self._health = health
        self._directory = directory
        self._clock = clock

    async def ListHealthEvents(
        self, request: api.ListHealthEventsRequest, context: Context
    ) -> api.ListHealthEventsResponse:
        """A page of events."""
        node, events, dates = _node(request.parent), self._health.register.events, Dates.of(self._clock)
        checks = {HealthCheck(check) for check in request.checks}
        period = asked_period(request)
        found = [
            event
            for event in events.newest_first()
            if _about(event, node, request.uuid)
            and (not checks or event.check in checks)
            and (request.show_resolved or event.resolved_at is None)
            and (not period or period.meets(*dates.span(event.started_at, event.resolved_at)))
        ]
        shown, token = page(
            found,
            key=lambda event: event.id,
            page_size=request.page_size,
            page_token=request.page_token,
            descending=True,
        )
        since = events.kept_since if request.show_resolved else None
        return api.ListHealthEventsResponse(
            health_events=self._messages(shown),
            next_page_token=token,
            kept_since=None if since is None else dates.timestamp(since),
        )

    async def GetHealthEvent(
        self, request: api.GetHealthEventRequest, context: Context
    ) -> api.GetHealthEventResponse:
        """One event."""
        found = self._health.register.events.get(parse(HEALTH_EVENT, request.name)["health_event"])
        if found is None:
            raise NotFoundError(f"there is no {request.name}", metadata={"name": request.name})
        return api.GetHealthEventResponse(health_event=to_event(found, Dates.of(self._clock)))

    async def WatchHealth(
        self, request: api.WatchHealthRequest, context: Context
    ) -> AsyncGenerator[api.WatchHealthResponse, None]:
        """Events that last, then those that change."""
        node, events = _node(request.parent), self._health.register.events
        with self._health.watchers.subscribe() as watch:
            lasting = [event for event in events.lasting() if _about(event, node, request.uuid)]
            lasting.reverse()
            for start in range(0, len(lasting) or 1, EVENTS_PER_MESSAGE):
                end = start + EVENTS_PER_MESSAGE
                shown = self._messages(lasting[start:end])
                yield api.WatchHealthResponse(health_events=shown, full=end >= len(lasting))
            while True:
                changed = [events.get(key) for key in await watch.changed()]
                told = [event for event in changed if event and _about(event, node, request.uuid)]
                for start in range(0, len(told), EVENTS_PER_MESSAGE):
                    shown = self._messages(told[start : start + EVENTS_PER_MESSAGE])
                    yield api.WatchHealthResponse(health_events=shown)

    async def ClearQuarantine(
        self, request: api.ClearQuarantineRequest, context: Context
    ) -> api.ClearQuarantineResponse:
        """Lift the quarantine of a GPU."""
        node = parse(GPU, request.name)["node"]
        [target] = self._directory.gpus([request.name], [])
        lifted = self._health.clear(node, target.uuid)
        return api.ClearQuarantineResponse(health_events=self._messages(lifted))

    def _messages(self, events: Sequence[Event]) -> list[api.HealthEvent]:
        dates = Dates.of(self._clock)
        return [to_event(event, dates) for event in events]


def _node(parent: str) -> str:
    return parse(NODE, parent, "parent")["node"] if parent else ""


def _about(event: Event, node: str, uuid: str) -> bool:
    return node in {"", event.node} and uuid.lower() in {"", event.uuid.lower()}


def to_event(event: Event, dates: Dates) -> api.HealthEvent:
    """An event as a message."""
    return api.HealthEvent(
        name=f"healthEvents/{event.id}",
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
