"""Forwards calls of all four kinds as bytes, for gateways and standbys; nothing is decoded, checked or stored.

Forwarded are request and response messages, the remaining deadline, request metadata with the caller's token, the caller
this process authenticated, the status with details and trailing metadata, and cancellations in both directions. A message
is read only after the other side has taken the previous one, so a slow reader slows the writer and nothing queues up here.
An unreachable upstream gives UNAVAILABLE, reason UPSTREAM_UNAVAILABLE, with its name.

Initial metadata is not forwarded: gpuscale has none.

A server limits the streams of a connection; further calls silently wait until one ends. So unary calls, whose number the
gateway limits, use a connection of their own, and streams as many connections as needed.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Self

import grpc
from google.protobuf.descriptor import MethodDescriptor

from gpuscale.common import VERSION, wire
from gpuscale.common.errors import ResourceExhaustedError, UnavailableError
from gpuscale.common.names import LEASE_KEY
from gpuscale.common.rpc.channel import MAX_STREAMS_PER_CONNECTION
from gpuscale.common.rpc.interceptor import Handler, forwarded_metadata, handler_of
from gpuscale.common.rpc.status import DETAILS_KEY, REQUEST_ID_KEY, VIA_KEY
from gpuscale.common.rpc.wrapped_channel import FOLLOWS, sending
from gpuscale.common.runtime.logs import call_id, get_logger
from gpuscale.common.security.auth import CALLER_KEY, FORWARDED_KEY, Context, find_principal, forwarded_as

RETRY_AFTER: Final = 1.0
"""Seconds after which callers should retry an upstream that is unreachable or has too many streams."""
PERIOD: Final = 10.0
"""Minimum seconds between two log lines about failures of an upstream."""

Metadata = tuple[tuple[str, str | bytes], ...]
# Metadata that gRPC takes as they are: for other tuples it makes a mapping, which it then makes a tuple.
_Metadata: Any = type("_Metadata", (tuple, grpc.aio.Metadata), {"__init__": object.__init__})
_log = get_logger(__name__)


class Outage:
    """Logs failures of an upstream, at most one per PERIOD, and once that it answers again. `now` is a monotonic clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next = float("-inf")
        self._not_shown = 0
        self._away = ""

    def failed(self, upstream: str, method: str, problem: str) -> None:
        """Log a failed call, with the number of those not logged since the last line."""
        now = self._now()
        if now < self._next:
            self._not_shown += 1
            return
        not_shown, self._not_shown = self._not_shown, 0
        self._next, self._away = now + PERIOD, upstream
        _log.warning(
            "upstream failed", upstream=upstream, method=method, problem=problem, not_shown=not_shown
        )

    def answered(self) -> None:
        """Note an answered call."""
        if self._away:
            _log.info("upstream answers again", upstream=self._away, not_shown=self._not_shown)
            self._away, self._not_shown = "", 0


STREAMS: Final = MAX_STREAMS_PER_CONNECTION * 9 // 10
"""Streams per connection; fewer than the server allows, which notices the end of a stream later than we do."""


class Lanes:
    """Channels for the streams of one upstream, at most `most` of them in total; closed at the end of the block."""

    def __init__(self, open_channel: Callable[[], grpc.aio.Channel], most: int | None = None) -> None:
        self._open = open_channel
        self._most = most
        self._streams: dict[grpc.aio.Channel, int] = {}

    @contextmanager
    def stream(self) -> Generator[grpc.aio.Channel]:
        """A channel for one stream, during the block. Raises ResourceExhaustedError (OVERLOADED) above the limit."""
        if self._most is not None and sum(self._streams.values()) >= self._most:
            raise ResourceExhaustedError(
                f"{self._most} streams are already forwarded", reason="OVERLOADED", retry_after=RETRY_AFTER
            )
        channel = (
            next((one for one, streams in self._streams.items() if streams < STREAMS), None) or self._open()
        )
        self._streams[channel] = self._streams.get(channel, 0) + 1
        try:
            yield channel
        finally:
            self._streams[channel] -= 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self._streams))


@dataclass(frozen=True, slots=True)
class Upstream:
    """A program that calls are forwarded to."""

    name: str  # name in errors
    channel: grpc.aio.Channel  # for unary calls; the caller closes it
    streams: Lanes  # for streams
    private: bool  # whether tokens may be sent over it
    outage: Outage = field(default_factory=Outage, kw_only=True)  # logs failures

    def caller(self, path: str) -> Metadata:  # noqa: ARG002
        """Metadata that names the caller of the current RPC, of the method at `path`."""
        return forwarded_as(find_principal())

    def failure(self, error: grpc.aio.AioRpcError | None) -> UnavailableError:  # noqa: ARG002
        """The error for a failed connection, or one closed here (None)."""
        return UnavailableError(
            f"the {self.name} does not answer",
            reason="UPSTREAM_UNAVAILABLE",
            metadata={"service": self.name},
            retry_after=RETRY_AFTER,
        )


# About the connection to this process, or set again by gRPC or below.
_OWN = (CALLER_KEY, FORWARDED_KEY, REQUEST_ID_KEY, FOLLOWS[0])
_NOT_FORWARDED = frozenset({"user-agent", "te", "content-type", "host", *_OWN})
_SECRETS = frozenset({"authorization", LEASE_KEY})
# Codes of gRPC itself when a connection cannot be made, breaks, or is closed by a stopping server (CANCELLED, though
# no caller cancelled); from a service they come with details.
_BROKEN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.CANCELLED,
    }
)


class Forwarder(grpc.GenericRpcHandler):
    """Handles all methods of services by calling their upstreams, given by full names of services."""

    def __init__(self, upstreams: Mapping[str, Upstream]) -> None:
        self._methods = {
            f"/{service}/{method.name}": _Method(method, f"/{service}/{method.name}", upstream)
            for service, upstream in upstreams.items()
            for method in wire.find_service(service).methods
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "Handler | None":
        """The handler of a method; None if unknown."""
        method = self._methods.get(handler_call_details.method)
        return None if method is None else method.handler


class _Method:
    """A method of an upstream; its handler has no serializers, so it gets and returns bytes."""

    def __init__(self, of: MethodDescriptor, path: str, upstream: Upstream) -> None:
        self._path = path
        self._upstream = upstream
        words = {False: "unary", True: "stream"}
        self._kind = f"{words[of.client_streaming]}_{words[of.server_streaming]}"
        self._sends = of.client_streaming
        self._unary: Any = upstream.channel.unary_unary(path)
        self._tells = "page_token" in of.input_type.fields_by_name  # as the guard's
        self._kept_here = _NOT_FORWARDED if upstream.private else _NOT_FORWARDED | _SECRETS
        behavior = self._responses if of.server_streaming else self._response
        if self._kind == "unary_unary":
            behavior = self._unary_response
        self.handler = handler_of(of.client_streaming, of.server_streaming, behavior, None, None)

    async def _unary_response(self, request: bytes, context: Context) -> bytes:
        """A faster `_response` for the most frequent kind."""
        try:
            call = self._begin(self._unary, request, context)
            response: bytes = await call
            await self._answered(call, context)
        except grpc.aio.AioRpcError as error:
            await self._fail(error, context)
        except asyncio.CancelledError:
            if (failure := self._closed_here()) is None:
                raise
            raise failure from None
        return response

    async def _response(self, request: Any, context: Context) -> bytes:
        async with self._call(request, context) as call:
            response: bytes = await call
        return response

    async def _responses(self, request: Any, context: Context) -> AsyncIterator[bytes]:
        async with self._call(request, context) as call:
            async for response in call:
                self._upstream.outage.answered()
                yield response

    @asynccontextmanager
    async def _call(self, request: Any, context: Context) -> AsyncGenerator[Any]:
        """The upstream call of a stream; ends with the block, and ends the incoming call with its status."""
        with self._upstream.streams.stream() as channel:
            method = getattr(channel, self._kind)(self._path)
            call = self._begin(method, None if self._sends else request, context)
            try:
                async with sending(call, request) if self._sends else nullcontext():
                    yield call
                    await self._answered(call, context)
            except grpc.aio.AioRpcError as error:
                await self._fail(error, context)
            except asyncio.CancelledError:
                if (failure := self._closed_here()) is None:
                    raise
                raise failure from None
            finally:
                call.cancel()

    def _begin(self, method: Any, request: Any, context: Context) -> Any:
        """Start a call with the caller's metadata and identity; without its token if the connection is not private."""
        passed = [
            (key, value)
            for key, value in forwarded_metadata.get()
            if key not in self._kept_here and not key.startswith("grpc-")
        ]
        metadata = _Metadata((*passed, *self._upstream.caller(self._path), (REQUEST_ID_KEY, call_id.get())))
        try:
            return method(request, timeout=context.time_remaining(), metadata=metadata)
        except grpc.aio.UsageError:
            raise self._upstream.failure(None) from None  # closed connection

    async def _answered(self, call: Any, context: Context) -> None:
        """Forward the trailing metadata of a successful call, as the core gives them: gRPC's mapping of them costs 2 % of a call."""
        self._upstream.outage.answered()
        via = ((VIA_KEY, VERSION),) if self._tells and find_principal() is not None else ()
        context.set_trailing_metadata((await call._cython_call.status()).trailing_metadata() + via)  # noqa: SLF001

    def _closed_here(self) -> UnavailableError | None:
        """The error of a call that neither its caller nor the server cancelled: its connection was closed here."""
        task = asyncio.current_task()
        return None if task is None or task.cancelling() else self._upstream.failure(None)

    async def _fail(self, error: grpc.aio.AioRpcError, context: Context) -> NoReturn:
        """End the call with the status of the upstream, or report the upstream as unavailable."""
        trailing: Metadata = tuple(error.trailing_metadata() or ())
        if any(key == DETAILS_KEY for key, _ in trailing):
            self._upstream.outage.answered()
        elif error.code() in _BROKEN:
            self._upstream.outage.failed(self._upstream.name, self._path, error.details() or "")
            raise self._upstream.failure(error) from error
        await context.abort(error.code(), error.details() or "", trailing)
