"""Plain clients of two allocators, without a word about leaders: every call is answered, and nothing is done twice."""

import asyncio
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.errors import UnavailableError
from gpuscale.common.rpc.status import from_rpc_error
from tests.fault.allocator.allocator_pair import plain, settled
from tests.support.postgresql import PostgresServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(480)


async def drained(watch: Any) -> None:
    """Read a stream to its end."""
    while await watch.read() is not grpc.aio.EOF:
        pass


async def test_what_a_leader_did_before_it_died_is_not_done_again_through_the_standby(
    tmp_path: Path, postgresql: PostgresServer
) -> None:
    """It dies with its answers unsent: callers repeat their calls at the standby, under the same request ids."""
    dies = "allocator.reserve.before_reply=kill"
    async with settled(tmp_path, postgresql, dies) as both, plain(both.addresses[1]) as client:
        watch = client.stub.WatchReservations(allocator_api.WatchReservationsRequest(), timeout=60)
        assert await watch.read() is not grpc.aio.EOF
        refusals, ids = list[str](), [str(uuid4()) for _ in range(8)]

        async def insist(number: int) -> allocator_api.Reservation:
            while True:
                try:
                    return await client.reserve(request_id=ids[number], ttl=600)
                except UnavailableError as error:
                    refusals.append(error.reason)
                    await asyncio.sleep(error.retry_after or 0.2)

        calls = [asyncio.create_task(insist(number)) for number in range(8)]
        granted = await asyncio.gather(*calls)
        assert (await both.at(0).ended())[0] == -9
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(drained(watch), 60)
        assert from_rpc_error(caught.value).reason == "LEAD_LOST"
        assert "LEAD_LOST" in refusals
        assert set(refusals) <= {"LEAD_LOST", "NOT_LEADER", "NO_TELEMETRY"}
        live = await eventually(lambda: client.live(), timeout=60.0, retry_on=(UnavailableError,))
        assert sorted(one.name for one in live) == sorted(one.name for one in granted)
        assert len({one.name for one in granted}) == 8
