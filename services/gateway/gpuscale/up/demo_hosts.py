"""Hosts of the demo: the programs on their GPUs, the resulting readings, reported to the fleet like an agent's, and their workers."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from uuid import NAMESPACE_URL, uuid4, uuid5

import grpc

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.names import gpu_name
from gpuscale.common.rpc.wrapped_channel import sending
from gpuscale.common.runtime.tasks import wait_at_most
from gpuscale.common.wire import put_timestamp, to_duration
from gpuscale.internal.autoscaler import v1 as autoscaler_internal
from gpuscale.internal.monitor import v1 as monitor_internal

PERIOD = 1.0
"""Seconds between reports."""
GIB = 1 << 30
_IDLE_WATTS = 0.12
"""Power of an idle GPU, as a fraction of its limit."""
_pids = count(20_000)


@dataclass(frozen=True, slots=True)
class Build:
    """A host and its GPUs; memory of each GPU and of the host in GiB, power limit in watts."""

    node: str
    model: str
    gpus: int
    gpu_memory: int
    watts: float
    cpus: int
    memory: int
    labels: Mapping[str, str]


@dataclass(slots=True, eq=False)
class DemoProgram:
    """A program that runs on GPUs."""

    user: str  # Unix user
    name: str
    load: Callable[[], float]  # current utilization of each GPU, in percent
    memory: float  # fraction of each GPU's memory
    reservation: str = ""  # name of its reservation; empty if it runs without one
    pid: int = field(default_factory=_pids.__next__)
    begin: datetime = field(default_factory=lambda: datetime.now(UTC))


class DemoHost:
    """A host that reports to the fleet each second, unless it `hangs`: then its readings grow stale."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.hangs = False
        self.programs: dict[str, list[DemoProgram]] = {
            f"SIM-{uuid5(NAMESPACE_URL, f'gpuscale:demo/{build.node}/{index}')}": []
            for index in range(build.gpus)
        }
        self._epoch = str(uuid4())
        self._seq = 0
        self._joules = dict.fromkeys(self.programs, 0.0)
        self._quarantines: dict[str, monitor_internal.Quarantine] = {}
        self._faults: asyncio.Queue[monitor_internal.ReportedFault] = asyncio.Queue(16)

    def fail(self, uuid: str, xid: int) -> None:
        """Report a GPU error, by NVIDIA's XID."""
        fault = monitor_internal.ReportedFault(uuid=uuid, xid=xid, seq=self._seq, age=to_duration(0.0))
        self._faults.put_nowait(fault)

    async def report(self, fleet: grpc.aio.Channel) -> None:
        """Report until the connection ends."""
        call = monitor_internal.TelemetryServiceStub(fleet).StreamTelemetry()
        async with sending(call, self._messages()):
            async for answer in call:
                self._quarantines = {one.uuid: one for one in answer.quarantines}

    async def _messages(self) -> AsyncIterator[monitor_internal.StreamTelemetryRequest]:
        hello = monitor_internal.Hello(node=self.build.node, epoch=self._epoch)
        yield monitor_internal.StreamTelemetryRequest(hello=hello)
        while True:
            if not self.hangs:
                yield monitor_internal.StreamTelemetryRequest(snapshot=self.snapshot())
            while not self._faults.empty():
                faults = monitor_internal.ReportedFaults(faults=[self._faults.get_nowait()])
                yield monitor_internal.StreamTelemetryRequest(faults=faults)
            await asyncio.sleep(PERIOD)

    def snapshot(self) -> types_api.Snapshot:
        """A snapshot of the current readings."""
        self._seq += 1
        build = self.build
        snapshot = types_api.Snapshot(
            node=build.node,
            epoch=self._epoch,
            seq=self._seq,
            period=to_duration(PERIOD),
            age=to_duration(0.0),
            simulated=True,
            host=types_api.Host(
                hostname=build.node,
                operating_system="Debian GNU/Linux 12 (bookworm)",
                driver_version="550.54.15",
                labels=build.labels,
            ),
            gpus=(self._gpu(index, uuid) for index, uuid in enumerate(self.programs)),
        )
        put_timestamp(snapshot.sample_time, datetime.now(UTC))
        busy = [gpu.reading.utilization_percent for gpu in snapshot.gpus]
        load = sum(busy) / len(busy)
        used = int(build.memory * GIB * (0.08 + 0.005 * load))
        snapshot.host_reading.MergeFrom(
            types_api.HostReading(
                cpu_percent=round(3 + 0.4 * load, 1),
                load_1m=round(build.cpus * (0.03 + 0.004 * load), 2),
                cpu_count=build.cpus,
                memory_total_bytes=build.memory * GIB,
                memory_used_bytes=used,
                memory_available_bytes=build.memory * GIB - used,
                age=to_duration(0.0),
            )
        )
        return snapshot

    def _gpu(self, index: int, uuid: str) -> types_api.Gpu:
        build, programs = self.build, self.programs[uuid]
        total = build.gpu_memory * GIB
        loads = [max(one.load(), 0.0) for one in programs]
        busy = min(100.0, round(sum(loads), 1))
        watts = round(build.watts * (_IDLE_WATTS + (0.95 - _IDLE_WATTS) * busy / 100), 1)
        self._joules[uuid] += watts * PERIOD
        used = min(total - GIB, int(sum(one.memory for one in programs) * total) + GIB // 4)
        celsius = round(30 + 0.4 * busy + 1.5 * math.sin(self._seq / 20 + index), 1)
        gpu = types_api.Gpu(
            name=gpu_name(build.node, uuid),
            uuid=uuid,
            index=index,
            model=build.model,
            simulated=True,
            pci_bus_id=f"00000000:{0x18 + 8 * index:02X}:00.0",
            state=types_api.GpuState.GPU_STATE_OK,
            reading=types_api.GpuReading(
                utilization_percent=busy,
                memory_utilization_percent=round(busy * 0.6, 1),
                memory_total_bytes=total,
                memory_reserved_bytes=GIB // 2,
                memory_used_bytes=used,
                memory_free_bytes=total - used - GIB // 2,
                temperature_celsius=celsius,
                memory_temperature_celsius=celsius + 6,
                power_watts=watts,
                power_limit_watts=build.watts,
                energy_joules=round(self._joules[uuid], 1),
                sm_clock_mhz=1980.0 if busy else 345.0,
                memory_clock_mhz=2619.0,
                sm_activity_percent=round(busy * 0.82, 1),
                tensor_activity_percent=round(busy * 0.41, 1),
                memory_bandwidth_percent=round(busy * 0.55, 1),
                pcie_link_generation=4,
                pcie_link_width=16,
                age=to_duration(0.0),
            ),
        )
        for one, load in zip(programs, loads, strict=True):
            process = gpu.reading.processes.add(
                pid=one.pid,
                memory_used_bytes=int(one.memory * total),
                user=one.user,
                program=one.name,
                utilization_percent=min(load, 100.0),
            )
            put_timestamp(process.start_time, one.begin)
            if one.reservation:
                process.reservation = one.reservation
        if quarantine := self._quarantines.get(uuid):
            gpu.quarantine = quarantine.reason
            gpu.quarantine_time.CopyFrom(quarantine.start_time)
        return gpu


class DemoSite:
    """All hosts, and the demo's time of day, which runs `speed` times faster than real time."""

    BEGIN = 9.0
    """Hour of the day at the start."""

    def __init__(self, builds: tuple[Build, ...], speed: float) -> None:
        self.hosts = {build.node: DemoHost(build) for build in builds}
        self.speed = speed
        self._start = asyncio.get_running_loop().time()

    def hours(self) -> float:
        """Hours since midnight of the first day."""
        return self.BEGIN + (asyncio.get_running_loop().time() - self._start) * self.speed / 3600

    async def sleep(self, hours: float) -> None:
        """Sleep for so many hours of the demo's day."""
        await asyncio.sleep(hours * 3600 / self.speed)

    def begin(self, uuids: list[str], program: DemoProgram) -> None:
        """Start a program on these GPUs."""
        for uuid in uuids:
            for host in self.hosts.values():
                if uuid in host.programs:
                    host.programs[uuid].append(program)

    def end(self, program: DemoProgram) -> None:
        """Stop a program everywhere."""
        for host in self.hosts.values():
            for programs in host.programs.values():
                if program in programs:
                    programs.remove(program)


START_SECONDS = 6.0
"""Seconds from the start of a replica until it is ready."""
_State = autoscaler_api.Replica.State
_Goal = autoscaler_internal.DesiredReplica
_OVER = {_State.STATE_STOPPED, _State.STATE_FAILED}


@dataclass(slots=True)
class _DemoReplica:
    endpoint: str
    program: DemoProgram
    ready_at: float
    state: _State.ValueType = _State.STATE_STARTING
    lines: list[str] = field(default_factory=list[str])


class Traffic:
    """Requests of the endpoints, waiting or being served, and the `ready` replicas that share them, by endpoint.

    `capacity` is how many requests a replica serves at once.
    """

    def __init__(self, capacity: Mapping[str, float]) -> None:
        self.capacity = capacity
        self.requests: dict[str, float] = dict.fromkeys(capacity, 0.0)
        self.ready: Counter[str] = Counter()

    def load(self, endpoint: str) -> float:
        """Utilization of each ready replica's GPU, in percent."""
        return min(
            98.0, 100 * self.requests[endpoint] / (self.capacity[endpoint] * max(self.ready[endpoint], 1))
        )


class Workers:
    """The worker adapter of a host; its templates are named after the endpoints."""

    def __init__(self, node: str, site: DemoSite, traffic: Traffic) -> None:
        self._node = node
        self._site = site
        self._traffic = traffic
        self._replicas: dict[str, _DemoReplica] = {}
        self._revision = 0
        self._changed = asyncio.Event()
        self._logs: list[autoscaler_internal.LogQuestion] = []

    async def run(self, autoscaler: grpc.aio.Channel) -> None:
        """Follow the autoscaler's desired state until the connection ends."""
        self._revision = 0
        call = autoscaler_internal.AdapterStreamServiceStub(autoscaler).Connect()
        async with sending(call, self._messages()):
            async for response in call:
                if response.HasField("log_question"):
                    self._logs.append(response.log_question)
                else:
                    self._revision = response.revision
                    for line in response.replicas:
                        known = self._replicas.get(line.replica)
                        if line.goal == _Goal.GOAL_RUN and known is None:
                            self._start(line)
                        elif line.goal == _Goal.GOAL_STOP and known and known.state not in _OVER:
                            if known.state == _State.STATE_READY:
                                self._traffic.ready[known.endpoint] -= 1
                            known.state = _State.STATE_STOPPED
                            self._site.end(known.program)
                        elif line.goal == _Goal.GOAL_FORGET:
                            self._replicas.pop(line.replica, None)
                self._changed.set()

    async def _messages(self) -> AsyncIterator[autoscaler_internal.ConnectRequest]:
        register = autoscaler_internal.Register(
            adapter=self._node,
            kind="demo",
            node=self._node,
            templates=sorted(self._traffic.capacity),
            capabilities=autoscaler_api.AdapterCapabilities(logs=True),
        )
        yield autoscaler_internal.ConnectRequest(register=register)
        while True:
            self._changed.clear()
            now = asyncio.get_running_loop().time()
            for one in self._replicas.values():
                if one.state == _State.STATE_STARTING and now >= one.ready_at:
                    one.state = _State.STATE_READY
                    self._traffic.ready[one.endpoint] += 1
                    one.lines.append("ready: listening on port 8000")
            while self._logs:
                question = self._logs.pop(0)
                part = autoscaler_internal.LogPart(question=question.number)
                if (replica := self._replicas.get(question.replica)) is None:
                    part.problem = "no such replica"
                else:
                    content = "".join(f"{line}\n" for line in replica.lines).encode()
                    part.offset = question.offset if question.HasField("offset") else 0
                    part.content = content[part.offset : part.offset + question.max_bytes]
                yield autoscaler_internal.ConnectRequest(log_part=part)
            replicas = [
                autoscaler_internal.ReplicaReport(replica=name, state=one.state, pid=one.program.pid)
                for name, one in self._replicas.items()
            ]
            report = autoscaler_internal.Report(revision=self._revision, replicas=replicas)
            yield autoscaler_internal.ConnectRequest(report=report)
            await wait_at_most(self._changed, 1.0)

    def _start(self, line: autoscaler_internal.DesiredReplica) -> None:
        endpoint = line.template

        def load() -> float:
            return self._traffic.load(endpoint) if replica.state == _State.STATE_READY else 0.0

        program = DemoProgram("serve", f"{endpoint}-server", load, 0.7, line.reservation)
        replica = _DemoReplica(endpoint, program, asyncio.get_running_loop().time() + START_SECONDS)
        replica.lines.append(f"loading the model of {endpoint} on {', '.join(line.gpu_uuids)}")
        self._replicas[line.replica] = replica
        self._site.begin(list(line.gpu_uuids), program)
