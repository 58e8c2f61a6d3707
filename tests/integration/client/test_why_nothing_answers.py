"""What is wrong with TLS is named by its cause, to sync and async callers, and to people at the command line."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.client import ClientTls, UnavailableError, connect, connect_async
from gpuscale.common.rpc import channel
from gpuscale.common.rpc.server import ServerOptions
from gpuscale.common.security.auth import Authenticator
from tests.support.certificates import Authority
from tests.support.cli import run_cli
from tests.support.ports import silent_port
from tests.support.throwaway import serve

GET = api.GetReservationRequest(name="reservations/r")
ADMIN = "spiffe://example.org/gpuscale/admin/m"


@dataclass
class Site:
    """Two authorities, of which servers trust the first."""

    folder: Path
    ours: Authority
    other: Authority

    def foreign(self) -> ClientTls:
        theirs = self.other.client(ADMIN, "foreign")
        return ClientTls(self.ours.file, theirs.cert_file, theirs.key_file)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, Authority(tmp_path), Authority(tmp_path, "other"))


@asynccontextmanager
async def server(site: Site, kind: str) -> AsyncIterator[str]:
    """The address of a server: `plain`, `tls`, `expired`, or `mtls`, which wants client certificates."""
    authenticator = Authenticator(accept_certificates=kind == "mtls")
    tls = {
        "plain": lambda: None,
        "tls": site.ours.server,
        "expired": lambda: site.ours.expired_server(),
        "mtls": lambda: site.ours.server(client_ca=site.ours),
    }[kind]()
    async with serve(options=ServerOptions(tls=tls), authenticator=authenticator) as served:
        yield served.address


CASES = [
    ("tls", "other", "UNKNOWN_AUTHORITY", "was not issued by the authority in"),
    ("expired", "trust", "CERTIFICATE_EXPIRED", "has expired"),
    ("tls", "plain", "TLS_SERVER", "speaks TLS"),
    ("plain", "trust", "PLAINTEXT_SERVER", "does not speak TLS"),
    ("mtls", "trust", "CLIENT_CERTIFICATE", "wants a client certificate"),
    ("mtls", "expired client", "CLIENT_CERTIFICATE", "it has expired"),
    ("mtls", "foreign client", "CLIENT_CERTIFICATE", "it was not issued by"),
]


def caller(site: Site, kind: str) -> ClientTls | None:
    if kind == "plain":
        return None
    if kind == "expired client":
        return site.ours.client(ADMIN, valid=False)
    if kind == "foreign client":
        return site.foreign()
    return (site.ours if kind == "trust" else site.other).trust()


@pytest.mark.parametrize(("serving", "calling", "reason", "said"), CASES)
async def test_the_cause_is_named(site: Site, serving: str, calling: str, reason: str, said: str) -> None:
    tls = caller(site, calling)
    async with server(site, serving) as address:
        async with connect_async(address, tls=tls) as client:
            with pytest.raises(UnavailableError) as caught:
                await client.allocator.GetReservation(GET)
        assert (caught.value.reason, said in caught.value.message) == (reason, True)
        assert address in caught.value.message

        def sync() -> None:
            with connect(address, tls=tls) as client:
                client.allocator.GetReservation(GET)

        with pytest.raises(UnavailableError, match=said):
            await asyncio.to_thread(sync)


async def test_the_command_line_says_it_too(site: Site) -> None:
    async with server(site, "tls") as address:
        ran = await asyncio.to_thread(
            run_cli, "--address", address, "--ca-file", str(site.other.file), "get", "nodes"
        )
    assert (ran.code, ran.out) == (7, "")
    assert "was not issued by the authority in" in ran.err
    assert "gpuscalectl up" not in ran.err  # something answers there, so starting it would not help


class Peer:
    """What listens and is no server of ours."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                connection, _ = self._listening.accept()
                if self._kind == "http":
                    with suppress(ConnectionError):  # it was hung up meanwhile
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                if self._kind == "closes":
                    connection.close()
                self._held.append(connection)

    def close(self) -> None:
        # It ends the wait for a connection, which closing does not.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for one in (self._listening, *self._held):
            one.close()


def dead_address(kind: str, folder: Path, stack: ExitStack) -> str:
    one, other = (f"127.0.0.1:{stack.enter_context(silent_port())}" for _ in range(2))
    return {
        "nobody": one,
        "no such name": "nowhere.invalid:7070",
        "no socket": f"unix:{folder}/none.sock",
        "several": f"{one},{other}",
    }[kind]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("nobody", "connection refused"),
        ("several", "connection refused"),
        ("no such name", "no host has that name"),
        ("no socket", "there is no such socket"),
        ("silent", "it did not answer in time"),
        ("http", "what listens there speaks no gRPC"),
        ("closes", "it closes the connection at once"),
    ],
)
async def test_no_connection_is_said_in_our_words(
    tmp_path: Path, kind: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To sync and async callers alike, and with no word of gRPC's."""
    hasty = (*channel.CHANNEL_ARGUMENTS, ("grpc.min_reconnect_backoff_ms", 1000))
    monkeypatch.setattr(channel, "CHANNEL_ARGUMENTS", hasty)
    patience = "3s" if kind == "several" else "20s"

    def sync() -> None:
        with connect(address, dial_timeout="1s", timeout=patience) as client:
            client.allocator.GetReservation(GET)

    def check(error: UnavailableError) -> None:
        assert (error.message, error.reason) == (expected, "NO_ANSWER")

    with ExitStack() as stack:
        if kind in {"silent", "http", "closes"}:
            address = stack.enter_context(closing(Peer(kind))).address
        else:
            address = dead_address(kind, tmp_path, stack)
        expected = f"nothing answers at {address} ({says})"
        with pytest.raises(UnavailableError) as caught:
            await asyncio.to_thread(sync)
        check(caught.value)
        async with connect_async(address, timeout=patience) as client:
            with pytest.raises(UnavailableError) as caught:
                await client.allocator.GetReservation(GET)
            check(caught.value)
