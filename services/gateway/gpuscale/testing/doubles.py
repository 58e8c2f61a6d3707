"""Simulated hosts and workers: nodes that report idle GPUs, and replicas without a process."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from uuid import uuid4

import grpc

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.names import gpu_name
from gpuscale.common.rpc.wrapped_channel import sending
from gpuscale.common.runtime.tasks import network_namespace, pause_before_retry, read_boot_id
from gpuscale.common.wire import to_duration
from gpuscale.internal.autoscaler import v1 as autoscaler_internal
from gpuscale.internal.monitor import v1 as monitor_internal

FOR_LONG = 3600.0
"""Seconds for which a reading is fresh; longer than any test."""
AGAIN = 0.05
"""Seconds until an adapter reconnects."""
_State = autoscaler_api.Replica.State
_Goal = autoscaler_internal.DesiredReplica
_ALIVE = {_State.STATE_STARTING, _State.STATE_READY}


class FakeHost:
    """A node that reports idle GPUs to the fleet (`uuids`, by index), and reports again when one is lost. The first one is this host."""

    def __init__(self, number: int, gpus: int, memory: int, model: str) -> None:
        self.node: str = f"node-{number}"
        self.uuids: dict[int, str] = {
            index: f"GPU-{number:08x}-0000-4000-8000-{index:012x}" for index in range(gpus)
        }
        self._this_host = number == 0
        self._memory = memory
        self._model = model
        self._epoch = str(uuid4())
        self._seq = 0
        self._changed = asyncio.Event()

    def lose(self, uuid: str) -> None:
        """Lose a GPU."""
        self.uuids = {index: own for index, own in self.uuids.items() if own != uuid}
        self._changed.set()

    async def report(self, fleet: grpc.aio.Channel) -> None:
        """Report to the fleet until cancelled."""

        async def telemetry() -> AsyncIterator[monitor_internal.StreamTelemetryRequest]:
            hello = monitor_internal.Hello(node=self.node, epoch=self._epoch)
            yield monitor_internal.StreamTelemetryRequest(hello=hello)
            while True:
                self._changed.clear()
                yield monitor_internal.StreamTelemetryRequest(snapshot=self._snapshot())
                await self._changed.wait()

        call = monitor_internal.TelemetryServiceStub(fleet).StreamTelemetry()
        async with sending(call, telemetry()):
            async for _ in call:
                pass

    def _snapshot(self) -> types_api.Snapshot:
        self._seq += 1
        snapshot = types_api.Snapshot(
            node=self.node,
            epoch=self._epoch,
            seq=self._seq,
            period=to_duration(FOR_LONG),
            age=to_duration(0.0),
            simulated=True,
            gpus=(
                types_api.Gpu(
                    name=gpu_name(self.node, uuid),
                    uuid=uuid,
                    index=index,
                    model=self._model,
                    simulated=True,
                    state=types_api.GpuState.GPU_STATE_OK,
                    reading=types_api.GpuReading(
                        memory_total_bytes=self._memory,
                        memory_used_bytes=0,
                        memory_free_bytes=self._memory,
                        utilization_percent=0.0,
                        age=to_duration(0.0),
                    ),
                )
                for index, uuid in self.uuids.items()
            ),
        )
        if self._this_host:
            with suppress(OSError):  # no Linux
                snapshot.host.boot_id = read_boot_id()
            snapshot.host.network_namespace = network_namespace()
        return snapshot


class FakeWorkers:
    """A worker adapter whose replicas are only states; at most `ready_by_default` of an endpoint are READY (None: all), or as `set_ready` says."""

    def __init__(self, node: str) -> None:
        self.ready_by_default: int | None = None
        self._node = node
        self._ready: dict[str, int] = {}
        self._templates: set[str] = set()
        self._states: dict[str, _State.ValueType] = {}
        self._revision = 0
        self._changed = asyncio.Event()
        self._call: (
            grpc.aio.StreamStreamCall[autoscaler_internal.ConnectRequest, autoscaler_internal.ConnectResponse]
            | None
        ) = None

    def set_ready(self, endpoint: str, replicas: int) -> None:
        """Make so many replicas of `endpoints/{endpoint}` READY."""
        self._ready[endpoint] = replicas
        self._settle()

    def offer(self, templates: Iterable[str]) -> None:
        """Run replicas of these templates too."""
        new = {template for template in templates if template} - self._templates
        self._templates |= new
        if new and self._call is not None:
            self._call.cancel()  # templates are announced once per connection

    async def run(self, autoscaler: grpc.aio.Channel) -> None:
        """Follow the autoscaler's desired state until cancelled."""
        stub = autoscaler_internal.AdapterStreamServiceStub(autoscaler)
        while True:
            self._call = call = stub.Connect()
            with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                async with sending(call, self._messages()):
                    async for response in call:
                        self._revision = response.revision
                        for line in response.replicas:
                            state = self._states.get(line.replica)
                            if line.goal == _Goal.GOAL_RUN:
                                self._states.setdefault(line.replica, _State.STATE_STARTING)
                            elif line.goal == _Goal.GOAL_STOP and state in _ALIVE:
                                self._states[line.replica] = _State.STATE_STOPPED
                            elif line.goal == _Goal.GOAL_FORGET:
                                self._states.pop(line.replica, None)
                        self._settle()
            await pause_before_retry(AGAIN)

    async def _messages(self) -> AsyncIterator[autoscaler_internal.ConnectRequest]:
        self._revision = 0
        register = autoscaler_internal.Register(
            adapter=self._node, kind="fake", node=self._node, templates=sorted(self._templates)
        )
        yield autoscaler_internal.ConnectRequest(register=register)
        while True:
            self._changed.clear()
            replicas = [
                autoscaler_internal.ReplicaReport(replica=name, state=state)
                for name, state in self._states.items()
            ]
            report = autoscaler_internal.Report(revision=self._revision, replicas=replicas)
            yield autoscaler_internal.ConnectRequest(report=report)
            await self._changed.wait()

    def _settle(self) -> None:
        """Make replicas READY as far as allowed, and report."""
        for name, state in self._states.items():
            endpoint = name.partition("/replicas/")[0]
            most = self._ready.get(endpoint, self.ready_by_default)
            own = [at for one, at in self._states.items() if one.startswith(f"{endpoint}/")]
            if state == _State.STATE_STARTING and (most is None or own.count(_State.STATE_READY) < most):
                self._states[name] = _State.STATE_READY
        self._changed.set()
