"""A fleet that says what a test tells it to say."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common import names, wire
from gpuscale.common.rpc.server import SERVER_ARGUMENTS

MIB = 1024 * 1024
FOR_LONG = 3600.0
"""A period, in seconds, after which no test is still running: readings stay fresh without being sent again."""

NodeState = monitor_api.NodeState
GpuState = types_api.GpuState


def gpu_message(
    uuid: str, index: int = 0, *, state: GpuState.ValueType = GpuState.GPU_STATE_OK, **reading: Any
) -> types_api.Gpu:
    """A simulated GPU; `total` and `free` are in MiB, and `reading` has fields of GpuReading too."""
    total, free = reading.pop("total", 80_000), reading.pop("free", 80_000)
    made = types_api.GpuReading(
        utilization_percent=reading.pop("utilization", 0.0),
        memory_total_bytes=None if total is None else total * MIB,
        memory_free_bytes=None if free is None else free * MIB,
        age=wire.to_duration(reading.pop("age", 0.0)),
        **reading,
    )
    return types_api.Gpu(uuid=uuid, index=index, model="Test GPU", simulated=True, state=state, reading=made)


def node_message(
    node: str, *gpus: types_api.Gpu, count: int = 0, period: float = FOR_LONG, age: float = 0.0, **fields: Any
) -> monitor_api.Node:
    """A node with these GPUs, or with `count` equal ones named `<node>-0` and so on; it is ONLINE unless told."""
    state = fields.pop("state", NodeState.NODE_STATE_ONLINE)
    plain = [gpu_message(f"{node}-{index}", index) for index in range(count)]
    snapshot = types_api.Snapshot(
        node=node, period=wire.to_duration(period), age=wire.to_duration(age), gpus=[*gpus, *plain],
        simulated=True, **fields,
    )  # fmt: skip
    return monitor_api.Node(name=names.node_name(node), state=state, snapshot=snapshot)


def connected_node(node: str) -> monitor_api.Node:
    """A node whose agent has connected and not sent a snapshot yet."""
    return monitor_api.Node(name=names.node_name(node), state=NodeState.NODE_STATE_STALE)


class FakeFleet(monitor_api.FleetServiceServicer):
    """Streams its nodes to everybody who watches, all of them first and then each change.

    `silent` keeps it from sending anything until `speak`; `break_streams` ends every open stream with UNAVAILABLE.
    """

    def __init__(self, *nodes: monitor_api.Node, silent: bool = False) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._subscribers: set[asyncio.Queue[monitor_api.WatchNodesResponse | None]] = set()
        self._speaks = asyncio.Event()
        if not silent:
            self._speaks.set()

    @property
    def watchers(self) -> int:
        return len(self._subscribers)

    def fall_silent(self) -> None:
        """Say nothing to new watchers until `speak`."""
        self._speaks.clear()

    def speak(self) -> None:
        self._speaks.set()

    def put(self, *nodes: monitor_api.Node) -> None:
        self._nodes.update((node.name, node) for node in nodes)
        for subscriber in self._subscribers:
            subscriber.put_nowait(monitor_api.WatchNodesResponse(nodes=nodes))

    def confirm(self, *node_ids: str) -> None:
        """Say that new snapshots of nodes change nothing."""
        unchanged = [names.node_name(node) for node in node_ids]
        for subscriber in self._subscribers:
            subscriber.put_nowait(monitor_api.WatchNodesResponse(unchanged=unchanged))

    def forget(self, *node_ids: str) -> None:
        """Forget nodes, as a fleet does that restarted; watchers learn of it with their next stream."""
        for node in node_ids:
            del self._nodes[names.node_name(node)]

    def remove(self, *node_ids: str) -> None:
        """Forget nodes because somebody said that they are gone for good; watchers are told."""
        self.forget(*node_ids)
        removed = [names.node_name(node) for node in node_ids]
        for subscriber in self._subscribers:
            subscriber.put_nowait(monitor_api.WatchNodesResponse(removed=removed))

    def break_streams(self) -> None:
        for subscriber in self._subscribers:
            subscriber.put_nowait(None)

    async def WatchNodes(
        self, request: monitor_api.WatchNodesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[monitor_api.WatchNodesResponse]:
        await self._speaks.wait()
        updates: asyncio.Queue[monitor_api.WatchNodesResponse | None] = asyncio.Queue()
        self._subscribers.add(updates)
        try:
            nodes = list(self._nodes.values())
            for node in nodes[:-1]:  # one message each, as a large fleet sends its first round in parts
                yield monitor_api.WatchNodesResponse(nodes=[node])
            yield monitor_api.WatchNodesResponse(nodes=nodes[-1:], full=True)
            while (update := await updates.get()) is not None:
                yield update
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the test broke the stream")
        finally:
            self._subscribers.discard(updates)


@asynccontextmanager
async def serving(fleet: FakeFleet, address: str = "127.0.0.1:0") -> AsyncGenerator[str]:
    server = grpc.aio.server(options=list(SERVER_ARGUMENTS))
    monitor_api.add_FleetServiceServicer_to_server(fleet, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
