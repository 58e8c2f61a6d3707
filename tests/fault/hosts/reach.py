"""Hands on connections: from listening sockets that it inherits to addresses in the network namespace that it runs in.

python -m tests.fault.hosts.reach FD=HOST:PORT ...
"""

import asyncio
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any


async def main(ways: list[str]) -> None:
    """Serve until killed."""
    servers: list[asyncio.Server] = []
    for way in ways:
        descriptor, _, target = way.partition("=")
        listening = socket.socket(fileno=int(descriptor))
        servers.append(await asyncio.start_server(_handler(target), sock=listening))
    await asyncio.gather(*(one.serve_forever() for one in servers))


def _handler(
    target: str,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]:
    host, _, port = target.rpartition(":")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    return handle


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
