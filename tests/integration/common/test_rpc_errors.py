"""A refusal arrives as the same error whatever kind of call and client it meets."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import pytest

from gpuscale.common import errors
from gpuscale.common.rpc.status import rpc_errors, to_rpc_status

SENT = errors.ResourceExhaustedError(
    "all GPUs are taken", reason="NO_ROOM", metadata={"nearest": "nodes/a"}, retry_after=2.5
)


class Refuses(grpc.GenericRpcHandler):
    """Every unary method refuses; every streaming method refuses after one message."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        if handler_call_details.method.endswith("Stream"):
            return grpc.unary_stream_rpc_method_handler(self.stream)
        return grpc.unary_unary_rpc_method_handler(self.unary)

    async def unary(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await context.abort_with_status(to_rpc_status(SENT))

    async def stream(
        self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        yield b"one"
        await context.abort_with_status(to_rpc_status(SENT))


@pytest.fixture
async def address() -> AsyncGenerator[str]:
    server = grpc.aio.server(handlers=[Refuses()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


def check(error: errors.ResourceExhaustedError) -> None:
    assert (error.message, error.reason, error.retry_after) == (SENT.message, SENT.reason, 2.5)
    assert error.metadata == SENT.metadata


async def test_async_calls(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        unary: Any = channel.unary_unary("/s/Unary")
        with pytest.raises(errors.ResourceExhaustedError) as caught, rpc_errors():
            await unary(b"", timeout=10)
        check(caught.value)
        stream: Any = channel.unary_stream("/s/Stream")
        with pytest.raises(errors.ResourceExhaustedError) as caught, rpc_errors():
            assert [message async for message in stream(b"", timeout=10)]
        check(caught.value)


async def test_sync_calls(address: str) -> None:
    def call() -> None:
        with grpc.insecure_channel(address) as channel:
            unary: Any = channel.unary_unary("/s/Unary")
            with pytest.raises(errors.ResourceExhaustedError) as caught, rpc_errors():
                unary(b"", timeout=10)
            check(caught.value)
            stream: Any = channel.unary_stream("/s/Stream")
            with pytest.raises(errors.ResourceExhaustedError) as caught, rpc_errors():
                list(stream(b"", timeout=10))
            check(caught.value)

    await asyncio.to_thread(call)


async def test_nobody_there_is_unavailable() -> None:
    async with grpc.aio.insecure_channel("unix:/nonexistent/gpuscale.sock") as channel:
        unary: Any = channel.unary_unary("/s/Unary")
        with pytest.raises(errors.UnavailableError), rpc_errors():
            await unary(b"", timeout=10)
