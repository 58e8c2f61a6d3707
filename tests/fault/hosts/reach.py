"""Hands on connections into the network namespace that it runs in, from listening sockets that it inherits.

python -m tests.fault.hosts.reach NUMBER=HOST:PORT ...
"""

import asyncio
import socket
import sys
from contextlib import suppress
from functools import partial


async def main(ways: list[str]) -> None:
    """Serve until killed."""
    servers: list[asyncio.Server] = []
    for way in ways:
        number, _, target = way.partition("=")
        listening = socket.socket(fileno=int(number))
        servers.append(await asyncio.start_server(partial(_hand_on, target), sock=listening))
    await asyncio.gather(*(one.serve_forever() for one in servers))


async def _hand_on(target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    host, _, port = target.rpartition(":")
    try:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
    except OSError:
        writer.close()
        return
    await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
