"""NodeService on the wire: messages to values, one use case, values to messages."""

from datetime import datetime, timedelta

from gpuscale.allocator.domain.cordons import Cordon, spot_of
from gpuscale.allocator.servicers import translate
from gpuscale.allocator.usecases.draining import Maintenance
from gpuscale.api.allocator import v1 as api
from gpuscale.common import names, wire
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.security.auth import Context, current_principal


class NodeServicer(api.NodeServiceServicer):
    """The RPCs. Requests have been validated against the contract and callers authenticated before they come here."""

    def __init__(self, maintenance: Maintenance, clock: Clock) -> None:
        self._maintenance = maintenance
        self._clock = clock

    async def CordonNode(self, request: api.CordonNodeRequest, context: Context) -> api.CordonNodeResponse:
        """Let nothing new onto a node or GPU."""
        if request.validate_only:
            self._maintenance.expect_known(spot_of(request.name))
            return api.CordonNodeResponse(cordon=self._existing(request.name))
        cordon = await self._maintenance.cordon(
            spot_of(request.name), reason=request.reason, author=current_principal().name
        )
        return api.CordonNodeResponse(cordon=self._message(cordon, self._clock.now(), self._clock.wall()))

    async def UncordonNode(
        self, request: api.UncordonNodeRequest, context: Context
    ) -> api.UncordonNodeResponse:
        """Lift a cordon."""
        if request.validate_only:
            self._maintenance.expect_liftable(spot_of(request.name), current_principal())
            return api.UncordonNodeResponse()
        await self._maintenance.uncordon(spot_of(request.name), current_principal())
        return api.UncordonNodeResponse()

    async def DrainNode(self, request: api.DrainNodeRequest, context: Context) -> api.DrainNodeResponse:
        """Have everything leave a node or GPU."""
        if request.validate_only:
            self._maintenance.expect_known(spot_of(request.name))
            return api.DrainNodeResponse(cordon=self._existing(request.name))
        cordon, leaving = await self._maintenance.drain(
            spot_of(request.name),
            reason=request.reason,
            author=current_principal().name,
            grace=wire.optional_seconds(request, "grace"),
        )
        now, wall = self._clock.now(), self._clock.wall()
        return api.DrainNodeResponse(
            cordon=self._message(cordon, now, wall),
            reservations=[translate.from_reservation(one, now, wall) for one in leaving],
        )

    async def ListCordons(self, request: api.ListCordonsRequest, context: Context) -> api.ListCordonsResponse:
        """List a page of them."""
        cordons, token = self._maintenance.list_cordons(
            page_size=request.page_size, page_token=request.page_token
        )
        now, wall = self._clock.now(), self._clock.wall()
        return api.ListCordonsResponse(
            cordons=[self._message(one, now, wall) for one in cordons], next_page_token=token
        )

    def _existing(self, name: str) -> api.Cordon | None:
        found = self._maintenance.cordons.get(spot_of(name))
        return None if found is None else self._message(found, self._clock.now(), self._clock.wall())

    def _message(self, cordon: Cordon, now: float, wall: datetime) -> api.Cordon:
        there = self._maintenance.reservations(cordon.spot)
        message = api.Cordon(
            name=cordon.spot.name,
            reason=cordon.reason,
            author=cordon.author,
            create_time=wire.to_timestamp(cordon.created),
            reservations=[names.reservation_name(one.id) for one in there],
        )
        if cordon.deadline is not None:
            at = wall + timedelta(seconds=cordon.deadline - now)
            message.drain_deadline.CopyFrom(wire.to_timestamp(at))
        return message
