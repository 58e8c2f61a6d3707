"""Replicas of the demo: adapters whose workers take seconds to start and share the requests of their endpoint."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.internal.autoscaler import v1 as autoscaler_internal
from gpuscale.up.demo.hosts import DemoProgram, DemoSite

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
    """Requests of the endpoints, and the replicas that share them.

    Args:
        capacity: concurrent requests per replica, by endpoint.

    Attributes:
        requests: requests waiting or being served, by endpoint.
        ready: ready replicas, by endpoint.
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
        stub = autoscaler_internal.AdapterStreamServiceStub(autoscaler)
        async for response in stub.Connect(self._messages()):
            if response.HasField("log_question"):
                self._logs.append(response.log_question)
            else:
                self._revision = response.revision
                self._obey(response.replicas)
            self._changed.set()

    async def _messages(self) -> AsyncIterator[autoscaler_internal.ConnectRequest]:
        capabilities = autoscaler_api.AdapterCapabilities(logs=True)
        register = autoscaler_internal.Register(
            adapter=self._node,
            kind="demo",
            node=self._node,
            templates=sorted(self._traffic.capacity),
            capabilities=capabilities,
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
                yield autoscaler_internal.ConnectRequest(log_part=self._log(self._logs.pop(0)))
            replicas = [
                autoscaler_internal.ReplicaReport(replica=name, state=one.state, pid=one.program.pid)
                for name, one in self._replicas.items()
            ]
            report = autoscaler_internal.Report(revision=self._revision, replicas=replicas)
            yield autoscaler_internal.ConnectRequest(report=report)
            try:
                async with asyncio.timeout(1.0):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _obey(self, desired: Sequence[autoscaler_internal.DesiredReplica]) -> None:
        for line in desired:
            known = self._replicas.get(line.replica)
            if line.goal == _Goal.GOAL_RUN and known is None:
                self._start(line)
            elif line.goal == _Goal.GOAL_STOP and known and known.state not in _OVER:
                self._stop(known)
            elif line.goal == _Goal.GOAL_FORGET:
                self._replicas.pop(line.replica, None)

    def _start(self, line: autoscaler_internal.DesiredReplica) -> None:
        endpoint = line.template

        def load() -> float:
            return self._traffic.load(endpoint) if replica.state == _State.STATE_READY else 0.0

        program = DemoProgram("serve", f"{endpoint}-server", load, 0.7, line.reservation)
        replica = _DemoReplica(endpoint, program, asyncio.get_running_loop().time() + START_SECONDS)
        replica.lines.append(f"loading the model of {endpoint} on {', '.join(line.gpu_uuids)}")
        self._replicas[line.replica] = replica
        self._site.begin(list(line.gpu_uuids), program)

    def _stop(self, replica: _DemoReplica) -> None:
        if replica.state == _State.STATE_READY:
            self._traffic.ready[replica.endpoint] -= 1
        replica.state = _State.STATE_STOPPED
        self._site.end(replica.program)

    def _log(self, question: autoscaler_internal.LogQuestion) -> autoscaler_internal.LogPart:
        part = autoscaler_internal.LogPart(question=question.number)
        if (replica := self._replicas.get(question.replica)) is None:
            part.problem = "no such replica"
            return part
        content = "".join(f"{line}\n" for line in replica.lines).encode()
        part.offset = question.offset if question.HasField("offset") else 0
        part.content = content[part.offset : part.offset + question.max_bytes]
        return part
