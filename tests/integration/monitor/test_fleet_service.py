"""The fleet over real gRPC: streams as agents send them, lists, and watches."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.rpc.status import PROBLEM_KEY
from gpuscale.common.security.auth import Authenticator, Principal, Role
from gpuscale.common.store.store import Store
from gpuscale.common.wire import seconds, to_duration
from gpuscale.internal.monitor import v1 as monitor_internal
from tests.support.monitor import RunningFleet, running_fleet
from tests.support.monitor_values import epoch_id, gpu, hello, snapshot, telemetry

Call = grpc.aio.StreamStreamCall[
    monitor_internal.StreamTelemetryRequest, monitor_internal.StreamTelemetryResponse
]
ONLINE = monitor_api.NodeState.NODE_STATE_ONLINE
STALE = monitor_api.NodeState.NODE_STATE_STALE
OFFLINE = monitor_api.NodeState.NODE_STATE_OFFLINE


async def answer(call: Call) -> monitor_internal.StreamTelemetryResponse:
    async with asyncio.timeout(30):
        found = await call.read()
    assert isinstance(found, monitor_internal.StreamTelemetryResponse)
    return found


async def ended(call: Call) -> grpc.StatusCode:
    """Wait for the end of a stream; its status."""
    async with asyncio.timeout(30):
        return await call.code()


@asynccontextmanager
async def streaming(fleet: RunningFleet, node: str = "alpha", epoch: int = 1) -> AsyncGenerator[Call, None]:
    """A stream whose Hello was acknowledged."""
    call = fleet.telemetry.StreamTelemetry()
    await call.write(telemetry(hello(node, epoch=epoch)))
    first = await answer(call)
    assert (first.acked_seq, first.rejected_count, first.rejected_reason) == (-1, 0, "")
    try:
        yield call
    finally:
        call.cancel()


async def test_an_agent_that_ends_its_stream_gets_ok_and_its_node_is_offline(fleet: RunningFleet) -> None:
    async with streaming(fleet) as call:
        await call.done_writing()
        assert await ended(call) is grpc.StatusCode.OK
        await fleet.until("alpha", OFFLINE)


async def test_a_list_tells_that_nothing_can_be_written(
    fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Store.problem, "fleet", "the disk is full")
    call = fleet.stub.ListNodes(monitor_api.ListNodesRequest(), timeout=30)
    await call
    told = str(dict(await call.trailing_metadata()).get(PROBLEM_KEY))
    assert told.startswith("the fleet cannot write its state")


async def test_a_newer_run_ends_the_older_stream_at_once_with_aborted(fleet: RunningFleet) -> None:
    async with streaming(fleet, epoch=1) as old, streaming(fleet, epoch=2) as new:
        assert await ended(old) is grpc.StatusCode.ABORTED
        await new.write(telemetry(snapshot(epoch=2)))
        await answer(new)
        assert (await fleet.node("alpha")).snapshot.epoch == epoch_id(2)
        late = fleet.telemetry.StreamTelemetry()
        await late.write(telemetry(hello(epoch=1)))
        assert await ended(late) is grpc.StatusCode.ABORTED
        assert (await fleet.node("alpha")).state == ONLINE


class AsAgent(Authenticator):
    """Everybody is the agent of node alpha."""

    def identify(self, context: object, path: str, peer: str, metadata: object) -> Principal:
        return Principal("alpha", Role.AGENT, "token")


async def test_an_agent_may_report_for_the_node_of_its_name_only() -> None:
    async with running_fleet(authenticator=AsAgent()) as fleet, streaming(fleet, "alpha"):
        call = fleet.telemetry.StreamTelemetry()
        await call.write(telemetry(hello("beta")))
        assert await ended(call) is grpc.StatusCode.PERMISSION_DENIED
        listed = await fleet.stub.ListNodes(monitor_api.ListNodesRequest(), timeout=30)
        assert [node.name for node in listed.nodes] == ["nodes/alpha"]


async def test_nodes_are_filtered_and_sorted_over_their_pages(fleet: RunningFleet) -> None:
    for node in "abcd":
        async with streaming(fleet, node):
            pass
    request = monitor_api.ListNodesRequest(filter='name != "*b"', order_by="name desc", page_size=2)
    first = await fleet.stub.ListNodes(request, timeout=30)
    request.page_token = first.next_page_token
    last = await fleet.stub.ListNodes(request, timeout=30)
    shown = [one.name for one in (*first.nodes, *last.nodes)]
    assert (shown, last.next_page_token) == (["nodes/d", "nodes/c", "nodes/a"], "")


async def test_processes_of_all_nodes_are_listed_by_page_and_filter(fleet: RunningFleet) -> None:
    """Those of a node that is gone are not: nobody knows whether they still run."""
    async with streaming(fleet, "a") as one, streaming(fleet, "a-1") as other:
        for call, node, user in ((one, "a", "ann"), (other, "a-1", "bob")):
            busy = gpu(f"GPU-{node}")
            busy.reading.processes.extend(types_api.GpuProcess(pid=pid, user=user) for pid in (20, 3))
            await call.write(telemetry(snapshot(node, gpus=(busy,))))
            await answer(call)

        async def shown(**asked: Any) -> list[tuple[str, int]]:
            request = monitor_api.ListProcessesRequest(page_size=3, **asked)
            found: list[monitor_api.NodeProcess] = []
            while True:
                page = await fleet.stub.ListProcesses(request, timeout=30)
                found += page.processes
                request.page_token = page.next_page_token
                if not request.page_token:
                    return [(entry.process.user, entry.process.pid) for entry in found]

        assert await shown() == [("ann", 3), ("ann", 20), ("bob", 3), ("bob", 20)]
        assert await shown(parent="nodes/a-1") == [("bob", 3), ("bob", 20)]
        assert await shown(filter="process.pid = 20", order_by="gpu") == [("bob", 20), ("ann", 20)]
        await other.done_writing()
        await fleet.until("a-1", OFFLINE)
        assert await shown() == [("ann", 3), ("ann", 20)]


def watch(
    fleet: RunningFleet, min_interval: float = 0.0
) -> grpc.aio.UnaryStreamCall[monitor_api.WatchNodesRequest, monitor_api.WatchNodesResponse]:
    request = monitor_api.WatchNodesRequest(min_interval=to_duration(min_interval))
    return fleet.stub.WatchNodes(request, timeout=60)


async def changes(
    call: grpc.aio.UnaryStreamCall[monitor_api.WatchNodesRequest, monitor_api.WatchNodesResponse],
) -> monitor_api.WatchNodesResponse:
    async with asyncio.timeout(30):
        found = await call.read()
    assert isinstance(found, monitor_api.WatchNodesResponse)
    return found


async def test_a_watch_is_filtered_and_goes_on_where_it_was_left_off(fleet: RunningFleet) -> None:
    request = monitor_api.WatchNodesRequest(filter="state = ONLINE")
    async with streaming(fleet) as stream:
        call = fleet.stub.WatchNodes(request, timeout=60)
        assert not (await changes(call)).nodes
        await stream.write(telemetry(snapshot()))
        told = await changes(call)
        assert [one.name for one in told.nodes] == ["nodes/alpha"]
        call.cancel()
    await fleet.until("alpha", OFFLINE)
    request.resume_token = told.resume_token
    since = await changes(fleet.stub.WatchNodes(request, timeout=60))
    assert (list(since.removed), since.full, since.reset) == (["nodes/alpha"], True, False)


async def test_a_node_that_falls_silent_reaches_watchers_as_stale_by_time_alone(fleet: RunningFleet) -> None:
    async with streaming(fleet) as stream:
        call = watch(fleet)
        await changes(call)
        await stream.write(telemetry(snapshot(period=1.0)))
        seen = (await changes(call)).nodes[0]
        assert seen.state == ONLINE
        assert seen.snapshot.gpus[0].state == types_api.GpuState.GPU_STATE_OK
        seen = (await changes(call)).nodes[0]
        assert seen.state == STALE
        assert seen.snapshot.gpus[0].state == types_api.GpuState.GPU_STATE_STALE
        assert seconds(seen.snapshot.age) > 3.0
        await stream.write(telemetry(snapshot(seq=2, period=1.0)))
        assert (await changes(call)).nodes[0].state == ONLINE
    call.cancel()


async def test_min_interval_bounds_how_often_a_watcher_is_told(fleet: RunningFleet) -> None:
    async with streaming(fleet) as stream:
        loop = asyncio.get_running_loop()
        began, told, seq = loop.time(), 0, 0
        call = watch(fleet, min_interval=0.5)
        await changes(call)
        for each in range(1, 31):
            await stream.write(telemetry(snapshot(seq=each)))
        while seq < 30:
            [node] = (await changes(call)).nodes
            told, seq = told + 1, node.snapshot.seq
        assert told * 0.5 <= loop.time() - began, "a busy machine may take the 30 in pieces"
    call.cancel()
