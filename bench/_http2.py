"""A gRPC client that costs next to nothing: unary calls over one HTTP/2 connection, frames written by hand.

gRPC's own client for Python takes about as much CPU for a call as the servers measured here, so that a bench with it
measures the client too. This one takes a quarter of that. It knows just what our servers and etcd answer with: plain
text, no padding, no compression.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW = 0, 1, 4, 6, 8
_RESET = 3
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_HEAD: Final = 9
_READ: Final = 1 << 18
_PREFIX: Final = 5
_LARGEST_WINDOW: Final = (1 << 31) - 1
_FIRST_WINDOW: Final = 65_535
_INITIAL_WINDOW_SIZE: Final = 4
_POST_HTTP: Final = b"\x83\x86"
_PATH, _AUTHORITY = b"\x04", b"\x01"
"""Names of headers in the static table (RFC 7541, appendix A), for literals that are not indexed."""


class Http2Client:
    """Unary calls. What is sent in one turn of the loop leaves together. `run` must run."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = reader
        self._writer = writer
        self._stream = -1
        self._unsent: list[bytes] = []
        self._unread = b""
        self._open: dict[int, tuple[asyncio.Future[bytes], bytearray]] = {}
        self._headers: dict[tuple[str, float], bytes] = {}

    async def call(self, path: str, request: bytes, seconds: float) -> bytes:
        """The reply to a request; the server is told how long it has.

        Raises:
            ConnectionError: the call failed, or the connection did.
        """
        self._stream += 2
        reply: asyncio.Future[bytes] = self._loop.create_future()
        self._open[self._stream] = reply, bytearray()
        key = path, seconds
        if key not in self._headers:
            self._headers[key] = _headers(path, seconds)
        self._send(_frame(_HEADERS, _END_HEADERS, self._stream, self._headers[key]))
        message = b"\0" + len(request).to_bytes(4, "big") + request
        self._send(_frame(_DATA, _END_STREAM, self._stream, message))
        return await reply

    async def run(self) -> None:
        """Greet, and read until the connection ends."""
        window = _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + _LARGEST_WINDOW.to_bytes(4, "big")
        self._send(_PREFACE + _frame(_SETTINGS, 0, 0, window))
        self._send(_frame(_WINDOW, 0, 0, (_LARGEST_WINDOW - _FIRST_WINDOW).to_bytes(4, "big")))
        unread = b""
        while data := await self._reader.read(_READ):
            unread = self._take_frames(unread + data)
        for stream in tuple(self._open):
            self._end(stream)

    def _take_frames(self, data: bytes) -> bytes:
        """Take in the frames that are whole; the rest."""
        at = 0
        while len(data) - at >= _HEAD:
            end = at + _HEAD + int.from_bytes(data[at : at + 3], "big")
            if end > len(data):
                break
            stream = int.from_bytes(data[at + 5 : at + _HEAD], "big")
            self._take(data[at + 3], data[at + 4], stream, data[at + _HEAD : end])
            at = end
        return data[at:]

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == _DATA:
            self._open[stream][1].extend(body)
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._send(_frame(kind, _ACK, 0, body if kind == _PING else b""))
        if kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self._end(stream)

    def _end(self, stream: int) -> None:
        """A call has ended: well if it brought a message."""
        reply, message = self._open.pop(stream)
        if reply.done():
            return
        if message:
            reply.set_result(bytes(message[_PREFIX:]))
        else:
            reply.set_exception(ConnectionError("a call failed"))

    def _send(self, frame: bytes) -> None:
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(frame)

    def _flush(self) -> None:
        self._writer.write(b"".join(self._unsent))
        self._unsent.clear()


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[Http2Client]:
    """A connection to a server, until the end of the block."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    client = Http2Client(reader, writer)
    reading = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        reading.cancel()
        writer.close()


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def _headers(path: str, seconds: float) -> bytes:
    """The headers of a call, none of which is indexed."""
    named = {
        "te": "trailers",
        "content-type": "application/grpc",
        "grpc-timeout": f"{round(seconds * 1000)}m",
    }
    others = (b"\0" + _text(name) + _text(value) for name, value in named.items())
    return _POST_HTTP + _PATH + _text(path) + _AUTHORITY + _text("bench") + b"".join(others)


def _text(text: str) -> bytes:
    """A string literal; shorter than 127 bytes."""
    return bytes((len(text),)) + text.encode()
