"""The HTTP server of `/metrics`: one request per connection, few at a time, limited in size and time.

h11 implements the protocol. The server runs in the program's event loop, so it needs no thread and costs nothing while
idle. Callers are authenticated as for gRPC.
"""

import asyncio
import ipaddress
import re
import ssl
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import h11

from gpuscale.common.errors import PermissionDeniedError, UnauthenticatedError
from gpuscale.common.rpc.server import ListenAddress, ServerOptions, bind_error, check_exposure, parse_listen
from gpuscale.common.runtime.metrics_text import CONTENT_TYPE
from gpuscale.common.runtime.tasks import TaskScope
from gpuscale.common.security.auth import Authenticator, Caller, KeysNeededError, Role, require
from gpuscale.common.security.tls import server_context

PATH = "/metrics"
MOST_CONNECTIONS = 8
LARGEST_REQUEST_BYTES = 16_384
REQUEST_SECONDS = 5.0
ANSWER_SECONDS = 20.0

_GZIP = re.compile(rb"(?i)(^|,)\s*gzip\s*(,|$|;(?!\s*q=0(\.0*)?\s*(,|$)))")
_PLAIN = "text/plain; charset=utf-8"

Render = Callable[[], AsyncGenerator[bytes]]
"""Makes the page of a scrape in pieces; other tasks run between two pieces."""


@dataclass(frozen=True, slots=True)
class _RefusedError(Exception):
    status: HTTPStatus
    text: str
    headers: tuple[tuple[str, str], ...] = ()


@asynccontextmanager
async def serve_metrics(
    listen: str, options: ServerOptions, authenticator: Authenticator, render: Render
) -> AsyncGenerator[str]:
    """Serve the page that `render` makes during the block, to any role; yields the address with its port, a free one for 0.

    `options.listen` is ignored: the others are TLS files, and whether plain text to other hosts is allowed.

    Raises:
        FailedPreconditionError: ADDRESS_IN_USE, BIND_FAILED, INSECURE_BIND or TLS_FILES.
        InvalidArgumentError: the address is malformed.
    """
    address = parse_listen(listen, "metrics_listen")
    check_exposure(address, tls=options.tls is not None, insecure_allow_remote=options.insecure_allow_remote)
    tls = None if options.tls is None else server_context(options.tls)
    async with TaskScope() as tasks:
        site = _Site(authenticator, render)

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                tasks.start("a scrape", site.serve(reader, writer))
            except RuntimeError:  # the scope is closing
                writer.transport.abort()

        try:
            server = await asyncio.start_server(
                accept,
                address.host,
                address.port,
                limit=LARGEST_REQUEST_BYTES,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else REQUEST_SECONDS,
            )
        except OSError as error:
            raise bind_error(address) from error
        try:
            yield str(ListenAddress(address.host, server.sockets[0].getsockname()[1]))
        finally:
            server.close()


class _Site:
    def __init__(self, authenticator: Authenticator, render: Render) -> None:
        self._authenticator = authenticator
        self._render = render
        self._open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close the connection; drop a slow client."""
        connection = h11.Connection(h11.SERVER, LARGEST_REQUEST_BYTES)
        self._open += 1
        try:
            with suppress(OSError, TimeoutError, h11.LocalProtocolError):
                await self._converse(connection, reader, writer)
        finally:
            self._open -= 1
            writer.transport.abort()

    async def _converse(
        self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        send = partial(_send, connection, writer)
        if self._open > MOST_CONNECTIONS:
            busy = _once("too many scrapes at once\n")
            await send(HTTPStatus.SERVICE_UNAVAILABLE, _PLAIN, busy, ("retry-after", "1"))
            return
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                while not isinstance(request := connection.next_event(), h11.Request):  # its body is not read
                    if request is not h11.NEED_DATA:
                        return  # the client is gone
                    connection.receive_data(await reader.read(LARGEST_REQUEST_BYTES))
            try:
                self._admit(request, writer)
            except KeysNeededError as needed:
                await needed.fetch()
                self._admit(request, writer, again=True)
        except h11.RemoteProtocolError as error:
            status = HTTPStatus(error.error_status_hint)
            await send(status, _PLAIN, _once(f"{status.phrase}\n"))
        except _RefusedError as refusal:
            await send(refusal.status, _PLAIN, _once(f"{refusal.text}\n"), *refusal.headers)
        else:
            page = _once("") if request.method == b"HEAD" else self._render()
            accepted = b",".join(value for name, value in request.headers if name == b"accept-encoding")
            if _GZIP.search(accepted):
                await send(HTTPStatus.OK, CONTENT_TYPE, _gzipped(page), ("content-encoding", "gzip"))
            else:
                await send(HTTPStatus.OK, CONTENT_TYPE, page)

    def _admit(self, request: h11.Request, writer: asyncio.StreamWriter, *, again: bool = False) -> None:
        """Authorize a request, or raise `_RefusedError`."""
        host: str = writer.get_extra_info("peername")[0]
        tls: ssl.SSLObject | None = writer.get_extra_info("ssl_object")
        names = (tls.getpeercert() or {}).get("subjectAltName", ()) if tls is not None else ()
        shown = tls.getpeercert(binary_form=True) if tls is not None else None
        caller = Caller(
            loopback=ipaddress.ip_address(host.partition("%")[0]).is_loopback,
            secure=tls is not None,
            authorization=[
                text.decode("latin-1") for key, text in request.headers if key == b"authorization"
            ],
            spiffe_id=next((str(pair[1]) for pair in names if pair[0] == "URI"), None),
            certificate=None if shown is None else ssl.DER_cert_to_PEM_cert(shown).encode(),
        )
        try:
            require(self._authenticator.recognise(caller), Role.VIEWER)
        except KeysNeededError as needed:
            if not again:
                raise
            raise _RefusedError(HTTPStatus.UNAUTHORIZED, needed.message) from needed
        except UnauthenticatedError as error:
            raise _RefusedError(
                HTTPStatus.UNAUTHORIZED, error.message, (("www-authenticate", "Bearer"),)
            ) from error
        except PermissionDeniedError as error:
            raise _RefusedError(HTTPStatus.FORBIDDEN, error.message) from error
        if request.target.partition(b"?")[0].decode("ascii") != PATH:
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"there is {PATH} and nothing else")
        if request.method not in {b"GET", b"HEAD"}:
            raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD", (("allow", "GET, HEAD"),))


async def _send(
    connection: h11.Connection,
    writer: asyncio.StreamWriter,
    status: HTTPStatus,
    content_type: str,
    body: AsyncGenerator[bytes],
    *headers: tuple[str, str],
) -> None:
    async with asyncio.timeout(ANSWER_SECONDS):
        common = [("content-type", content_type), ("connection", "close"), ("cache-control", "no-store")]
        response = h11.Response(status_code=status, headers=[*common, *headers], reason=status.phrase)
        writer.write(connection.send(response))
        async with aclosing(body):
            async for piece in body:
                writer.write(connection.send(h11.Data(piece)))
                await writer.drain()
        writer.write(connection.send(h11.EndOfMessage()))
        await writer.drain()
        writer.close()
        await writer.wait_closed()


async def _once(text: str) -> AsyncGenerator[bytes]:
    yield text.encode()


async def _gzipped(body: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    packer = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
    async with aclosing(body):
        async for piece in body:
            yield packer.compress(piece)
    yield packer.flush()
