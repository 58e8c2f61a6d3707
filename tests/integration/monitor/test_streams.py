"""Changes over real gRPC: from agents to the fleet, to those who watch an agent, and to those who watch the fleet."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import to_duration
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.agent import servicers as agent_feed
from gpuscale.monitor.fleet import servicer
from tests.support.monitor import running_agent, running_fleet
from tests.support.monitor_values import gpu, hello, snapshot, telemetry
from tests.support.waiting import eventually

ONLINE = monitor_api.NodeState.NODE_STATE_ONLINE
OFFLINE = monitor_api.NodeState.NODE_STATE_OFFLINE
Watched = monitor_api.WatchSnapshotsResponse


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[monitor_internal.StreamTelemetryRequest]:
    """What fleets of this process receive after Hello."""
    received: list[monitor_internal.StreamTelemetryRequest] = []
    take = servicer.Nodes.take

    def noting(self: servicer.Nodes, stream: Any, request: monitor_internal.StreamTelemetryRequest) -> bool:
        received.append(request)
        return take(self, stream, request)

    monkeypatch.setattr(servicer.Nodes, "take", noting)
    return received


def kinds(requests: list[monitor_internal.StreamTelemetryRequest]) -> list[str | None]:
    return [request.WhichOneof("message") for request in requests]


async def test_an_agent_sends_the_whole_once_and_then_what_changed(
    requests: list[monitor_internal.StreamTelemetryRequest],
) -> None:
    async with running_fleet() as fleet, running_agent(fleet.address, period_seconds=0.1) as agent:
        # On a busy machine what is sent first may be from before the GPUs were looked for.
        await eventually(lambda: any(one.snapshot.gpus for one in requests))
        early = next(nth for nth, one in enumerate(requests) if one.snapshot.gpus)
        await eventually(lambda: len(requests) >= early + 6)
        node = await fleet.node("alpha")
        now = (await agent.GetSnapshot(monitor_api.GetSnapshotRequest(), timeout=30)).snapshot
    requests = requests[early:]
    assert kinds(requests) == ["snapshot", *["delta"] * (len(requests) - 1)]
    assert node.rejected_count == 0
    assert [one.uuid for one in node.snapshot.gpus] == [one.uuid for one in now.gpus]
    assert requests[-1].ByteSize() < requests[0].ByteSize()


async def test_a_fleet_that_misses_something_is_sent_the_whole_again(
    requests: list[monitor_internal.StreamTelemetryRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_fleet() as fleet, running_agent(fleet.address, period_seconds=0.1):
        await eventually(lambda: "delta" in kinds(requests))
        refuse = servicer.Nodes._take_delta
        monkeypatch.setattr(servicer.Nodes, "_take_delta", lambda *_: "it is not believed")
        before = len(requests)
        await eventually(lambda: len(requests) > before)
        monkeypatch.setattr(servicer.Nodes, "_take_delta", refuse)
        await eventually(lambda: kinds(requests).count("snapshot") >= 2)
        node = await fleet.until("alpha", ONLINE, above_seq=requests[-1].snapshot.seq)
        assert node.rejected_count >= 1


async def test_a_stream_lives_through_what_is_refused_and_says_what_it_needs() -> None:
    async with running_fleet() as fleet:
        call = fleet.telemetry.StreamTelemetry()
        await call.write(telemetry(hello()))
        assert (await answer(call)).resync
        await call.write(telemetry(snapshot(seq=1)))
        assert not (await answer(call)).resync
        table = monitor_internal.GpuNumbers(fields=[1], values=[float("nan")])
        bad = monitor_internal.SnapshotDelta(seq=2, base_seq=1, numbers=table)
        await call.write(monitor_internal.StreamTelemetryRequest(delta=bad))
        refused = await answer(call)
        assert (refused.acked_seq, refused.rejected_count, refused.resync) == (1, 1, True)
        assert "utilization_percent" in refused.rejected_reason
        assert (await fleet.node("alpha")).rejected_count == 1
        await call.write(telemetry(snapshot(seq=3)))
        accepted = await answer(call)
        assert (accepted.acked_seq, accepted.resync) == (3, False)
        call.cancel()


async def answer(call: Any) -> monitor_internal.StreamTelemetryResponse:
    async with asyncio.timeout(30):
        found = await call.read()
    assert isinstance(found, monitor_internal.StreamTelemetryResponse)
    return found


async def read(call: Any) -> Watched:
    async with asyncio.timeout(30):
        found = await call.read()
    assert isinstance(found, Watched)
    return found


async def test_min_interval_leaves_snapshots_out_which_are_not_missed() -> None:
    async with running_agent(period_seconds=0.1) as agent:
        loop = asyncio.get_running_loop()
        began = loop.time()
        request = monitor_api.WatchSnapshotsRequest(min_interval=to_duration(0.5))
        call = agent.WatchSnapshots(request, timeout=60)
        told = [await read(call) for _ in range(4)]
        assert loop.time() - began >= 3 * 0.5
        call.cancel()
    assert told[-1].snapshot.seq - told[0].snapshot.seq > 3
    assert {one.dropped_count for one in told} == {0}


async def test_subscribers_and_callers_share_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    to_snapshot = agent_feed.to_snapshot

    def noting(one: Any, now: float) -> types_api.Snapshot:
        made.append(one.seq)
        return to_snapshot(one, now)

    monkeypatch.setattr(agent_feed, "to_snapshot", noting)
    async with running_agent(period_seconds=0.1) as agent:
        calls = [agent.WatchSnapshots(monitor_api.WatchSnapshotsRequest(), timeout=60) for _ in range(6)]
        for call in calls:
            for _ in range(4):
                await read(call)
                await agent.GetSnapshot(monitor_api.GetSnapshotRequest(), timeout=60)
            call.cancel()
    assert len(made) == len(set(made))


async def refused(call: Callable[..., Awaitable[object]], name: str) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call(monitor_api.ForgetNodeRequest(name=name), timeout=30)
    return error.value.code()


async def test_a_node_is_forgotten_on_request_and_watchers_are_told() -> None:
    async with running_fleet() as fleet:
        forget = fleet.stub.ForgetNode
        assert await refused(forget, "nodes/alpha") is grpc.StatusCode.NOT_FOUND
        call = fleet.telemetry.StreamTelemetry()
        await call.write(telemetry(hello()))
        await answer(call)
        await call.write(telemetry(snapshot(gpus=(gpu("GPU-X"),))))
        await answer(call)
        assert await refused(forget, "nodes/alpha") is grpc.StatusCode.FAILED_PRECONDITION
        call.cancel()
        await fleet.until("alpha", OFFLINE)
        watch = fleet.stub.WatchNodes(monitor_api.WatchNodesRequest(), timeout=60)
        assert [node.name for node in (await watch.read()).nodes] == ["nodes/alpha"]
        await forget(monitor_api.ForgetNodeRequest(name="nodes/alpha"), timeout=30)
        told = await watch.read()
        assert (list(told.removed), list(told.nodes)) == (["nodes/alpha"], [])
        with pytest.raises(grpc.aio.AioRpcError):
            await fleet.node("alpha")
        other = fleet.telemetry.StreamTelemetry()
        await other.write(telemetry(hello("beta")))
        await answer(other)
        await other.write(telemetry(snapshot("beta", gpus=(gpu("GPU-X"),))))
        assert (await answer(other)).rejected_count == 0, "its GPUs are free to be reported"
        other.cancel()
