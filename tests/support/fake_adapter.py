"""A worker adapter that starts nothing: it keeps states, does at once what it is told, and can be held back."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.rpc.channel import ClientTls, open_channel
from gpuscale.common.runtime.tasks import wait_at_most
from gpuscale.internal.autoscaler import v1 as autoscaler_internal

State = api.Replica.State
STARTING, READY, DRAINING = State.STATE_STARTING, State.STATE_READY, State.STATE_DRAINING
STOPPED, FAILED = State.STATE_STOPPED, State.STATE_FAILED
ALIVE = {STARTING, READY, DRAINING}


class FakeAdapter:
    """Its replicas outlive its connections, as processes outlive their adapter.

    Attributes:
        states: of every replica that was not forgotten, by name.
        told: the last line about each replica.
        starts: how often each replica was started.
        forgotten: replicas it was told to forget.
        revisions: that it was sent, in order.
        makes_ready: whether what starts becomes ready by itself.
        finishes: whether what drains ends by itself.
        acknowledges: whether its reports carry the revision it acts on.
        silent: while true it reports nothing.
        logs: what each replica wrote, by name.
        mute: while true it answers no question for a log.
        workers: what it reports that the workers of replicas can do, by template.
        sets: groups of each capability set that it was told last, by endpoint and set.
    """

    def __init__(self, name: str = "a", *, keeps_logs: bool = False, **fields: Any) -> None:
        fields = {"node": "n", "templates": ["worker"]} | fields
        self.register = autoscaler_internal.Register(adapter=name, kind="fake", **fields)
        if keeps_logs:
            able = api.AdapterCapabilities(picks_victims=True, drains=True, logs=True)
            self.register.capabilities.CopyFrom(able)
        self.logs: dict[str, bytes] = {}
        self.mute = False
        self.workers: dict[str, api.WorkerGroup] = {}
        self.sets: dict[tuple[str, str], autoscaler_internal.DesiredCapabilitySet] = {}
        self._parts: list[autoscaler_internal.LogPart] = []
        self.states: dict[str, State.ValueType] = {}
        self.told: dict[str, autoscaler_internal.DesiredReplica] = {}
        self.starts: Counter[str] = Counter()
        self.forgotten: set[str] = set()
        self.revisions: list[int] = []
        self.makes_ready = True
        self.finishes = True
        self.acknowledges = True
        self.silent = False
        self.code: grpc.StatusCode | None = None
        self._revision = 0
        self._changed = asyncio.Event()

    @property
    def alive(self) -> list[str]:
        return [name for name, state in self.states.items() if state in ALIVE]

    def set(self, name: str, state: State.ValueType) -> None:
        """Change a replica, as something outside would, and report it."""
        self.states[name] = state
        self._changed.set()

    def finish(self) -> None:
        """End everything that drains, now and from now on."""
        self.finishes = True
        for name, state in self.states.items():
            if state == DRAINING:
                self.states[name] = STOPPED
        self._changed.set()

    @asynccontextmanager
    async def connected(self, address: str, tls: ClientTls | None = None) -> AsyncGenerator[None]:
        """Stay connected, coming back whenever the connection ends."""
        task = asyncio.create_task(self._stay(address, tls), name=f"fake adapter {self.register.adapter}")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _stay(self, address: str, tls: ClientTls | None) -> None:
        while True:
            async with open_channel(address, tls=tls) as channel:
                try:
                    await self._connect(channel)
                except grpc.aio.AioRpcError as error:
                    self.code = error.code()
            await asyncio.sleep(0.05)

    async def _connect(self, channel: grpc.aio.Channel) -> None:
        self._revision = 0
        stream = autoscaler_internal.AdapterStreamServiceStub(channel).Connect()
        await stream.write(autoscaler_internal.ConnectRequest(register=self.register))
        reporting = asyncio.create_task(self._report(stream))
        try:
            async for response in stream:
                if response.HasField("log_question"):
                    self._answer(response.log_question)
                    continue
                self.revisions.append(response.revision)
                self._revision = response.revision
                self.sets = {(one.endpoint, one.capability_set): one for one in response.capability_sets}
                for line in response.replicas:
                    self._obey(line)
                self._changed.set()
        finally:
            reporting.cancel()
            stream.cancel()
            # Not suppressed: this task may be cancelled just now too, and must not go on then.
            await asyncio.gather(reporting, return_exceptions=True)

    async def _report(
        self,
        stream: grpc.aio.StreamStreamCall[
            autoscaler_internal.ConnectRequest, autoscaler_internal.ConnectResponse
        ],
    ) -> None:
        while True:
            self._changed.clear()
            while self._parts:
                await stream.write(autoscaler_internal.ConnectRequest(log_part=self._parts.pop(0)))
            if not self.silent:
                replicas = [
                    autoscaler_internal.ReplicaReport(
                        replica=name,
                        state=state,
                        pid=7 if state in ALIVE else 0,
                        workers=self.workers.get(self.told[name].template) if name in self.told else None,
                    )
                    for name, state in self.states.items()
                ]
                revision = self._revision if self.acknowledges else 0
                report = autoscaler_internal.Report(revision=revision, replicas=replicas)
                await stream.write(autoscaler_internal.ConnectRequest(report=report))
            await wait_at_most(self._changed, 0.5)

    def _answer(self, question: autoscaler_internal.LogQuestion) -> None:
        if self.mute:
            return
        log, most = self.logs.get(question.replica, b""), question.max_bytes
        begin = question.offset if question.HasField("offset") else max(0, len(log) - most)
        problem = "" if log else "it wrote nothing"
        part = log[begin : begin + most]
        self._parts.append(
            autoscaler_internal.LogPart(question=question.number, content=part, offset=begin, problem=problem)
        )
        self._changed.set()

    def _obey(self, line: autoscaler_internal.DesiredReplica) -> None:
        name, state = line.replica, self.states.get(line.replica)
        self.told[name] = line
        if line.goal == autoscaler_internal.DesiredReplica.GOAL_RUN and state is None:
            self.starts[name] += 1
            self.states[name] = READY if self.makes_ready else STARTING
        elif line.goal == autoscaler_internal.DesiredReplica.GOAL_STOP and state in ALIVE:
            self.states[name] = STOPPED if self.finishes else DRAINING
        elif line.goal == autoscaler_internal.DesiredReplica.GOAL_FORGET and state not in ALIVE:
            self.states.pop(name, None)
            self.forgotten.add(name)
