"""What a call costs, counted in Python frames and not in time: a machine that is busy counts the same."""

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest

from gpuscale.allocator import app
from gpuscale.api.allocator import v1 as api
from gpuscale.common import VERSION
from gpuscale.common.rpc.interceptor import Guard
from gpuscale.common.rpc.server import Server
from gpuscale.common.rpc.status import REQUEST_ID_KEY, ROLE_KEY, VERSION_KEY, VIA_KEY
from gpuscale.gateway.main import open_gateway
from gpuscale.gateway.settings import GatewaySettings
from tests.support.allocator import Client, allocator, calling, reserve_request
from tests.support.fake_fleet import FakeFleet, node_message, serving

OUTERMOST = "_answer"
CALLS = 10
SHARES = 16


async def frames(call: Callable[[], Awaitable[object]]) -> float:
    """How many frames of this thread a call takes, in the server: the median of some, as one may meet what comes by itself."""
    file, rooms, depth, found = Guard.__init__.__code__.co_filename, str(Path(app.__file__).parent), 0, 0
    each: list[int] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth, found
        code = frame.f_code
        if event == "call" and (depth or (code.co_name == OUTERMOST and code.co_filename == file)):
            depth, found = depth + 1, found + 1
        elif event == "call" and code.co_filename.startswith(rooms):
            found += 1  # of tasks beside, such as that which commits
        elif event == "return" and depth:
            depth -= 1

    await call()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(CALLS):
            found = 0
            await call()
            each.append(found)
    finally:
        sys.setprofile(before)
    return median(each)


@asynccontextmanager
async def forwarding(address: str) -> AsyncGenerator[str]:
    """The address of a gateway before an allocator."""
    settings = GatewaySettings(
        listen="127.0.0.1:0", fleet_address=address, allocator_address=address, autoscaler_address=address
    )
    server = Server(settings.server_options(), settings.authenticator())
    async with open_gateway(settings) as (forwarder, services):
        server.add_generic(forwarder, services)
        gateway = str(server.bind())
        async with server:
            yield gateway


async def asked_and_released(client: Client) -> None:
    await client.release(await client.reserve())


async def shares_asked_and_released(client: Client) -> None:
    asked = [reserve_request(gpu_milli=50, memory=0) for _ in range(SHARES)]
    made = await client.stub.BatchReserve(api.BatchReserveRequest(requests=asked))
    given = [api.ReleaseReservationRequest(name=one.name, fence=one.fence) for one in made.reservations]
    await client.stub.BatchRelease(api.BatchReleaseRequest(requests=given))


@pytest.mark.parametrize(
    ("what", "most"), [("get", 32), ("reserve and release", 321), ("shares", 3359), ("get, forwarded", 83)]
)
async def test_a_call_takes_no_more_frames_than_it_did(tmp_path: Path, what: str, most: int) -> None:
    """From the guard down; of a forwarded call in both servers."""
    async with (
        serving(FakeFleet(node_message("n0", count=8))) as fleet,
        allocator(tmp_path, fleet) as address,
        forwarding(address) as gateway,
        calling(gateway if "forwarded" in what else address) as client,
    ):
        await client.ready()
        held = await client.reserve()
        change = shares_asked_and_released if what == "shares" else asked_and_released
        found = await frames(lambda: client.get(held.name) if "get" in what else change(client))
    assert 0 < found <= most, found


@pytest.mark.parametrize(("change", "most"), [(asked_and_released, 98), (shares_asked_and_released, 278)])
async def test_a_change_takes_no_more_frames_of_the_threads_beside_than_it_did(
    tmp_path: Path, change: Callable[[Client], Awaitable[None]], most: int
) -> None:
    """The median of some, as one may meet what those threads do by themselves."""
    found, each = 0, list[int]()

    def count(_frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        found += event == "call"

    threading.setprofile(count)
    try:
        async with (
            serving(FakeFleet(node_message("n0", count=8))) as fleet,
            allocator(tmp_path, fleet) as address,
            calling(address) as client,
        ):
            await client.ready()
            await change(client)
            for _ in range(CALLS):
                before = found
                await change(client)
                each.append(found - before)
    finally:
        threading.setprofile(None)
    assert 0 < median(each) <= most, each


async def test_the_version_and_the_role_are_told_beside_pages_alone(tmp_path: Path) -> None:
    """Each of them would cost every other call, too, in both servers."""
    async with (
        serving(FakeFleet(node_message("n0", count=1))) as fleet,
        allocator(tmp_path, fleet) as address,
        forwarding(address) as gateway,
        calling(gateway) as client,
    ):
        await client.ready()
        get = api.GetReservationRequest(name=(await client.reserve()).name)
        page, one = (
            client.stub.ListReservations(api.ListReservationsRequest()),
            client.stub.GetReservation(get),
        )
        await asyncio.gather(page, one)
        told, least = dict(await page.trailing_metadata()), dict(await one.trailing_metadata())
    assert least.keys() == {REQUEST_ID_KEY}
    del told[REQUEST_ID_KEY]
    assert told == {VERSION_KEY: VERSION, ROLE_KEY: "ADMIN", VIA_KEY: VERSION}
