"""Samples that cannot be true: each is refused alone and counted, and the stream lives."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.rpc.channel import open_channel
from tests.support.monitor import RunningFleet, running_fleet
from tests.support.monitor_values import epoch_id, gpu, hello, snapshot, telemetry

Answer = monitor_api.StreamTelemetryResponse
FIELDS = {name: one.number for name, one in types_api.GpuReading.DESCRIPTOR.fields_by_name.items()}
MANY = 10_000
NAN = float("nan")

CANNOT_BE: dict[str, dict[str, float]] = {
    "NaN": {"power_watts": NAN},
    "utilization NaN": {"utilization_percent": NAN},
    "infinite": {"power_watts": float("inf")},
    "-1": {"utilization_percent": -1},
    "minus one byte": {"memory_used_bytes": -1},
    "101 %": {"utilization_percent": 101},
    "free above total": {"memory_free_bytes": 81 * 1024**3},
    "used above total": {"memory_used_bytes": 81 * 1024**3},
}


class Agent:
    """One stream, spoken by hand."""

    def __init__(self, fleet: RunningFleet, node: str = "alpha") -> None:
        self.node = node
        self.call: Any = fleet.stub.StreamTelemetry()
        self.rejected = 0
        self.seq = 0

    async def send(self, message: monitor_api.StreamTelemetryRequest) -> Answer:
        async with asyncio.timeout(20):
            await self.call.write(message)
            found = await self.call.read()
        assert isinstance(found, Answer)
        return found

    async def begin(self) -> None:
        await self.send(telemetry(hello(self.node)))
        assert (await self.good()).acked_seq == 1

    async def lives(self) -> None:
        """The stream takes samples; what is taken is not answered each time, but after a refusal it is."""
        assert await self.bad(telemetry(snapshot(self.node, seq=0)))
        await self.good()

    async def good(self) -> Answer:
        """A sample that is taken after one that was refused, or as the first one."""
        self.seq += 1
        found = await self.send(telemetry(snapshot(self.node, seq=self.seq)))
        assert (found.acked_seq, found.rejected_count, found.resync) == (self.seq, self.rejected, False)
        return found

    async def bad(self, message: monitor_api.StreamTelemetryRequest) -> str:
        """A sample that is refused and counted; why."""
        self.rejected += 1
        found = await self.send(message)
        assert (found.acked_seq, found.rejected_count, found.resync) == (self.seq, self.rejected, True)
        return found.rejected_reason


@pytest.fixture
async def fleet() -> AsyncGenerator[RunningFleet, None]:
    async with running_fleet() as one:
        yield one


@pytest.fixture
async def agent(fleet: RunningFleet) -> AsyncGenerator[Agent, None]:
    one = Agent(fleet, "alpha")
    await one.begin()
    yield one
    one.call.cancel()


def with_reading(seq: int, fields: dict[str, float]) -> types_api.Snapshot:
    one = gpu("GPU-alpha")
    for name, value in fields.items():
        setattr(one.reading, name, value)
    return snapshot(seq=seq, gpus=(one,))


def changing(seq: int, base_seq: int, fields: dict[str, float]) -> monitor_api.StreamTelemetryRequest:
    numbers = monitor_api.GpuNumbers(fields=[FIELDS[name] for name in fields], values=list(fields.values()))
    delta = monitor_api.SnapshotDelta(seq=seq, base_seq=base_seq, numbers=numbers)
    return monitor_api.StreamTelemetryRequest(delta=delta)


@pytest.mark.parametrize("fields", CANNOT_BE.values(), ids=CANNOT_BE)
async def test_a_reading_that_cannot_be_is_refused_whole_or_as_a_change(
    fleet: RunningFleet, agent: Agent, fields: dict[str, float]
) -> None:
    before = (await fleet.node("alpha")).snapshot.gpus
    assert await agent.bad(telemetry(with_reading(agent.seq + 1, fields)))
    await agent.good()
    assert await agent.bad(changing(agent.seq + 1, agent.seq, fields))
    shown = await fleet.node("alpha")
    assert ([one.reading.power_watts for one in shown.snapshot.gpus], shown.rejected_count) == (
        [one.reading.power_watts for one in before],
        agent.rejected,
    )
    await agent.good()


async def test_a_number_that_goes_back_or_comes_again_is_refused(agent: Agent) -> None:
    await agent.lives()
    for seq in (agent.seq, 1, 0):
        assert await agent.bad(telemetry(snapshot(seq=seq)))
    await agent.good()
    assert await agent.bad(changing(agent.seq, agent.seq, {"power_watts": 1.0}))
    await agent.good()
    assert await agent.bad(changing(agent.seq + 9, agent.seq - 1, {"power_watts": 1.0}))
    await agent.good()


async def test_more_gpus_than_a_node_can_have_are_refused(fleet: RunningFleet, agent: Agent) -> None:
    many = tuple(types_api.Gpu(uuid=f"GPU-{number}") for number in range(MANY))
    assert "gpus" in await agent.bad(telemetry(snapshot(seq=agent.seq + 1, gpus=many)))
    await agent.good()
    assert len((await fleet.node("alpha")).snapshot.gpus) == 1


async def test_a_gpu_that_two_nodes_claim_stays_with_the_first_and_both_streams_live(
    fleet: RunningFleet, agent: Agent
) -> None:
    other = Agent(fleet, "beta")
    await other.begin()
    stolen = snapshot("beta", seq=2, gpus=(gpu("GPU-ALPHA"), gpu("GPU-beta")))
    assert "nodes/alpha" in await other.bad(telemetry(stolen))
    await other.good()
    await agent.lives()
    assert [one.uuid for one in (await fleet.node("alpha")).snapshot.gpus] == ["GPU-alpha"]
    assert [one.uuid for one in (await fleet.node("beta")).snapshot.gpus] == ["GPU-beta"]
    other.call.cancel()


async def test_samples_of_another_node_or_run_and_one_gpu_twice_are_refused(agent: Agent) -> None:
    twice = snapshot(seq=agent.seq + 1, gpus=(gpu("GPU-alpha"), gpu("gpu-ALPHA")))
    foreign = snapshot("gamma", seq=agent.seq + 1)
    older = snapshot(seq=agent.seq + 1, epoch=2)
    assert older.epoch == epoch_id(2)
    for one in (twice, foreign, older):
        assert await agent.bad(telemetry(one))
    await agent.good()


async def test_a_message_that_is_no_message_ends_one_stream_and_no_other(
    fleet: RunningFleet, agent: Agent
) -> None:
    """It cannot be told where the next one begins."""
    async with open_channel(fleet.address) as channel:
        raw: Any = channel.stream_stream("/gpuscale.api.monitor.v1.FleetService/StreamTelemetry")()
        await raw.write(telemetry(hello("delta")).SerializeToString())
        await raw.read()
        await raw.write(b"\xff\xff\xff")
        assert await raw.code() is grpc.StatusCode.INVALID_ARGUMENT
    await agent.lives()
