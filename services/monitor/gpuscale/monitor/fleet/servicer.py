"""FleetService and TelemetryService on the wire: streams of agents in, nodes out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from random import SystemRandom
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gpuscale.api.monitor import v1 as api
from gpuscale.common import errors
from gpuscale.common.filters import compile_filter, listed_in_turns
from gpuscale.common.names import NODE, node_name, parse
from gpuscale.common.rpc.feed import FeedView
from gpuscale.common.rpc.status import PROBLEM_KEY
from gpuscale.common.rpc.validation import validate
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context, Role, current_principal, is_admin
from gpuscale.common.store.store import Store
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.fleet.join_servicer import Joined
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.record import AgentStream, NodeRecord, to_node
from gpuscale.monitor.model.nodes import NodeSample, NodeState

_Known = tuple[int, NodeState, NodeSample | None]
"""What a scheduler knows of a node: `Fit.number`, state and snapshot."""
_Brief = Callable[[NodeRecord, Any], tuple[Any, bytes | None]]


class Requests:
    """Reads a request stream in the task that made this; `end` interrupts it from another task.

    `read` returns one message, or anything else at the end. There is no timer and no iterator per message: thousands of streams
    bring one each second.
    """

    def __init__(self, read: Callable[[], Awaitable[object]]) -> None:
        self._read = read
        self._task = asyncio.current_task()
        self._waiting = False
        self._ended = False

    def end(self) -> None:
        """Make `next` raise AbortedError, now or on its next call."""
        if self._waiting and not self._ended and self._task is not None:
            self._task.cancel()
        self._ended = True

    async def first(self, limit: float) -> monitor_internal.StreamTelemetryRequest | None:
        """The first message; None at the end. DeadlineExceededError after `limit` seconds."""
        try:
            async with asyncio.timeout(limit):
                return await self.next()
        except TimeoutError:
            raise errors.DeadlineExceededError(f"no message within {limit:g} s", reason="NO_HELLO") from None

    async def next(self) -> monitor_internal.StreamTelemetryRequest | None:
        """The next message; None at the end. AbortedError if another stream of the node took over."""
        if self._ended:
            raise _superseded()
        self._waiting = True
        try:
            message = await self._read()
        except asyncio.CancelledError:
            if self._ended and self._task is not None and self._task.uncancel() == 0:
                raise _superseded() from None
            raise
        finally:
            self._waiting = False
        return message if isinstance(message, monitor_internal.StreamTelemetryRequest) else None


def _superseded() -> errors.AbortedError:
    return errors.AbortedError("another stream reports for this node now", reason="STREAM_SUPERSEDED")


HELLO_SECONDS = 10.0
# Acknowledging costs about as much as accepting a snapshot, so it is rare; agents wait much longer.
ACKNOWLEDGE_SECONDS = 20.0

_random = SystemRandom()


class FleetServicer(api.FleetServiceServicer, monitor_internal.TelemetryServiceServicer):
    """Receives streams and answers from the index."""

    def __init__(self, nodes: Nodes, joined: Joined, clock: Clock) -> None:
        self._nodes = nodes
        self._joined = joined
        self._clock = clock

    async def StreamTelemetry(
        self, request_iterator: AsyncIterator[monitor_internal.StreamTelemetryRequest], context: Context
    ) -> AsyncGenerator[monitor_internal.StreamTelemetryResponse, None]:
        """Receive an agent's stream; acknowledge the first snapshot, each rejection, and others now and then."""
        requests = Requests(context.read)
        first, principal = await requests.first(HELLO_SECONDS), current_principal()
        if first is None or not first.HasField("hello"):
            raise errors.FailedPreconditionError("the first message must be hello", reason="HELLO_EXPECTED")
        validate(first)
        if principal.role is Role.AGENT and principal.name != first.hello.node:
            raise errors.PermissionDeniedError(
                f"{principal.name} may only report for the node of that name", reason="NOT_YOUR_NODE"
            )
        with self._nodes.connected(first.hello, requests.end) as stream:
            del first  # free it: there are thousands of streams
            yield _acknowledgement(stream)
            due = float("-inf")
            while (request := await requests.next()) is not None:
                whole = stream.base_seq is None
                taken = self._nodes.take(stream, request)
                del request  # as the first one
                now = stream.record.received_at
                resumed = whole and stream.base_seq is not None
                if now >= due or not taken or resumed or stream.told != stream.record.quarantines:
                    due = now + ACKNOWLEDGE_SECONDS * _random.uniform(0.5, 1.0)  # not all streams at once
                    yield _acknowledgement(stream)

    async def ListNodes(self, request: api.ListNodesRequest, context: Context) -> api.ListNodesResponse:
        if text := Store.trouble("fleet", why=is_admin()):
            context.set_trailing_metadata((*context.trailing_metadata(), (PROBLEM_KEY, text)))
        now, boot_id = self._clock.now(), request.boot_id

        def beyond(last: str) -> Iterator[NodeRecord]:
            for record in self._nodes.all(last):
                if not boot_id or (record.picture is not None and record.picture.boot_id == boot_id):
                    yield record

        found, token = await listed_in_turns(
            beyond,
            request,
            api.Node,
            key=lambda record: record.node,
            encode=lambda record: to_node(record, now),
        )
        return api.ListNodesResponse(nodes=found, next_page_token=token)

    async def GetNode(self, request: api.GetNodeRequest, context: Context) -> api.GetNodeResponse:
        record = self._nodes.get(parse(NODE, request.name)["node"])
        return api.GetNodeResponse(node=to_node(record, self._clock.now()))

    async def ListProcesses(
        self, request: api.ListProcessesRequest, context: Context
    ) -> api.ListProcessesResponse:
        records, now = [*self._nodes.all()], self._clock.now()
        if request.parent:
            records = [self._nodes.get(parse(NODE, request.parent)["node"])]

        def beyond(last: str) -> Iterator[api.NodeProcess]:
            for record in records:
                past = f"{node_name(record.node)}!" < last  # which sorts after all of the node
                if past or record.snapshot is None or record.state(now) is not NodeState.ONLINE:
                    continue
                there = (
                    api.NodeProcess(
                        name=f"{gpu.name}/processes/{process.pid}",
                        gpu=gpu.name,
                        gpu_index=gpu.index,
                        process=process,
                    )
                    for gpu in record.snapshot.gpus
                    for process in gpu.reading.processes
                )
                yield from (one for one in sorted(there, key=_process_key) if _process_key(one) > last)

        found, token = await listed_in_turns(
            beyond, request, api.NodeProcess, key=_process_key, encode=lambda one: one
        )
        return api.ListProcessesResponse(processes=found, next_page_token=token)

    async def WatchNodes(self, request: api.WatchNodesRequest, context: Context) -> AsyncGenerator[Any]:
        matches = compile_filter(request.filter, api.Node) if request.filter else None
        brief: _Brief | None = self._unchanged if request.placement_only else None
        if request.read_mask.paths:
            brief = partial(self._masked, fields_of([*request.read_mask.paths]))
        async for message in self._nodes.feed.stream(request, FeedView(matches=matches, brief=brief)):
            yield message

    def _unchanged(self, record: NodeRecord, known: _Known | None) -> tuple[_Known, bytes | None]:
        """What a scheduler knows of a node now, and the message if nothing that matters to it has changed."""
        sample, last = record.sample, known
        known = record.fit.number, record.shown_state, sample
        if (
            last is None
            or sample is None
            or last[:2] != known[:2]
            or record.shown_state is not NodeState.ONLINE
        ):
            return known, None
        if last[2] is sample:
            return known, b""
        if self._clock.now() - sample.sampled_at > sample.period:
            return known, None
        return known, api.WatchNodesResponse(unchanged=[node_name(record.node)]).SerializeToString()

    def _masked(self, wanted: Fields, record: NodeRecord, known: int | None) -> tuple[int, bytes]:
        """A hash of the wanted fields of a node, and their message, empty if the reader has it."""
        node = to_node(record, self._clock.now())
        keep(node, wanted)
        told = api.WatchNodesResponse(nodes=[node]).SerializeToString(deterministic=True)
        seen = hash(told)
        return seen, b"" if seen == known else told

    async def ForgetNode(self, request: api.ForgetNodeRequest, context: Context) -> api.ForgetNodeResponse:
        """Forget a node, and free its name for another host to join."""
        node = parse(NODE, request.name)["node"]
        if self._nodes.is_known(node) or (node not in self._joined and not request.allow_missing):
            self._nodes.forget(node)
        if node in self._joined:
            self._joined.forget(node)
            await self._joined.save(node)
        return api.ForgetNodeResponse()


def _process_key(one: api.NodeProcess) -> str:
    return f"{one.gpu.partition('/gpus/')[0]} {one.gpu_index:05} {one.gpu} {one.process.pid:010}"


def _acknowledgement(stream: AgentStream) -> monitor_internal.StreamTelemetryResponse:
    stream.told = stream.record.quarantines
    return monitor_internal.StreamTelemetryResponse(
        acked_seq=stream.acked_seq,
        rejected_count=stream.rejected_count,
        rejected_reason=stream.rejected_reason,
        resync=stream.base_seq is None,
        quarantines=stream.told.values(),
    )


Fields = dict[str, "Fields"]
"""The requested fields of a message and of their messages; empty for all."""


def fields_of(paths: list[str]) -> Fields:
    """The fields of a node in a mask. InvalidArgumentError for an unknown one."""
    wanted: Fields = {"name": {}}
    for path in sorted(paths):  # a message before its fields
        at: Fields | None = wanted  # None below a message that is wanted whole
        kind: Descriptor | None = api.Node.DESCRIPTOR
        for name in path.split("."):
            if kind is None or name not in kind.fields_by_name:
                raise errors.InvalidArgumentError(f"a node has no field {path}", field="read_mask")
            kind = kind.fields_by_name[name].message_type
            if at is not None:
                at = None if at.get(name) == {} else at.setdefault(name, {})
    return wanted


def keep(message: Message, wanted: Fields) -> None:
    """Clear all other fields, and round numbers as tables do, so that messages that look the same are encoded the same."""
    for field, value in message.ListFields():
        below: Fields | None = wanted.get(field.name) if wanted else {}
        if below is None:
            message.ClearField(field.name)
        elif isinstance(value, float):
            setattr(message, field.name, round(value, 0 if value >= 10 else 2))
        elif isinstance(value, Duration):
            value.nanos = 0
        elif field.message_type is not None:
            for one in [value] if isinstance(value, Message) else value:
                if isinstance(one, Message):  # not the keys of a map
                    keep(one, below)
