"""HealthService on the wire."""

from collections.abc import AsyncGenerator
from typing import Any

from gpuscale.api.monitor import v1 as api
from gpuscale.common.errors import NotFoundError
from gpuscale.common.filters import compile_filter
from gpuscale.common.listing import listed
from gpuscale.common.names import GPU, HEALTH_EVENT, NODE, parse
from gpuscale.common.rpc.feed import FeedView
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context
from gpuscale.common.wire import asked_period
from gpuscale.monitor.fleet.directory import Directory
from gpuscale.monitor.model.health import Event, HealthCheck
from gpuscale.monitor.observing.health_watch import HealthWatch, to_event
from gpuscale.monitor.wire.values import Dates


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
        shown, token = listed(
            found,
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
        """One event."""
        found = self._health.register.events.get(parse(HEALTH_EVENT, request.name)["health_event"])
        if found is None:
            raise NotFoundError(f"there is no {request.name}", metadata={"name": request.name})
        return api.GetHealthEventResponse(health_event=to_event(found, Dates.of(self._clock)))

    async def WatchHealth(self, request: api.WatchHealthRequest, context: Context) -> AsyncGenerator[Any]:
        """Events that last, then those that change, encoded."""
        node = _node(request.parent)
        view: FeedView[Event] = FeedView(
            of=(lambda event: _about(event, node, request.uuid)) if node or request.uuid else None,
            matches=compile_filter(request.filter, api.HealthEvent) if request.filter else None,
        )
        async for message in self._health.feed.stream(request, view):
            yield message

    async def ClearQuarantine(
        self, request: api.ClearQuarantineRequest, context: Context
    ) -> api.ClearQuarantineResponse:
        """Lift the quarantine of a GPU."""
        node = parse(GPU, request.name)["node"]
        [target] = self._directory.gpus([request.name], [])
        lifted = self._health.clear(node, target.uuid)
        dates = Dates.of(self._clock)
        return api.ClearQuarantineResponse(health_events=[to_event(event, dates) for event in lifted])


def _node(parent: str) -> str:
    return parse(NODE, parent, "parent")["node"] if parent else ""


def _about(event: Event, node: str, uuid: str) -> bool:
    return node in {"", event.node} and uuid.lower() in {"", event.uuid.lower()}
