"""The fake server answers as the real allocator does: the same steps, against both, end in the same way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.client import AsyncClient, AsyncLease, GpuscaleError
from gpuscale.testing import FakeServer
from tests.support.allocator_client import allocator_client
from tests.support.fake_fleet import FakeFleet, node_message

REQUEST_ID = "00000000-0000-4000-8000-000000000001"
GPUS = 4
Step = Callable[[AsyncClient], Awaitable[object]]


@asynccontextmanager
async def client_of(kind: str, folder: Path) -> AsyncIterator[AsyncClient]:
    """A client of a server with one node of four GPUs."""
    if kind == "fake":
        with FakeServer(gpus=GPUS) as server:
            async with server.connect_async() as client:
                yield client
    else:
        async with allocator_client(folder, FakeFleet(node_message("node-0", count=GPUS))) as client:
            yield client


async def renew(client: AsyncClient, name: str, fence: int) -> None:
    await client.allocator.RenewReservation(api.RenewReservationRequest(name=name, fence=fence))


async def release(client: AsyncClient, name: str, fence: int) -> None:
    await client.allocator.ReleaseReservation(api.ReleaseReservationRequest(name=name, fence=fence))


async def held(client: AsyncClient) -> AsyncLease:
    return await client.reserve(1, "me", ttl=60)


async def reserve_twice(client: AsyncClient) -> object:
    first = await client.reserve(2, "me", request_id=REQUEST_ID)
    again = await client.reserve(2, "me", request_id=REQUEST_ID)
    return first.name == again.name, first.fence == again.fence, len(first.gpus)


async def reuse_the_id(client: AsyncClient) -> object:
    await client.reserve(2, "me", request_id=REQUEST_ID)
    return await client.reserve(1, "me", request_id=REQUEST_ID)


async def more_than_is_free(client: AsyncClient) -> object:
    await client.reserve(3, "me")
    return await client.reserve(2, "me")


async def wait_in_vain(client: AsyncClient) -> object:
    await client.reserve(3, "me")
    return await client.reserve(2, "me", wait=0.1)


async def more_than_there_is(client: AsyncClient) -> object:
    return await client.reserve(GPUS + 1, "me")


async def more_memory_than_there_is(client: AsyncClient) -> object:
    return await client.reserve(1, "me", min_memory="1PiB")


async def none_at_all(client: AsyncClient) -> object:
    return await client.reserve(0, "me")


async def renew_with_another_fence(client: AsyncClient) -> object:
    one = await held(client)
    return await renew(client, one.name, one.fence + 1)


async def release_with_another_fence(client: AsyncClient) -> object:
    one = await held(client)
    return await release(client, one.name, one.fence + 1)


async def release_twice(client: AsyncClient) -> object:
    one = await held(client)
    await release(client, one.name, one.fence)
    return await release(client, one.name, one.fence)


async def renew_what_ended(client: AsyncClient) -> object:
    one = await held(client)
    await release(client, one.name, one.fence)
    return await renew(client, one.name, one.fence)


async def renew_what_never_was(client: AsyncClient) -> object:
    return await renew(client, "reservations/none", 1)


async def get_what_never_was(client: AsyncClient) -> object:
    return await client.allocator.GetReservation(api.GetReservationRequest(name="reservations/none"))


async def share(client: AsyncClient) -> object:
    lease = await client.reserve(1, "me", gpu_milli=500)
    return [gpu.milli for gpu in lease.gpus]


async def gang(client: AsyncClient) -> object:
    lease = await client.reserve(2, "me", member_count=2)
    return [gpu.member for gpu in lease.gpus], lease.reservation.member_count


async def list_and_states(client: AsyncClient) -> object:
    one, _ = await held(client), await held(client)
    await release(client, one.name, one.fence)
    live = await client.allocator.ListReservations(api.ListReservationsRequest(holder="me"))
    everything = await client.allocator.ListReservations(api.ListReservationsRequest(show_ended=True))
    return len(live.reservations), sorted(one.state for one in everything.reservations)


STEPS: tuple[Step, ...] = (
    reserve_twice,
    reuse_the_id,
    more_than_is_free,
    wait_in_vain,
    more_than_there_is,
    more_memory_than_there_is,
    none_at_all,
    renew_with_another_fence,
    release_with_another_fence,
    release_twice,
    renew_what_ended,
    renew_what_never_was,
    get_what_never_was,
    share,
    gang,
    list_and_states,
)


async def outcome(step: Step, client: AsyncClient) -> object:
    """What a step returns, or the error that it ends with."""
    try:
        return await step(client)
    except GpuscaleError as error:
        return type(error).__name__, error.reason


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
async def test_a_step_ends_as_with_the_real_allocator(step: Step, tmp_path: Path) -> None:
    found: dict[str, object] = {}
    for kind in ("fake", "real"):
        async with client_of(kind, tmp_path) as client:
            found[kind] = await outcome(step, client)
    assert found["fake"] == found["real"]
