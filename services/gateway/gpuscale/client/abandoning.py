"""When somebody gives up in the middle of `reserve`: what was granted meanwhile is given back, so that nobody waits for it.

The call itself is cancelled, which ends a wait in the queue. But the grant may have been on its way back, and its holder
does not know its name then: it is found by its request id. Best effort, within two seconds; else its lease runs out.
"""

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from gpuscale.api.allocator import v1 as api
from gpuscale.client.paging import pages, pages_async
from gpuscale.common.errors import GpuscaleError

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import AllocatorServiceStub
    from gpuscale.api.allocator.v1.allocator_service_pb2_grpc import AllocatorServiceAsyncStub

PATIENCE = 2.0
"""Seconds that all of it may take: somebody pressed Ctrl-C, or a time-out ran."""
LOOKS = (0.0, 0.25)
"""Seconds before each look: what is being written to disk at the first is there at the second."""
_PAGE = 1000


def abandon(allocator: "AllocatorServiceStub", request: api.ReserveRequest) -> None:
    """Give back what a request was granted, if anything."""
    with suppress(GpuscaleError):
        for pause in LOOKS:
            time.sleep(pause)
            for page in pages(
                lambda asked: allocator.ListReservations(asked, timeout=PATIENCE / 2), _listed(request)
            ):
                for release in _releases(page, request):
                    allocator.ReleaseReservation(release, timeout=PATIENCE / 2)
                    return


async def abandon_async(allocator: "AllocatorServiceAsyncStub", request: api.ReserveRequest) -> None:
    """`abandon`, for the running event loop."""
    with suppress(GpuscaleError, TimeoutError):
        async with asyncio.timeout(PATIENCE):
            for pause in LOOKS:
                await asyncio.sleep(pause)
                async for page in pages_async(allocator.ListReservations, _listed(request)):
                    for release in _releases(page, request):
                        await allocator.ReleaseReservation(release)
                        return


def _listed(request: api.ReserveRequest) -> api.ListReservationsRequest:
    return api.ListReservationsRequest(holder=request.holder, page_size=_PAGE)


def _releases(
    page: api.ListReservationsResponse, request: api.ReserveRequest
) -> list[api.ReleaseReservationRequest]:
    """The request that gives back what this one was granted; none where it is not on the page."""
    return [
        api.ReleaseReservationRequest(name=one.name, fence=one.fence)
        for one in page.reservations
        if one.request_id == request.request_id
    ]
