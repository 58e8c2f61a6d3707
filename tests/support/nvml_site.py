"""A whole agent over the NVML double, asked by its RPCs."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.api.types.v1 import GpuState
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.wire import seconds, to_duration
from tests.support.monitor import serving_agent
from tests.support.nvml_double import NvmlDouble
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from gpuscale.api.monitor.v1.agent_service_pb2_grpc import AgentServiceAsyncStub
    from gpuscale.api.monitor.v1.driver_service_pb2_grpc import DriverServiceAsyncStub

OK, HUNG, LOST = GpuState.GPU_STATE_OK, GpuState.GPU_STATE_HUNG, GpuState.GPU_STATE_LOST
# How old a reading may be that counts as fresh, while a period is a tenth of a second.
FRESH_SECONDS = 2.0


class Site:
    """An agent, its double, and its services."""

    def __init__(self, double: NvmlDouble, channel: grpc.aio.Channel) -> None:
        self.double = double
        self.agent: AgentServiceAsyncStub = monitor_api.AgentServiceStub(channel)
        self.driver: DriverServiceAsyncStub = monitor_api.DriverServiceStub(channel)

    async def snapshot(self, max_age: float | None = None) -> types_api.Snapshot:
        """The newest snapshot; not older than `max_age` seconds, where 0 waits for the next reading."""
        age = None if max_age is None else to_duration(max_age)
        answer = await self.agent.GetSnapshot(monitor_api.GetSnapshotRequest(max_age=age), timeout=30)
        return answer.snapshot

    async def until(
        self, check: Callable[[types_api.Snapshot], bool], timeout: float = 60.0
    ) -> types_api.Snapshot:
        """The first snapshot that satisfies the check."""
        found = await eventually(
            self.snapshot, lambda snapshot: snapshot if check(snapshot) else None, timeout=timeout
        )
        assert found is not None
        return found

    async def until_all(self, state: GpuState.ValueType, count: int = 8) -> types_api.Snapshot:
        """Wait until so many GPUs all have that state."""
        return await self.until(lambda one: [gpu.state for gpu in one.gpus] == [state] * count)


@asynccontextmanager
async def site(double: NvmlDouble, **settings: object) -> AsyncGenerator[Site, None]:
    """An agent on the double, with deadlines that a test can wait for: those of a real one are 2 s and 10 s."""
    quick = {"period_seconds": 0.1, "soft_deadline_seconds": 0.4, "hard_deadline_seconds": 1.0}
    async with (
        serving_agent(source="nvml", **{**quick, **settings}) as address,
        open_channel(address) as channel,
    ):
        yield Site(double, channel)


def ages(snapshot: types_api.Snapshot) -> list[float]:
    """How old the reading of each GPU is, in seconds."""
    return [seconds(gpu.reading.age) for gpu in snapshot.gpus]
