"""Two autoscalers on one PostgreSQL: one acts, and when it dies or is cut off the other one goes on with what it finds."""

import asyncio
from pathlib import Path

import grpc

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.rpc.wrapped_channel import FOLLOWS
from tests.support.autoscaler_app import Autoscaler, endpoint
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.postgresql import PostgresServer
from tests.support.program import AutoscalerProcess
from tests.support.waiting import eventually

WAIT = 60.0


async def leads(autoscaler: Autoscaler) -> bool:
    return await said(autoscaler) == "leads"


async def said(autoscaler: Autoscaler) -> str:
    """Whether it leads, or why not."""
    try:
        with rpc_errors():
            await autoscaler.endpoints.ListEndpoints(
                api.ListEndpointsRequest(), timeout=5, metadata=(FOLLOWS,)
            )
    except GpuscaleError as error:
        return f"{error.reason} {error.metadata.get('leader', '')}"
    return "leads"


async def test_the_other_autoscaler_goes_on_and_starts_nothing_twice(
    tmp_path: Path, postgresql: PostgresServer
) -> None:
    allocator = FakeAllocator({"n": [f"GPU-{index}" for index in range(4)]})
    adapter, database = FakeAdapter(), postgresql.database()
    async with (
        serving(allocator) as address,
        AutoscalerProcess(tmp_path / "a", address, database) as first,
        AutoscalerProcess(tmp_path / "b", address, database) as second,
    ):
        await first.start()
        async with first.channel() as one, second.channel() as other:
            await eventually(lambda: leads(one), timeout=WAIT)
            await second.start()
            await eventually(lambda: says(other, f"NOT_LEADER {first.address}"), timeout=WAIT)
            async with adapter.connected(first.address):
                await one.create(endpoint(low=2, high=4, gpus=1))
                await eventually(lambda: len(adapter.alive) == 2, timeout=WAIT)
            assert len(await other.replicas()) == 2, "the standby asks the leader"
            await first.kill()
            await eventually(lambda: leads(other), timeout=WAIT)
            async with adapter.connected(second.address):
                await other.update(endpoint(low=3, high=4, gpus=1))
                await eventually(lambda: len(adapter.alive) == 3, timeout=WAIT)
            await asyncio.to_thread(postgresql.cut, "gpuscale-autoscaler%")
            change = endpoint(low=4, high=4, gpus=1)
            await eventually(lambda: other.update(change), timeout=WAIT, retry_on=(grpc.RpcError,))
            async with adapter.connected(second.address):
                await eventually(lambda: len(adapter.alive) == 4, timeout=WAIT)
        assert set(adapter.starts.values()) == {1}
        assert len(allocator.held) == 4
        assert adapter.revisions == sorted(adapter.revisions), "revisions grow from one leader to the next"


async def says(autoscaler: Autoscaler, what: str) -> bool:
    return await said(autoscaler) == what
