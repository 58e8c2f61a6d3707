"""A whole agent over the NVML double, asked by its RPCs."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.api.types.v1 import GpuState
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.wire import seconds, to_duration
from tests.support.monitor import running_agent
from tests.support.nvml_double import NvmlDouble
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from gpuscale.api.monitor.v1.agent_service_pb2_grpc import AgentServiceAsyncStub
    from gpuscale.api.monitor.v1.driver_service_pb2_grpc import DriverServiceAsyncStub

OK, SLOW, HUNG, LOST = (
    GpuState.GPU_STATE_OK,
    GpuState.GPU_STATE_SLOW,
    GpuState.GPU_STATE_HUNG,
    GpuState.GPU_STATE_LOST,
)
# How old a reading may be that counts as fresh, while a period is a tenth of a second.
FRESH_SECONDS = 2.0


class Site:
    """An agent, its double, and its services."""

    def __init__(self, double: NvmlDouble, agent: "AgentServiceAsyncStub", channel: grpc.aio.Channel) -> None:
        self.double = double
        self.agent = agent
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

        async def satisfied() -> types_api.Snapshot | None:
            snapshot = await self.snapshot()
            return snapshot if check(snapshot) else None

        found = await eventually(satisfied, timeout=timeout)
        assert found is not None
        return found

    async def until_states(self, *states: GpuState.ValueType) -> types_api.Snapshot:
        """Wait until the GPUs have these states, in their order."""
        return await self.until(lambda one: [gpu.state for gpu in one.gpus] == list(states))

    async def until_all(self, state: GpuState.ValueType, count: int = 8) -> types_api.Snapshot:
        """Wait until so many GPUs all have that state."""
        return await self.until_states(*[state] * count)

    async def p99(self) -> float:
        """What 198 of 200 calls in a row took at most, in seconds."""
        loop = asyncio.get_running_loop()
        took: list[float] = []
        for _ in range(200):
            began = loop.time()
            await self.snapshot()
            took.append(loop.time() - began)
        return sorted(took)[197]


@asynccontextmanager
async def site(double: NvmlDouble, **settings: object) -> AsyncGenerator[Site, None]:
    """An agent on the double, with deadlines that a test can wait for: those of a real one are 2 s and 10 s."""
    channels: list[grpc.aio.Channel] = []

    def channel_to(address: str) -> grpc.aio.Channel:
        channels.append(open_channel(address))
        return channels[-1]

    quick = {"period_seconds": 0.1, "soft_deadline_seconds": 0.4, "hard_deadline_seconds": 1.0}
    async with running_agent(channel_to=channel_to, source="nvml", **{**quick, **settings}) as agent:
        yield Site(double, agent, channels[0])


def ages(snapshot: types_api.Snapshot) -> list[float]:
    """How old the reading of each GPU is, in seconds."""
    return [seconds(gpu.reading.age) for gpu in snapshot.gpus]
