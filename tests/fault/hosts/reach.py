"""Hands on connections, out of a network namespace or into the one that it runs in, where a socket is inherited or a file.

    python -m tests.fault.hosts.reach FROM=TO ...

FROM is the number of an inherited listening socket, or HOST:PORT; TO is HOST:PORT, or the path of a Unix socket.
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
        source, _, target = way.partition("=")
        host, _, port = source.rpartition(":")
        listening = socket.create_server((host, int(port))) if host else socket.socket(fileno=int(port))
        servers.append(await asyncio.start_server(_handler(target), sock=listening))
    await asyncio.gather(*(one.serve_forever() for one in servers))


def _handler(
    target: str,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]:
    host, _, port = target.rpartition(":")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await (
                asyncio.open_connection(host, int(port)) if host else asyncio.open_unix_connection(target)
            )
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
