"""KEDA's calls, in its order and over both autoscalers by round_robin, with one of them a standby; and when the leader dies."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.keda import v1 as keda_api
from gpuscale.common.rpc.status import from_rpc_error
from tests.support.autoscaler_app import TIMEOUT, endpoint
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.keda import Keda, scaled_object
from tests.support.postgresql import PostgresServer
from tests.support.program import AutoscalerProcess
from tests.support.waiting import eventually

ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
pytestmark = pytest.mark.timeout(200)


async def polled(keda: Keda) -> tuple[int, bool]:
    """What KEDA learns in one poll."""
    ref = scaled_object()
    assert (await keda.spec(ref))[0] == "desired"
    active = await keda.active(ref)
    return (await keda.value(ref))[1], active


async def test_keda_is_answered_by_whichever_it_meets(tmp_path: Path, postgresql: PostgresServer) -> None:
    database = postgresql.database()
    async with (
        serving(FakeAllocator({"n": ["GPU-0"]})) as address,
        AutoscalerProcess(tmp_path / "a", address, database) as first,
        AutoscalerProcess(tmp_path / "b", address, database) as second,
    ):
        await first.start()
        async with first.called() as leader:
            await leader.create(endpoint(low=2, high=4, gpus=1))
        await second.start()
        async with second.called():  # through the first
            pass
        target = f"ipv4:{first.address},{second.address}"
        async with grpc.aio.insecure_channel(
            target, options=[("grpc.service_config", ROUND_ROBIN)]
        ) as channel:
            stub: Any = keda_api.ExternalScalerStub(channel)
            keda = Keda(stub)
            assert [await polled(keda) for _ in range(20)] == [(2, True)] * 20
            pushed = [stub.StreamIsActive(scaled_object(), timeout=60) for _ in range(2)]
            for stream in pushed:
                assert (await stream.read()).result
            await first.kill()
            for stream in pushed:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stream.read()
                assert from_rpc_error(caught.value).reason in {"LEAD_LOST", "UNAVAILABLE"}
            await eventually(lambda: polled(keda), timeout=60.0, retry_on=(grpc.RpcError,))
            again = stub.StreamIsActive(scaled_object(), timeout=TIMEOUT)
            assert (await again.read()).result
