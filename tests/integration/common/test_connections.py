"""Connections that show no identity end, take no more than their share, and leave all others as they are."""

import asyncio
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import grpc
import pytest
from pydantic import SecretStr

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.config.settings import ProgramSettings
from gpuscale.common.rpc import limits
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import ServerOptions
from gpuscale.common.security.auth import Authenticator
from gpuscale.dashboard.web import tracked_connections
from tests.support.ports import free_port
from tests.support.throwaway import Fleet, Served, serve
from tests.support.tokens import authenticator, token
from tests.support.waiting import eventually

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
PING = 6
Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


LONGEST = limits.PATIENCE + limits.LOOK_PERIOD
"""Seconds, before tests hurry them."""


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two minutes in four seconds, and counts from nothing."""
    monkeypatch.setattr(limits.Connections, "cut", 0)
    monkeypatch.setattr(limits.Connections, "short", 0)
    monkeypatch.setattr(limits, "LOOK_PERIOD", 0.1)
    monkeypatch.setattr(limits, "PATIENCE", 2.0)


async def connect(address: str, first: bytes = b"") -> Opened:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(first)
    return reader, writer


async def answer_pings(opened: Opened) -> None:
    """Speak HTTP/2 as a client does that never calls, until the other side ends it."""
    reader, writer = opened
    try:
        while head := await reader.readexactly(9):
            body = await reader.readexactly(int.from_bytes(head[:3]))
            if head[3] == PING and not head[4] & 1:
                writer.write(head[:4] + b"\1" + head[5:] + body)
            if head[3] == 4 and not head[4] & 1:
                writer.write(bytes([0, 0, 0, 4, 1, 0, 0, 0, 0]))
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def ended(opened: Opened) -> None:
    with suppress(ConnectionError):
        while await opened[0].read(4096):
            pass
    opened[1].close()


@asynccontextmanager
async def guarded(folder: Path, fleet: Fleet | None = None) -> AsyncGenerator[Served]:
    async with serve(fleet=fleet or Fleet(), authenticator=authenticator(folder, alice="operator")) as served:
        yield served


async def test_who_shows_no_identity_is_cut_and_who_has_one_stays(tmp_path: Path) -> None:
    opened = asyncio.Event()

    async def nodes(request: object, context: object) -> AsyncGenerator[monitor_api.WatchNodesResponse]:
        yield monitor_api.WatchNodesResponse()
        await opened.wait()
        yield monitor_api.WatchNodesResponse(full=True)

    async with (
        guarded(tmp_path, Fleet(nodes)) as served,
        open_channel(served.address, token=SecretStr(token("alice"))) as alice,
        open_channel(served.address) as nobody,
    ):
        call = monitor_api.FleetServiceStub(alice).WatchNodes(monitor_api.WatchNodesRequest())
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError, match="token is required"):
            await Served(served.server, served.address, nobody).get()
        silent, polite = await connect(served.address), await connect(served.address, PREFACE)
        half = await connect(served.address, PREFACE[:10])
        async with asyncio.timeout(60):
            await asyncio.gather(
                ended(silent),
                answer_pings(polite),
                ended(half),
                nobody.wait_for_state_change(grpc.ChannelConnectivity.READY),
            )
        opened.set()
        assert (await call.read()).full, "the stream of who has a token goes on"


async def test_calls_without_a_token_give_no_time(tmp_path: Path) -> None:
    async with guarded(tmp_path) as served, open_channel(served.address) as nobody:
        watch = nobody.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        async with asyncio.timeout(60):
            assert await watch.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("program", ["of services", "of none"])
async def test_the_address_of_probes_keeps_nobody_either(program: str) -> None:
    """It is for anyone, in plain text: who holds connections there takes descriptors from all others."""
    where = f"127.0.0.1:{free_port()}"
    serving = serve(options=ServerOptions(health_listen=where))
    async with (
        serving if program == "of services" else ProgramSettings(health_listen=where).open_health(),
        asyncio.timeout(60),
    ):
        await asyncio.gather(ended(await connect(where)), answer_pings(await connect(where, PREFACE)))


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """A limit that a few hundred connections reach."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    yield 600
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


FLOOD = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000))
opened = [socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5) for _ in range(1200)]
print("open", flush=True)
sys.stdin.read()
"""


async def test_a_flood_takes_its_share_only(
    tmp_path: Path, few_descriptors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PATIENCE", 3600.0)  # the share alone has to do it
    async with guarded(tmp_path) as served:
        port = served.address.rpartition(":")[2]
        flood = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", FLOOD, port), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert flood.stdout is not None
            assert await asyncio.wait_for(flood.stdout.readline(), 60) == b"open\n"
            held = served.server._connections
            await eventually(lambda: held.cut >= 1200 - few_descriptors, timeout=60)
            async with (
                asyncio.timeout(60),
                open_channel(served.address, token=SecretStr(token("alice"))) as alice,
            ):
                await Served(served.server, served.address, alice).get(wait_for_ready=True)
        finally:
            flood.kill()
            await flood.wait()


def test_a_socket_with_a_path_keeps_its_callers_and_who_has_more_than_a_share_loses_the_newest(
    few_descriptors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the adapter and leases have there lasts: somebody else's connections must not end it."""
    path, held = str(tmp_path / "agent.sock"), limits.Connections()
    held.vouched["unix:"] = 1  # gRPC's name for each of them
    share = int(few_descriptors * limits.SHARE)
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(path)
        server.listen()
        ours: list[socket.socket] = []
        for now, number, uid in ((0.0, 2, 7), (1.0, share + 3, 8), (2.0, 1, 7)):
            for _ in range(number):
                ours.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
                ours[-1].connect(path)
                stack.enter_context(server.accept()[0])
            monkeypatch.setattr(
                limits, "_CREDENTIALS", SimpleNamespace(size=12, unpack=lambda _, u=uid: (1, u, u))
            )
            held.look((), now)
        held.look((), 2.0 + 2 * limits.PATIENCE)
        kept = share - 3 + 2
        assert [one.recv(1, socket.MSG_DONTWAIT) for one in ours[kept:-1]] == [b""] * 6
        for one in (*ours[:kept], ours[-1]):
            with pytest.raises(BlockingIOError):
                one.recv(1, socket.MSG_DONTWAIT)


STRANGER = """
import socket, sys
opened = socket.socket(socket.AF_UNIX)
opened.connect(chr(0) + sys.argv[1])
print("open", flush=True)
while opened.recv(4096):
    pass
"""


async def test_who_connects_to_the_internal_socket_of_another_process_is_cut() -> None:
    """By the credentials that the kernel has of who connected: the parts of this process stay."""
    name = f"gpuscale-test-{uuid4()}"

    async def nodes(request: object, context: object) -> AsyncGenerator[monitor_api.WatchNodesResponse]:
        yield monitor_api.WatchNodesResponse()
        await cut.wait()
        yield monitor_api.WatchNodesResponse(full=True)

    cut, own = asyncio.Event(), SecretStr("own")
    async with (
        serve(
            fleet=Fleet(nodes),
            options=ServerOptions(internal_socket=name),
            authenticator=Authenticator(internal_token=own),
        ),
        open_channel(f"unix-abstract:{name}", token=own) as part,
    ):
        call = monitor_api.FleetServiceStub(part).WatchNodes(monitor_api.WatchNodesRequest())
        await call.read()
        stranger = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STRANGER, name, stdout=subprocess.PIPE
        )
        async with asyncio.timeout(60):
            await stranger.communicate()
        cut.set()
        assert (await call.read()).full


def test_who_connects_to_a_socket_with_a_path_stays(tmp_path: Path) -> None:
    """Such as an agent's: every process of the host may call there, and gRPC does not tell which of them has."""
    path = str(tmp_path / "agent.sock")
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.exit(len(s.recv(1)))"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        with subprocess.Popen([sys.executable, "-c", code, path]) as other:
            opened, _ = server.accept()
            held = limits.Connections()
            for now in (0.0, 100.0):
                held.look((1,), now)
            opened.send(b"x")
            opened.close()
        assert other.returncode == 1, "its byte arrived"


def test_a_look_needs_no_descriptor_and_notes_that_none_is_left(
    few_descriptors: int, caplog: pytest.LogCaptureFixture
) -> None:
    held, kept = limits.Connections(), []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ours = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        theirs = [server.accept() for _ in ours]
        held.vouched["ipv4:{}:{}".format(*theirs[0][1])] = 1
        with suppress(OSError):
            while True:
                kept.append(os.dup(0))
        for now in (0.0, 0.5, 2.0):
            held.look((port,), now)
        for one in kept:
            os.close(one)
        held.look((port,), 3.0)
        assert [one.recv(1, socket.MSG_DONTWAIT) for one in ours[1:]] == [b"", b""]
        with pytest.raises(BlockingIOError):
            ours[0].recv(1, socket.MSG_DONTWAIT)
        for opened in (*ours, *(one for one, _ in theirs)):
            opened.close()
    assert (held.short, caplog.text.count("no file descriptor is left")) == (3, 1)


async def test_half_a_request_to_the_dashboard_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of HTTP, with the part of the dashboard that vouches for requests that have arrived."""
    import uvicorn

    async def slow(scope: object, receive: object, send: object) -> None:
        await asyncio.sleep(4.5)  # longer than a connection may last without a request
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})  # type: ignore[operator]
        await send({"type": "http.response.body"})  # type: ignore[operator]

    held, port = limits.Connections(), free_port()
    server = uvicorn.Server(
        uvicorn.Config(tracked_connections(slow, held), port=port, log_config=None, lifespan="off")
    )  # type: ignore[arg-type]
    serving = asyncio.create_task(server.serve())
    watching = asyncio.create_task(held.watch(port))
    await eventually(lambda: server.started)
    half = [await connect(f"127.0.0.1:{port}", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ") for _ in range(20)]
    whole = await connect(f"127.0.0.1:{port}", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(60):
        await asyncio.gather(*map(ended, half))
        assert (await whole[0].readline()).startswith(b"HTTP/1.1 200")
    whole[1].close()
    watching.cancel()
    server.should_exit = True
    await asyncio.gather(watching, serving, return_exceptions=True)
    assert held.cut >= 20


DASHBOARD = """
import sys
from gpuscale.common.rpc import limits
limits.LOOK_PERIOD, limits.PATIENCE = 0.1, 1.0
from gpuscale.dashboard.main import main
sys.exit(main(["--gateway-address", "127.0.0.1:1", "--listen", sys.argv[1]]))
"""


async def test_the_dashboard_looks_at_its_connections() -> None:
    address = f"127.0.0.1:{free_port()}"
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", DASHBOARD, address), stderr=subprocess.PIPE
    )
    try:
        assert program.stderr is not None
        assert b"serving" in await asyncio.wait_for(program.stderr.readline(), 60)
        async with asyncio.timeout(60):
            await ended(await connect(address, b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "))
    finally:
        program.kill()
        await program.communicate()


def test_a_service_takes_all_descriptors_that_it_may() -> None:
    code = "import resource; from gpuscale.common.runtime.lifecycle import run\n"
    code += "async def main(stop): print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    code += "run(main, program='x')"
    done = subprocess.run(
        ["sh", "-c", 'ulimit -Sn 256; ulimit -Hn 3000; exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "3000\n"


def test_peers_are_the_same_however_they_are_written() -> None:
    for said, key in {
        "ipv4:127.0.0.1:80": "127.0.0.1:80",
        "ipv6:%5B::1%5D:80": "::1:80",
        "ipv6:[::ffff:10.0.0.1]:80": "10.0.0.1:80",
        "::1:80": "::1:80",
    }.items():
        assert limits._key(said) == key
    known = limits._plain.cache_info().misses
    assert limits._key("ipv6:[::ffff:10.0.0.1]:81") == "10.0.0.1:81"
    assert limits._plain.cache_info().misses == known, "with every look, for thousands"


def test_a_connection_without_an_identity_lasts_a_minute_at_most() -> None:
    assert LONGEST <= 60
