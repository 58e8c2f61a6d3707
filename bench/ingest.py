"""Many agents streaming to one fleet on one core, beside a bare server that puts the same messages into a dict.

    python -m bench ingest                          4,000 agents
    python -m bench.ingest --agents 300 --seconds 5

Measured are `bare`, the `fleet` with its index of nodes, `all` of it with health and history (shortened until every GPU has one;
in the first release some 700 GPUs had), and `long` with the whole history of every GPU. Each agent has its own TCP connection (as far as file
descriptors allow, else several share one, which is said) and sends once a second, at a moment of its own: what changed on
eight busy GPUs, or that nothing did, or whole snapshots; `deaf` and `read` are busy with one subscriber of all nodes that reads
nothing, or all it is told once a second. The process under test has a core to itself; the agents, in this process, have
another. `lost` is what was sent and is in no index one second later. Freshness is from just before an agent writes until the
index has it. CPU is the process's own time. Memory is what the resident set grew by, a stream, from the first eighth of the
agents to all of them. The storm: all agents lose their connections, come back at the same moment, and each is in once its first
whole snapshot is acknowledged.
Target (DESIGN, section 8): 4,000 agents at 1 Hz, at most 80 % of the core and 50 KB a stream, none lost; storm < 10 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import NAMESPACE_OID, uuid5

import grpc
import uvloop

from bench._fleet_process import METHOD
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.wire import to_duration
from gpuscale.internal.monitor import v1 as monitor_internal

GPUS = 8
GIB = 1024**3
BODIES = 16
TRIES = 3
SPARE_FILES = 200
SETTLED_WITHIN = 60
KINDS = ("busy", "idle", "whole")
WATCHED = {"deaf": 0.0, "read": 1.0}
"""Rows with a subscriber: how often it reads, in seconds; 0 for never."""
WATCH = "/gpuscale.api.monitor.v1.FleetService/WatchNodes"
FIRST = 8
"""This part of the agents is there before memory is looked at."""

Request = monitor_internal.StreamTelemetryRequest


@dataclass
class Agent:
    """One agent's stream and numbers."""

    number: int
    channel: Any = None
    seq: int = 0
    sent: int = 0
    call: Any = None
    epoch: str = ""
    body: bytes = b""

    @property
    def node(self) -> str:
        return f"bench-{self.number}"


class Server:
    """The process under test."""

    def __init__(self, kind: str) -> None:
        command = [sys.executable, "-m", "bench._fleet_process", kind, str(_cores()[0])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._line()

    def counts(self) -> dict[str, float]:
        """Its counts since the last time."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[str, float] = json.loads(self._line())
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def reading(source: random.Random) -> types_api.GpuReading:
    """What moves on a busy GPU from one second to the next."""
    used = source.randrange(60 * GIB)
    return types_api.GpuReading(
        utilization_percent=source.randrange(101),
        memory_utilization_percent=source.randrange(101),
        memory_used_bytes=used,
        memory_free_bytes=79 * GIB - used,
        temperature_celsius=source.randrange(40, 80),
        power_watts=source.randrange(100, 700),
        sm_clock_mhz=source.randrange(500, 1980),
        energy_joules=source.randrange(10**9),
    )


def changes(source: random.Random) -> monitor_internal.SnapshotDelta:
    """What moves on all GPUs, as an agent sends it."""
    delta = monitor_internal.SnapshotDelta()
    readings = [reading(source) for _ in range(GPUS)]
    for one in types_api.GpuReading.DESCRIPTOR.fields:
        if not one.is_repeated and all(each.HasField(one.name) for each in readings):
            delta.numbers.fields.append(one.number)
            delta.numbers.values.extend(getattr(each, one.name) for each in readings)
    return delta


def whole(agent: Agent, source: random.Random) -> types_api.Snapshot:
    """A whole snapshot, with every reading that a data centre GPU has."""
    snapshot = types_api.Snapshot(
        node=agent.node, epoch=agent.epoch, period=to_duration(1.0), age=to_duration(0.001)
    )
    snapshot.host.hostname = agent.node
    snapshot.host_reading.cpu_percent = 12.5
    for index in range(GPUS):
        gpu = snapshot.gpus.add(
            uuid=f"GPU-{uuid5(NAMESPACE_OID, f'{agent.node} {index}')}",
            index=index, model="NVIDIA H100 80GB HBM3", pci_bus_id=f"00000000:{index:02X}:00.0", state=1,
        )  # fmt: skip
        for one in types_api.GpuReading.DESCRIPTOR.fields:
            if one.message_type is None and not one.is_repeated:
                setattr(gpu.reading, one.name, 0)
        gpu.reading.memory_total_bytes = 80 * GIB
        gpu.reading.recovery_action = types_api.RecoveryAction.RECOVERY_ACTION_NONE
        gpu.reading.MergeFrom(reading(source))
        gpu.reading.age.nanos = 5_000_000
    return snapshot


class Load:
    """Agents that stream to one server."""

    def __init__(self, address: str, count: int) -> None:
        self.connections = min(count, _files() - SPARE_FILES)
        self._address = address
        self.failed = 0
        self._channels: list[grpc.aio.Channel] = []
        self.agents = [Agent(number) for number in range(count)]
        self._open()
        source = random.Random(1)
        # Encoded messages can be joined: only what differs between messages is encoded for each.
        self._bodies = [Request(delta=changes(source)).SerializeToString() for _ in range(BODIES)]

    def _open(self) -> None:
        self._channels = [open_channel(self._address) for _ in range(self.connections)]
        for agent in self.agents:
            agent.channel = self._channels[agent.number % self.connections]

    async def storm(self) -> list[float]:
        """Lose all connections, and come back at once; as `connect`."""
        await self.close()
        self._open()
        return await self.connect(self.agents)

    async def connect(self, agents: Sequence[Agent]) -> list[float]:
        """Open the streams of agents at once, and again where one fails; the seconds until each was in."""
        started = time.perf_counter()

        async def one(agent: Agent) -> float | None:
            agent.epoch = str(uuid5(NAMESPACE_OID, agent.node))
            agent.seq += 1
            agent.call = agent.channel.stream_stream(
                METHOD, response_deserializer=monitor_internal.StreamTelemetryResponse.FromString
            )()
            hello = monitor_internal.Hello(node=agent.node, epoch=agent.epoch, agent_version="bench")
            try:
                await agent.call.write(Request(hello=hello).SerializeToString())
                await agent.call.read()
                await agent.call.write(self._whole(agent))
                answer = await agent.call.read()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return None
            return time.perf_counter() - started if answer is not grpc.aio.EOF else None

        entered: list[float] = []
        for _ in range(TRIES):
            found = await asyncio.gather(*(one(agent) for agent in agents))
            entered += [taken for taken in found if taken is not None]
            agents = [agent for agent, taken in zip(agents, found, strict=True) if taken is None]
            self.failed += len(agents)
        return entered

    async def stream(self, kind: str, seconds: int) -> int:
        """Let each agent send once a second; how many messages were sent."""
        make: Callable[[Agent], bytes] = {"busy": self._busy, "idle": self._idle, "whole": self._whole}[kind]
        loop = asyncio.get_running_loop()
        begin = loop.time()

        async def one(agent: Agent) -> int:
            phase = agent.number / len(self.agents)
            for tick in range(seconds):
                await asyncio.sleep(begin + tick + phase - loop.time())
                agent.seq += 1
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it counts as lost
                    await agent.call.write(make(agent))
            return seconds

        return sum(await asyncio.gather(*(one(agent) for agent in self.agents)))

    async def close(self) -> None:
        for agent in self.agents:
            agent.call.cancel()
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def _whole(self, agent: Agent) -> bytes:
        if not agent.body:
            agent.body = Request(snapshot=whole(agent, random.Random(agent.number))).SerializeToString()
        number = types_api.Snapshot(seq=agent.seq)
        _stamp(number)
        return agent.body + Request(snapshot=number).SerializeToString()

    def _idle(self, agent: Agent) -> bytes:
        delta = monitor_internal.SnapshotDelta(seq=agent.seq, base_seq=agent.seq - 1)
        delta.age.nanos = 1_000_000
        _stamp(delta)
        return Request(delta=delta).SerializeToString()

    def _busy(self, agent: Agent) -> bytes:
        return self._idle(agent) + self._bodies[(agent.number + agent.seq) % BODIES]


def _stamp(message: types_api.Snapshot | monitor_internal.SnapshotDelta) -> None:
    nanos = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    message.sample_time.seconds, message.sample_time.nanos = divmod(nanos, 1_000_000_000)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _files() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@contextmanager
def _serving(kind: str) -> Generator[Server]:
    server = Server(kind)
    try:
        yield server
    finally:
        server.close()


@asynccontextmanager
async def _watched(address: str, every: float) -> AsyncGenerator[None, None]:
    """One subscriber of all nodes, that reads so often; 0 for never."""
    request = monitor_api.WatchNodesRequest(min_interval=to_duration(every)).SerializeToString()
    async with open_channel(address) as channel:
        method: Any = channel.unary_stream(WATCH)
        call = method(request)
        await call.read()

        async def read() -> None:
            while await call.read() is not grpc.aio.EOF:
                pass

        reading = asyncio.create_task(read()) if every else None
        yield
        call.cancel()
        if reading is not None:
            reading.cancel()
            await asyncio.wait((reading,))


async def _row(server: Server, load: Load, seconds: int, name: str, kind: str, first: int) -> float:
    """Print a line for one kind of message; its CPU microseconds a message."""
    agents = len(load.agents)
    for _ in range(SETTLED_WITHIN):  # what a row before left unread would count, and cost, in this one
        await asyncio.sleep(1.0)
        if not server.counts()["taken"]:
            break
    sent = await load.stream("busy" if kind in WATCHED else kind, seconds)
    found = server.counts()
    await asyncio.sleep(1.0)
    late = server.counts()
    taken = found["taken"] + late["taken"]
    cost = found["cpu"] / max(1.0, found["taken"]) * 1e6
    print(
        f"{name:<6}{kind:<7}{agents:>7}{taken / found['wall']:>9.0f}{sent - taken:>7.0f}"
        f"{found['cpu'] / found['wall']:>9.0%}{cost:>8.0f}"
        f"{(late['rss'] - first) / (agents - agents // FIRST) / 1024:>8.0f}"
        f"{found['p50'] * 1e3:>8.1f}{found['p99'] * 1e3:>8.1f}",
        flush=True,
    )
    return cost


async def _measure(server: Server, agents: int, seconds: int, name: str) -> dict[str, float]:
    """Print a line for each kind of message, and for the storm; CPU microseconds a message of each."""
    load = Load(server.address, agents)
    few = load.agents[: agents // FIRST]
    await load.connect(few)
    await asyncio.sleep(1.0)
    first = int(server.counts()["rss"])
    await load.connect(load.agents[len(few) :])
    costs: dict[str, float] = {}
    for kind in KINDS:
        costs[kind] = await _row(server, load, seconds, name, kind, first)
    if name == "all":
        for kind, every in WATCHED.items():
            async with _watched(server.address, every):
                costs[kind] = await _row(server, load, seconds, name, kind, first)
    load.failed = 0
    entered = await load.storm()
    shared = "" if load.connections == agents else f", {agents} streams share {load.connections} connections"
    print(
        f"{name:<6}{'storm':<7}{agents:>7}  all in after {max(entered, default=0):.1f} s, "
        f"{load.failed} had to try again, {agents - len(entered)} never came in{shared}",
        flush=True,
    )
    await load.close()
    return costs


def main(argv: Sequence[str] = ()) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="bench.ingest")
    parser.add_argument("--agents", type=int, default=4000)
    parser.add_argument("--seconds", type=int, default=10)
    options = parser.parse_args(argv)
    if len(_cores()) < 2:
        print("there is one core only: agents and fleet share it")
    cores = _cores()
    print(
        f"{'':<6}{'sends':<7}{'agents':>7}{'got/s':>9}{'lost':>7}{'of core':>9}{'us/msg':>8}"
        f"{'KB/str':>8}{'p50 ms':>8}{'p99 ms':>8}"
    )
    costs: dict[str, dict[str, float]] = {}
    for name in ("bare", "fleet", "all", "long"):
        os.sched_setaffinity(0, set(cores))
        with _serving(name) as server:
            os.sched_setaffinity(0, {cores[-1]})
            costs[name] = uvloop.run(_measure(server, options.agents, options.seconds, name))
    for name in ("fleet", "all", "long"):
        ratios = (f"{kind} {costs['bare'][kind] / costs[name][kind]:.2f}" for kind in KINDS)
        print(f"bare / {name}, CPU a message: {', '.join(ratios)}")


if __name__ == "__main__":
    main(sys.argv[1:])
