"""The stream to the autoscaler: reports replicas, receives the desired state, and reconnects when it breaks."""

import asyncio
from collections import deque
from collections.abc import Callable

import grpc

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.crew import EngineCrew
from gpuscale.autoscaler.adapters.engine import Desired, ReplicaOrder
from gpuscale.autoscaler.adapters.served import ServedPage, ServedPages
from gpuscale.autoscaler.domain.replicas import MOST_AT_ONCE, Goal, LogPart, ReplicaReport
from gpuscale.autoscaler.wire.specs import Codec
from gpuscale.common import names, wire
from gpuscale.common.errors import GpuscaleError, UnavailableError
from gpuscale.common.rpc.diagnosis import Explain
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.rpc.wrapped_channel import send
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff, pause_before_retry, wait_at_most
from gpuscale.internal.autoscaler import v1 as autoscaler_internal

REPORT_PERIOD = 5.0
MAX_REASON = 1024
"""Most characters of a reason in the contract."""
_GOALS = {autoscaler_internal.DesiredReplica.Goal.Value(f"GOAL_{one.name}"): one for one in Goal}
_CODEC = Codec((), {}, {})
_Call = grpc.aio.StreamStreamCall[autoscaler_internal.ConnectRequest, autoscaler_internal.ConnectResponse]
_log = get_logger(__name__)


ReadLog = Callable[[str, int | None, int], LogPart]
"""Reads part of a replica's log: its name, the offset (None: from the end), the number of bytes. Blocks."""


class AutoscalerConnection:
    """One stream at a time, reopened whenever it ends. It reports whenever `changed` is set."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        register: autoscaler_internal.Register,
        crew: EngineCrew,
        changed: asyncio.Event,
        explain: Explain,
        served: ServedPages,
        read_log: ReadLog | None = None,
    ) -> None:
        self._stub = autoscaler_internal.AdapterStreamServiceStub(channel)
        self._register = register
        self._crew = crew
        self._changed = changed
        self._explain = explain
        self._served = served
        self._read_log = read_log
        # If the stream is blocked, the oldest answers are dropped: nobody waits for more.
        self._log_parts: deque[autoscaler_internal.LogPart] = deque(maxlen=MOST_AT_ONCE)
        self._templates: dict[str, str] = {}
        self._revision = 0
        self._silent_since: float | None = None
        self._backoff = Backoff(initial=0.5, cap=2.0)

    def silence(self) -> float:
        """Seconds since the stream to the autoscaler ended; 0 while there is one that has answered."""
        return 0.0 if self._silent_since is None else asyncio.get_running_loop().time() - self._silent_since

    async def run(self) -> None:
        """Stay connected forever."""
        self._silent_since = asyncio.get_running_loop().time()
        while True:
            # Nothing was received on it yet. The autoscaler may be a new process, which counts from the beginning.
            self._revision = 0
            self._log_parts.clear()
            call = self._stub.Connect()
            try:
                async with asyncio.TaskGroup() as group:
                    writer = group.create_task(self._write(call), name="adapter report writer")
                    error = await self._read(call, group)
                    writer.cancel()
            finally:
                call.cancel()
            if isinstance(error, UnavailableError):
                error = await asyncio.to_thread(self._explain, error)
            wait = self._backoff.after(error)
            _log.warning(
                "the stream to the autoscaler ended",
                reason=error.reason,
                error=error.message,
                retry_in=round(wait, 1),
            )
            await pause_before_retry(wait)

    async def _write(self, call: _Call) -> None:
        """Report at once, after every change, and every few seconds."""
        try:
            await send(call, autoscaler_internal.ConnectRequest(register=self._register))
            while True:
                self._changed.clear()
                while self._log_parts:
                    await send(call, autoscaler_internal.ConnectRequest(log_part=self._log_parts.popleft()))
                # Nothing while the state is unknown, so that the autoscaler considers the adapter silent.
                if (reports := self._crew.reports()) is not None:
                    replicas = [to_wire(name, report) for name, report in reports.items()]
                    for replica in replicas:
                        template = self._templates.get(replica.replica, "")
                        if template in self._register.workers:
                            replica.workers.CopyFrom(self._register.workers[template])
                    report = autoscaler_internal.Report(
                        revision=self._revision,
                        replicas=replicas,
                        served=[served_to_wire(*one) for one in self._served.taken()],
                    )
                    await send(call, autoscaler_internal.ConnectRequest(report=report))
                await wait_at_most(self._changed, REPORT_PERIOD)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader finds out why

    async def _read(self, call: _Call, group: asyncio.TaskGroup) -> GpuscaleError:
        """Handle messages until the stream ends; returns the reason."""
        try:
            with rpc_errors():
                while True:
                    # Without a timeout: the autoscaler is silent while nothing changes, and keepalive detects its death.
                    answer = await call.read()
                    if not isinstance(answer, autoscaler_internal.ConnectResponse):
                        return UnavailableError("the autoscaler ended the stream", reason="STREAM_ENDED")
                    if answer.HasField("log_question"):
                        group.create_task(self._answer(answer.log_question), name="read a log")
                        continue
                    if not answer.revision:
                        continue  # a kind of message from a later version
                    self._backoff.reset()
                    self._silent_since = None
                    if self._revision == 0:
                        _log.info("connected to the autoscaler", adapter=self._register.adapter)
                    self._templates = {
                        item.replica: item.template for item in answer.replicas if item.capability_set
                    }
                    self._crew.apply([item for item in map(to_desired, answer.replicas) if item is not None])
                    self._revision = answer.revision
                    self._changed.set()
        except GpuscaleError as error:
            return error
        finally:
            if self._silent_since is None:
                self._silent_since = asyncio.get_running_loop().time()

    async def _answer(self, question: autoscaler_internal.LogQuestion) -> None:
        part = LogPart(problem="this adapter keeps no logs")
        if self._read_log is not None:
            offset = question.offset if question.HasField("offset") else None
            part = await asyncio.to_thread(self._read_log, question.replica, offset, question.max_bytes)
        self._log_parts.append(
            autoscaler_internal.LogPart(
                question=question.number, content=part.content, offset=part.offset, problem=part.problem
            )
        )
        self._changed.set()


def to_desired(item: autoscaler_internal.DesiredReplica) -> Desired | None:
    """The desired state of one replica; None for a goal or a name unknown to this version."""
    ids = names.match(names.REPLICA, item.replica)
    if item.goal not in _GOALS or ids is None:
        _log.warning("the autoscaler sent an unknown order", replica=item.replica, goal=item.goal)
        return None
    order = ReplicaOrder(
        replica=item.replica,
        endpoint=names.endpoint_name(ids["endpoint"]),
        parameters=dict(item.parameters),
        gpu_uuids=tuple(item.gpu_uuids),
        gpu_count=item.gpu_count,
        fence=item.fence,
        reservation=item.reservation,
        lease_token=item.lease_token,
        capabilities=dict(item.capabilities),
    )
    return Desired(order, _GOALS[item.goal], item.template, wire.optional_seconds(item, "drain_timeout"))


def to_wire(name: str, report: ReplicaReport) -> autoscaler_internal.ReplicaReport:
    """The wire form of a report."""
    code = report.exit_code  # engines may report more bits than the contract has
    return autoscaler_internal.ReplicaReport(
        replica=name,
        state=api.Replica.State.Value(f"STATE_{report.state.value}"),
        pid=max(0, report.pid),
        exit_code=code if code is not None and -(2**31) <= code < 2**31 else None,
        reason=one_line(report.reason),
    )


def served_to_wire(name: str, age: float, page: ServedPage) -> autoscaler_internal.ServedReplica:
    """The wire form of what a replica's server returned `age` seconds ago."""
    found = autoscaler_internal.ServedReplica(
        replica=name, age=wire.to_duration(max(0.0, age)), problem=one_line(page.problem)
    )
    if page.reading is not None:
        _CODEC.write(page.reading, found.reading)
    return found


def one_line(text: str) -> str:
    """An engine's text in the form that the contract accepts: an invalid one would reject the whole report."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    return printable if len(printable) <= MAX_REASON else f"{printable[: MAX_REASON - 1]}…"
