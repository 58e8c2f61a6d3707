"""What calls a server that is measured: gRPC's own client for Python, or one that costs next to nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc

from bench._http2 import connect

Caller = Callable[[str, bytes], Awaitable[bytes]]
"""Sends a request to a method, by its path, and waits for the reply."""
CLIENTS = ("light", "grpc")
TIMEOUT = 30.0
"""Seconds that each call is given; the server is told."""


@asynccontextmanager
async def connected(client: str, address: str) -> AsyncIterator[Caller]:
    """A connection to a server by one of CLIENTS, until the end of the block."""
    if client == "light":
        async with connect(address) as connection:
            yield lambda path, request: connection.call(path, request, TIMEOUT)
        return
    async with grpc.aio.insecure_channel(address) as channel:

        async def call(path: str, request: bytes) -> bytes:
            answer: bytes = await channel.unary_unary(path)(request, timeout=TIMEOUT)
            return answer

        yield call
