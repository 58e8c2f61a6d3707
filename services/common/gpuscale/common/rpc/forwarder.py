"""Forwards calls of all four kinds as bytes: nothing is decoded, checked or kept on the way.

What passes: the request and response messages, the deadline (what is left of it), metadata of the request with the
caller's token, the name and role of whom the gateway recognised, the status with its details and trailing metadata, and a cancellation in either direction. A message is
read from one side only once the other side has taken the one before, so a slow reader slows the writer and nothing piles
up here. An upstream that cannot be reached is UNAVAILABLE, reason UPSTREAM_UNAVAILABLE, with its name.

Initial metadata does not pass: gpuscale has none.
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from structlog.contextvars import get_contextvars

from gpuscale.common.errors import UnavailableError
from gpuscale.common.rpc.status import DETAILS_KEY, REQUEST_ID_KEY
from gpuscale.common.rpc.upstreams import Upstream
from gpuscale.common.security.auth import CALLER_KEY, LEASE_KEY, Context, find_principal, forwarded_as

RETRY_AFTER = 1.0
"""Seconds after which a caller should try an unreachable upstream again."""

# Of the connection to the gateway, or written anew by gRPC or here.
_NOT_FORWARDED = frozenset({"user-agent", "te", "content-type", "host", CALLER_KEY, REQUEST_ID_KEY})
_SECRETS = frozenset({"authorization", LEASE_KEY})
# Codes that gRPC itself gives when a connection cannot be made, breaks, or is closed by a server that stops (CANCELLED,
# though no caller cancelled anything); from a service they come with details.
_BROKEN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.CANCELLED,
    }
)

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_UnaryCall = grpc.aio.UnaryUnaryCall[bytes, bytes] | grpc.aio.StreamUnaryCall[bytes, bytes]
_StreamCall = grpc.aio.UnaryStreamCall[bytes, bytes] | grpc.aio.StreamStreamCall[bytes, bytes]
_Metadata = tuple[tuple[str, str | bytes], ...]


class Forwarder(grpc.GenericRpcHandler):
    """Handles every method of the services it is given by calling the same method of their upstream."""

    def __init__(self, upstreams: Mapping[str, Upstream]) -> None:
        """`upstreams`: full name of a service -> where it runs."""
        self._handlers = dict(_handlers(upstreams))

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "_Handler | None":
        """The handler of a method; None for a method that no service has."""
        return self._handlers.get(handler_call_details.method)


def _handlers(upstreams: Mapping[str, Upstream]) -> Iterable[tuple[str, _Handler]]:
    for service, upstream in upstreams.items():
        for method in descriptor_pool.Default().FindServiceByName(service).methods:
            path = f"/{service}/{method.name}"
            yield path, _handler(method, _Method(path, upstream))


def _handler(of: MethodDescriptor, method: "_Method") -> _Handler:
    """GRPC's handler for the kind of method; without serializers, so that bytes go in and out."""
    if of.client_streaming and of.server_streaming:
        return grpc.stream_stream_rpc_method_handler(method.stream_stream)
    if of.client_streaming:
        return grpc.stream_unary_rpc_method_handler(method.stream_unary)
    if of.server_streaming:
        return grpc.unary_stream_rpc_method_handler(method.unary_stream)
    return grpc.unary_unary_rpc_method_handler(method.unary_unary)


class _Method:
    """One method of an upstream."""

    def __init__(self, path: str, upstream: Upstream) -> None:
        self._path = path
        self._upstream = upstream
        self._unary_unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = upstream.channel.unary_unary(path)

    async def unary_unary(self, request: bytes, context: Context) -> bytes:
        call = self._unary_unary(request, timeout=context.time_remaining(), metadata=self._metadata(context))
        return await self._response(call, context)

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        with self._upstream.streams.stream() as channel:
            method: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(self._path)
            call = method(requests, timeout=context.time_remaining(), metadata=self._metadata(context))
            return await self._response(call, context)

    async def unary_stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        with self._upstream.streams.stream() as channel:
            method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(self._path)
            call = method(request, timeout=context.time_remaining(), metadata=self._metadata(context))
            async for response in self._responses(call, context):
                yield response

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        with self._upstream.streams.stream() as channel:
            method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(self._path)
            call = method(requests, timeout=context.time_remaining(), metadata=self._metadata(context))
            async for response in self._responses(call, context):
                yield response

    async def _response(self, call: _UnaryCall, context: Context) -> bytes:
        """The response of a unary call. Awaiting it while we are cancelled cancels it upstream."""
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            await self._fail(error, context)
        self._upstream.outage.answered()
        context.set_trailing_metadata(tuple(await call.trailing_metadata()))
        return response

    async def _responses(self, call: _StreamCall, context: Context) -> AsyncIterator[bytes]:
        """The responses of a stream; it ends upstream when it is not read to its end here."""
        try:
            async for response in call:
                self._upstream.outage.answered()
                yield response
        except grpc.aio.AioRpcError as error:
            await self._fail(error, context)
        finally:
            call.cancel()
        context.set_trailing_metadata(tuple(await call.trailing_metadata()))

    async def _fail(self, error: grpc.aio.AioRpcError, context: Context) -> NoReturn:
        """End the call as the upstream did, or say that the upstream is away."""
        trailing: _Metadata = tuple(error.trailing_metadata() or ())
        if any(key == DETAILS_KEY for key, _ in trailing):
            self._upstream.outage.answered()
        elif error.code() in _BROKEN:
            name = self._upstream.name
            self._upstream.outage.failed(name, self._path, error.details() or "")
            raise UnavailableError(
                f"the {name} does not answer",
                reason="UPSTREAM_UNAVAILABLE",
                metadata={"service": name},
                retry_after=RETRY_AFTER,
            ) from error
        await context.abort(error.code(), error.details() or "", trailing)

    def _metadata(self, context: Context) -> _Metadata:
        """What the caller sent along, and who it is. Its token stays here where others could read it on the way."""
        passed = (
            (key, value)
            for key, value in context.invocation_metadata() or ()
            if key not in _NOT_FORWARDED
            and not key.startswith("grpc-")
            and (self._upstream.private or key not in _SECRETS)
        )
        return (*passed, *forwarded_as(find_principal()), (REQUEST_ID_KEY, get_contextvars()["request_id"]))
