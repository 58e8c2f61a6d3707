"""An upstream for tests of what stands in between: it does to each call what the call's first bytes say.

Served under a name of the contract, since a server answers only methods that have a role there; the one kind of call
that the contract has not, a stream up and one answer, is in a service that this module adds to it. Messages are bytes
and not messages: whoever forwards must not care.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, empty_pb2  # noqa: F401  (Empty must be known)

# The contract must be known: methods without a role are refused.
from gpuscale.api.monitor import v1 as _monitor_api  # noqa: F401
from gpuscale.api.types.v1 import options_pb2
from gpuscale.common.errors import GpuscaleError, InvalidArgumentError, UnavailableError
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.rpc.status import to_rpc_status
from gpuscale.common.security.auth import Authenticator
from gpuscale.internal.monitor import v1 as _monitor_internal  # noqa: F401

FLEET = "gpuscale.api.monitor.v1.FleetService"
UNARY = f"/{FLEET}/ListNodes"
SERVER_STREAM = f"/{FLEET}/WatchNodes"
TELEMETRY = "gpuscale.internal.monitor.v1.TelemetryService"
BOTH_STREAMS = f"/{TELEMETRY}/StreamTelemetry"
UPLOADS = "gpuscale.api.test.v1.UploadService"
CLIENT_STREAM = f"/{UPLOADS}/Upload"

ERRORS: dict[bytes, GpuscaleError] = {
    b"invalid": InvalidArgumentError("wrong on purpose", field="spec.size", metadata={"why": "test"}),
    b"stopping": UnavailableError("stopping", reason="SHUTTING_DOWN", retry_after=3.0),
}


def _add_uploads() -> None:
    """Add the service of the fourth kind to the descriptors of this process."""
    file = descriptor_pb2.FileDescriptorProto(
        name="gpuscale/api/test/v1/upload.proto",
        package="gpuscale.api.test.v1",
        dependency=["google/protobuf/empty.proto"],
    )
    method = file.service.add(name="UploadService").method.add(name="Upload", client_streaming=True)
    method.input_type = method.output_type = ".google.protobuf.Empty"
    method.options.Extensions[options_pb2.method].role = options_pb2.ROLE_VIEWER
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())


_add_uploads()


@dataclass
class RawService(grpc.GenericRpcHandler):
    """What it saw of the calls it got."""

    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    time_remaining: float | None = None
    sent: int = 0
    received: list[bytes] = field(default_factory=list[bytes])
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return {
            UNARY: grpc.unary_unary_rpc_method_handler(self.unary),
            SERVER_STREAM: grpc.unary_stream_rpc_method_handler(self.server_stream),
            CLIENT_STREAM: grpc.stream_unary_rpc_method_handler(self.client_stream),
            BOTH_STREAMS: grpc.stream_stream_rpc_method_handler(self.both_streams),
        }.get(handler_call_details.method)

    def _note(self, context: Any) -> None:
        self.metadata = dict(context.invocation_metadata())
        self.time_remaining = context.time_remaining()

    async def _hang(self) -> None:
        self.hanging.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _close(self, context: Any) -> None:
        """End the call as gRPC core does with one that arrives while its server closes the connections."""
        await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")

    async def unary(self, request: bytes, context: Any) -> bytes:
        self._note(context)
        if request in ERRORS:
            status = to_rpc_status(ERRORS[request])
            await context.abort(status.code, status.details, status.trailing_metadata)
        if request == b"hang":
            await self._hang()
        if request == b"closing":
            await self._close(context)
        context.set_trailing_metadata((("x-end", "there"),))
        return b"echo " + request

    async def server_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """`<count> <size>`: that many messages of that size; then the error, if the request ends with the name of one."""
        self._note(context)
        count, size, *error = request.split()
        for number in range(int(count)):
            self.sent = number + 1
            yield number.to_bytes(4, "big").ljust(int(size), b"x")
        if error == [b"hang"]:
            await self._hang()
        if error == [b"closing"]:
            await self._close(context)
        if error:
            status = to_rpc_status(ERRORS[error[0]])
            await context.abort(status.code, status.details, status.trailing_metadata)

    async def client_stream(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        """All messages, joined."""
        self._note(context)
        joined = b"+".join([request async for request in requests])
        context.set_trailing_metadata((("x-end", "there"),))
        return joined

    async def both_streams(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Echoes each message; `end` ends the call, the name of an error ends it with that, `mute` stops reading."""
        self._note(context)
        async for request in requests:
            if request == b"end":
                return
            if request == b"mute":
                await self._hang()
            if request in ERRORS:
                status = to_rpc_status(ERRORS[request])
                await context.abort(status.code, status.details, status.trailing_metadata)
            self.received.append(request)
            yield request


async def _main() -> None:
    """A process of its own, for tests that kill it: prints its address and serves."""
    server = Server(ServerOptions(), Authenticator())
    server.add_generic(RawService(), [FLEET, TELEMETRY])
    print(server.bind(), flush=True)
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())


async def ending(call: Any) -> grpc.aio.AioRpcError | None:
    """The error that a call, unary or stream, ends with; None where it ends well."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    return None
