"""Two autoscalers on one PostgreSQL: one acts, and when it dies or is cut off the other one goes on with what it finds.

KEDA makes its calls, in its order and over both by round_robin, and is answered by whichever it meets.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.api.keda import v1 as keda_api
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.status import from_rpc_error, rpc_errors
from gpuscale.common.rpc.wrapped_channel import FOLLOWS
from tests.support.autoscaler_app import Autoscaler, endpoint
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.keda import Keda, scaled_object
from tests.support.postgresql import PostgresServer
from tests.support.program import AutoscalerProcess
from tests.support.waiting import eventually


async def leads(autoscaler: Autoscaler) -> bool:
    return await said(autoscaler) == "leads"


async def said(autoscaler: Autoscaler) -> str:
    """Whether it leads, or why not."""
    try:
        with rpc_errors():
            await autoscaler.endpoints.ListEndpoints(
                api.ListEndpointsRequest(), timeout=30, metadata=(FOLLOWS,)
            )
    except GpuscaleError as error:
        return f"{error.reason} {error.metadata.get('leader', '')}"
    return "leads"


async def polled(keda: Keda) -> tuple[int, bool]:
    """What KEDA learns in one poll."""
    ref = scaled_object()
    assert (await keda.spec(ref))[0] == "desired"
    active = await keda.active(ref)
    return (await keda.value(ref))[1], active


ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})


async def test_the_other_autoscaler_goes_on_and_starts_nothing_twice(
    tmp_path: Path, postgresql: PostgresServer
) -> None:
    allocator = FakeAllocator({"n": [f"GPU-{index}" for index in range(4)]})
    adapter, database = FakeAdapter(), postgresql.database()
    async with (
        serving(allocator) as address,
        AutoscalerProcess(tmp_path / "a", address, database) as first,
        AutoscalerProcess(tmp_path / "b", address, database) as second,
        grpc.aio.insecure_channel(
            f"ipv4:{first.address},{second.address}", options=[("grpc.service_config", ROUND_ROBIN)]
        ) as both,
    ):
        stub: Any = keda_api.ExternalScalerStub(both)
        keda = Keda(stub)
        await first.start()
        async with first.channel() as one, second.channel() as other:
            await eventually(lambda: leads(one))
            await second.start()
            await eventually(lambda: says(other, f"NOT_LEADER {first.address}"))
            async with adapter.connected(first.address):
                await one.create(endpoint(low=2, high=4, gpus=1))
                await eventually(lambda: len(adapter.alive) == 2)
            # The standby asks the leader, once it has a connection of its own to it.
            assert len(await eventually(other.replicas, retry_on=(grpc.RpcError,))) == 2
            await eventually(lambda: polled(keda), retry_on=(grpc.RpcError,))
            assert [await polled(keda) for _ in range(20)] == [(2, True)] * 20
            pushed = [stub.StreamIsActive(scaled_object()) for _ in range(2)]
            for stream in pushed:
                assert (await stream.read()).result
            await first.kill()
            for stream in pushed:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stream.read()
                assert from_rpc_error(caught.value).reason in {"LEAD_LOST", "UNAVAILABLE"}
            await eventually(lambda: leads(other))
            await eventually(lambda: polled(keda), retry_on=(grpc.RpcError,))
            assert (await stub.StreamIsActive(scaled_object()).read()).result
            async with adapter.connected(second.address):
                await other.update(endpoint(low=3, high=4, gpus=1))
                await eventually(lambda: len(adapter.alive) == 3)
            await asyncio.to_thread(postgresql.cut, "gpuscale-autoscaler%")
            change = endpoint(low=4, high=4, gpus=1)
            await eventually(lambda: other.update(change), retry_on=(grpc.RpcError,))
            async with adapter.connected(second.address):
                await eventually(lambda: len(adapter.alive) == 4)
        assert set(adapter.starts.values()) == {1}
        assert len(allocator.held) == 4
        assert adapter.revisions == sorted(adapter.revisions), "revisions grow from one leader to the next"


async def says(autoscaler: Autoscaler, what: str) -> bool:
    return await said(autoscaler) == what
