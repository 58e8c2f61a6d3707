"""What `bench.ingest` measures: a fleet, or a bare server that puts messages into a dict, in a process on one core.

    python -m bench._fleet_process bare|fleet|all|long CORE

`all` has history, as far as its memory goes, and health; `long` has memory for the history of every GPU.
It writes its address on a line, and for each line that it reads a line of JSON: counts since the line before.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import grpc
import uvloop

from gpuscale.common.rpc.server import SERVER_ARGUMENTS, Server, ServerOptions, registrations
from gpuscale.common.runtime.lifecycle import collecting_what_is_new
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.security.auth import Authenticator
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.app.fleet import MIB, SWEEP_SECONDS, Observing
from gpuscale.monitor.app.settings import FleetSettings
from gpuscale.monitor.fleet import servicer
from gpuscale.monitor.fleet.join_servicer import Joined
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.wire import Change, Picture

UNBOUNDED_MIB = 1_000_000_000
METHOD = "/gpuscale.internal.monitor.v1.TelemetryService/StreamTelemetry"


class Counts:
    """Messages that were taken in since the last look, how old they were, and what that cost."""

    def __init__(self) -> None:
        self.taken = 0
        self.ages: list[float] = []
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    def note(self, sent_seconds: int, sent_nanos: int) -> None:
        """A message was taken in: its sample_time is the time of CLOCK_BOOTTIME at which it was sent."""
        self.taken += 1
        if self.taken % 8 == 0:
            self.ages.append(time.clock_gettime(time.CLOCK_BOOTTIME) - sent_seconds - sent_nanos / 1e9)

    def take(self) -> dict[str, float]:
        """The counts, which begin anew."""
        cpu, wall, ages = time.process_time(), time.perf_counter(), sorted(self.ages)
        found = {
            "taken": self.taken,
            "cpu": cpu - self._cpu,
            "wall": wall - self._wall,
            "rss": _rss(),
            "p50": ages[len(ages) // 2] if ages else 0.0,
            "p99": ages[int(len(ages) * 0.99)] if ages else 0.0,
        }
        self.taken, self.ages, self._cpu, self._wall = 0, [], cpu, wall
        return found


def _rss() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def _fleet(counts: Counts, *, history_mib: int | None = None) -> None:
    """The fleet with its index and, with memory for history, history and health: all of `gpuscale-fleet` but /metrics."""
    clock = SystemClock()
    nodes = Nodes(clock, max_nodes=20_000)

    def observe(_: str, picture: Picture, __: float, change: Change | None) -> None:
        if change is not None:
            counts.note(change.stamp.time_seconds, change.stamp.time_nanos)
        else:
            sent = picture.snapshot.sample_time
            counts.note(sent.seconds, sent.nanos)

    if history_mib is not None:
        Observing(nodes, clock, FleetSettings().history_tiers(), history_mib * MIB)
    nodes.observers = (*nodes.observers, observe)
    server = Server(ServerOptions(), Authenticator())
    address = server.bind()
    one = servicer.FleetServicer(nodes, Joined(None), clock)
    server.add(*registrations(one))
    async with server:
        answering = asyncio.create_task(_answer(address, counts))
        while not answering.done():
            await asyncio.sleep(SWEEP_SECONDS)
            nodes.sweep()


async def _bare(counts: Counts) -> None:
    """No interceptor, no check, no answer but the welcome: each message is decoded and put into a dict."""
    index: dict[str, monitor_internal.StreamTelemetryRequest] = {}

    async def stream(
        requests: AsyncIterator[monitor_internal.StreamTelemetryRequest], _: object
    ) -> AsyncIterator[monitor_internal.StreamTelemetryResponse]:
        node = (await anext(requests)).hello.node
        yield monitor_internal.StreamTelemetryResponse()
        first = True
        async for request in requests:
            index[node] = request
            sent = (request.delta if request.HasField("delta") else request.snapshot).sample_time
            counts.note(sent.seconds, sent.nanos)
            if first:
                yield monitor_internal.StreamTelemetryResponse()
            first = False

    service, method = METHOD.strip("/").split("/")
    handler = grpc.stream_stream_rpc_method_handler(
        stream,
        monitor_internal.StreamTelemetryRequest.FromString,
        monitor_internal.StreamTelemetryResponse.SerializeToString,
    )
    server = grpc.aio.server(options=list(SERVER_ARGUMENTS))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await _answer(f"127.0.0.1:{port}", counts)


async def _answer(address: str, counts: Counts) -> None:
    print(address, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(counts.take()), flush=True)


async def _serve(kind: Callable[[Counts], Awaitable[None]]) -> None:
    await kind(Counts())


def main() -> None:
    """Serve until standard input ends."""
    kind, core = sys.argv[1], int(sys.argv[2])
    os.sched_setaffinity(0, {core})
    kinds: dict[str, Callable[[Counts], Awaitable[None]]] = {
        "bare": _bare,
        "fleet": _fleet,
        "all": partial(_fleet, history_mib=FleetSettings().history_memory_mib),
        "long": partial(_fleet, history_mib=UNBOUNDED_MIB),
    }
    with collecting_what_is_new():  # as in every program of ours
        uvloop.run(_serve(kinds[kind]))


if __name__ == "__main__":
    main()
