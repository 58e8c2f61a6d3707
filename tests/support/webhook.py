"""A webhook on loopback that keeps what it is sent, and answers what a test says."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Hook:
    """What was sent: headers and bodies, in their order."""

    address: str = ""
    status: int = 200
    headers: list[Mapping[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    @property
    def events(self) -> list[Any]:
        return [json.loads(one) for one in self.bodies]

    def texts(self, event: str) -> list[str]:
        """The texts of all events of a kind, whatever was answered to them; one that was sent again counts once."""
        return list({one["id"]: one["text"] for one in self.events if one["event"] == event}.values())

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        self.bodies.append(await reader.readexactly(int(headers["content-length"])))
        self.headers.append(headers)
        place = "location: http://127.0.0.1:1/\r\n" if self.status == 302 else ""
        writer.write(
            f"HTTP/1.1 {self.status} X\r\n{place}content-length: 0\r\nconnection: close\r\n\r\n".encode()
        )
        await writer.drain()
        writer.close()


@asynccontextmanager
async def webhook(tls: ssl.SSLContext | None = None) -> AsyncGenerator[Hook]:
    """One that takes everything."""
    hook = Hook()
    server = await asyncio.start_server(hook.answer, "127.0.0.1", 0, ssl=tls)
    async with server:
        hook.address = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
        yield hook
