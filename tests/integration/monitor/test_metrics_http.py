"""The HTTP server of /metrics: who is answered what, and that nobody can hold it up."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.rpc import metrics_http as http
from gpuscale.common.rpc.metrics_http import serve_metrics
from gpuscale.common.rpc.server import ServerOptions
from gpuscale.common.runtime.metrics_text import CONTENT_TYPE
from gpuscale.common.security.auth import Authenticator
from gpuscale.common.security.tls import ServerTls
from tests.support.certificates import Authority
from tests.support.tokens import bearer, write_tokens
from tests.support.waiting import eventually


async def page() -> AsyncGenerator[bytes]:
    yield b"first 1\n"
    yield b"second 2\n"


@asynccontextmanager
async def running(
    authenticator: Authenticator | None = None, tls: ServerTls | None = None, render: http.Render = page
) -> AsyncIterator[str]:
    options = ServerOptions(tls=tls)
    async with serve_metrics("127.0.0.1:0", options, authenticator or Authenticator(), render) as address:
        yield address


async def get(
    address: str, path: str = "/metrics", method: str = "GET", token: str = "", **client: object
) -> httpx.Response:
    scheme = "https" if "verify" in client else "http"
    headers = dict(bearer(token)) if token else {}
    async with httpx.AsyncClient(trust_env=False, timeout=30, **client) as session:
        return await session.request(method, f"{scheme}://{address}{path}", headers=headers)


async def raw(address: str, request: bytes) -> bytes:
    """What comes back for these bytes, until the server closes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        return await reader.read(-1)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_a_scrape_gets_the_page_and_its_connection_is_closed() -> None:
    async with running() as address:
        answer = await get(address)
    assert answer.text == "first 1\nsecond 2\n"
    assert answer.headers["content-type"] == CONTENT_TYPE
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("gzip;q=0.0, br", False),
        ("", False),
        ("gzip;q=x", True),
    ],
)
async def test_a_page_is_short_for_who_takes_it_so(accepted: str, packed: bool) -> None:
    async def pages() -> AsyncGenerator[bytes]:
        for gpu in range(1_000):
            yield b'temperature{uuid="GPU-%032d",node="alpha"} 41.0\n' % gpu

    async with running(render=pages) as address:
        request = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept-Encoding: {accepted}\r\n\r\n"
        answer, text = await raw(address, request.encode()), (await get(address)).text
    assert text.count("\n") == 1_000
    assert (b"content-encoding: gzip" in answer, len(answer) < len(text) / 5) == (packed, packed)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/metrics?name=x", 200),
        ("HEAD", "/metrics", 200),
        ("GET", "/", 404),
        ("GET", "/metrics/", 404),
        ("POST", "/metrics", 405),
    ],
)
async def test_only_the_page_can_be_had(method: str, path: str, status: int) -> None:
    async with running() as address:
        answer = await get(address, path, method)
    assert answer.status_code == status
    assert (answer.content != b"") == (method != "HEAD")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"400"),  # no Host
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 40_000, b"431"),
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"200"),
    ],
)
async def test_what_is_no_good_request_is_refused_and_closed(request_: bytes, status: bytes) -> None:
    async with running() as address:
        answer = await raw(address, request_)
    assert answer.split()[1:2] == [status]


async def test_a_caller_who_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.05)
    async with running() as address:
        assert await raw(address, b"GET /metrics") == b""


async def test_a_caller_who_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ANSWER_SECONDS", 0.2)
    ended = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"x" * 65_536
        finally:
            ended.set()

    async with running(render=endless) as address:
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(30):
            await ended.wait()
        writer.close()


async def test_more_scrapes_than_the_limit_are_told_so_and_the_others_are_served() -> None:
    gate = asyncio.Event()
    waiting = 0

    async def held() -> AsyncGenerator[bytes]:
        nonlocal waiting
        waiting += 1
        await gate.wait()
        yield b"done 1\n"

    async with running(render=held) as address:
        held_back = [asyncio.create_task(get(address)) for _ in range(http.MOST_CONNECTIONS)]
        await eventually(lambda: waiting == http.MOST_CONNECTIONS)
        refused = await raw(address, b"")
        gate.set()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in refused
        assert {(await one).text for one in held_back} == {"done 1\n"}
        assert (await get(address)).status_code == 200


async def test_a_scraper_that_goes_away_leaves_nothing_behind() -> None:
    async with running() as address:
        host, _, port = address.rpartition(":")
        for _ in range(2 * http.MOST_CONNECTIONS):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.transport.abort()
        await eventually(lambda: get(address))


async def test_the_end_does_not_wait_for_a_scrape_and_its_page_is_seen_to_be_cut() -> None:
    begun = asyncio.Event()

    async def stuck() -> AsyncGenerator[bytes]:
        yield b"first 1\n"
        begun.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(30):
        async with running(render=stuck) as address:
            scrape = asyncio.create_task(get(address))
            await begun.wait()
        with pytest.raises(httpx.TransportError):
            await scrape


async def test_with_tokens_a_viewer_is_needed(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", eve="viewer")
    async with running(Authenticator(tokens_file=tokens)) as address:
        missing = await get(address)
        wrong = await get(address, token="mallory")
        right = await get(address, token="eve")
    assert (missing.status_code, wrong.status_code, right.status_code) == (401, 401, 200)
    assert missing.headers["www-authenticate"] == "Bearer"
    assert b"eve" not in missing.content + wrong.content


async def test_over_tls_and_with_a_certificate_that_is_replaced(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    async with running(tls=authority.server()) as address:
        trusting = ssl.create_default_context(cafile=str(authority.file))
        assert (await get(address, verify=trusting)).status_code == 200
        assert await raw(address, b"GET /metrics HTTP/1.0\r\n\r\n") == b""
        other.server()  # writes the same files
        changed = ssl.create_default_context(cafile=str(other.file))
        assert (await get(address, verify=changed)).status_code == 200


async def test_client_certificates_count_after_the_server_renewed_its_own_and_by_a_renewed_authority(
    tmp_path: Path,
) -> None:
    """Of an authority that is added to the file, and no longer of one that is taken out."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    trusting = ssl.create_default_context(cafile=str(authority.file))

    def shown(by: Authority, name: str) -> ssl.SSLContext:
        files = by.client("spiffe://here/gpuscale/viewer/eve", name)
        context = ssl.create_default_context(cafile=str(authority.file))
        context.load_cert_chain(str(files.cert_file), str(files.key_file))
        return context

    old, new = shown(authority, "old"), shown(other, "new")
    tls = authority.server(client_ca=authority)
    async with running(Authenticator(accept_certificates=True), tls) as address:
        authority.server(client_ca=authority)
        assert (await get(address, verify=old)).status_code == 200
        with pytest.raises(httpx.HTTPError):
            await get(address, verify=trusting)
        with pytest.raises(httpx.HTTPError):
            await get(address, verify=new)
        authority.file.write_bytes(authority.file.read_bytes() + other.file.read_bytes())
        assert (await get(address, verify=new)).status_code == 200
        authority.file.write_bytes(other.file.read_bytes())
        with pytest.raises(httpx.HTTPError):
            await get(address, verify=old)


@pytest.mark.parametrize(
    ("listen", "error", "reason"),
    [
        ("0.0.0.0:0", FailedPreconditionError, "INSECURE_BIND"),
        ("nowhere", InvalidArgumentError, "INVALID_ARGUMENT"),
        ("192.0.2.1:0", FailedPreconditionError, "INSECURE_BIND"),
    ],
)
async def test_an_address_that_cannot_be_served_is_refused(
    listen: str, error: type[FailedPreconditionError], reason: str
) -> None:
    with pytest.raises(error) as caught:
        async with serve_metrics(listen, ServerOptions(), Authenticator(), page):
            pass
    assert caught.value.reason == reason


async def test_an_address_that_is_taken_is_said_to_be() -> None:
    async with running() as address:
        with pytest.raises(FailedPreconditionError, match=address) as caught:
            async with serve_metrics(address, ServerOptions(), Authenticator(), page):
                pass
    assert caught.value.reason == "ADDRESS_IN_USE"
