"""No channel sends its calls, and the tokens in them, through a proxy that the environment happens to name."""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

from gpuscale.common.rpc.channel import open_channel
from tests.support.certificates import Authority

SERVICES = Path(__file__).parents[3] / "services"
VARIABLES = ("grpc_proxy", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy")


class Listener:
    """Takes connections of whatever protocol, and records what each sends first."""

    def __init__(self, first: asyncio.Event) -> None:
        self.first = first
        self.address = ""
        self.heard: list[bytes] = []

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard.append(await reader.read(4096))
        self.first.set()
        writer.close()


@asynccontextmanager
async def listening() -> AsyncGenerator[tuple[Listener, Listener]]:
    """A proxy and a server; the event that both share is set when either has heard something."""
    first = asyncio.Event()
    proxy, server = Listener(first), Listener(first)
    async with (
        await asyncio.start_server(proxy.hear, "127.0.0.1", 0) as one,
        await asyncio.start_server(server.hear, "127.0.0.1", 0) as other,
    ):
        for listener, sockets in ((proxy, one.sockets), (server, other.sockets)):
            listener.address = "{}:{}".format(*sockets[0].getsockname())
        yield proxy, server


def test_only_the_modules_that_state_the_limits_open_channels() -> None:
    opens = re.compile(r"\b(in)?secure_channel\(")
    found = {path.name for path in SERVICES.rglob("*.py") if opens.search(path.read_text("utf-8"))}
    assert found == {"channel.py"}


@pytest.mark.parametrize("asked", [True, False])
async def test_a_proxy_tunnels_tls_alone_and_only_where_ours_is_asked_for(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = Authority(tmp_path).trust()
    monkeypatch.setenv("no_proxy", "")
    async with listening() as (proxy, server):
        for name in VARIABLES:
            monkeypatch.setenv(name, f"http://user:secret@{proxy.address}")
        if asked:
            monkeypatch.setenv("GPUSCALE_HTTP_PROXY", f"http://{proxy.address}")
        for trust in (tls, None):
            async with open_channel(server.address, tls=trust, token=SecretStr("hush")) as channel:
                channel.get_state(try_to_connect=True)
                async with asyncio.timeout(60):
                    await server.first.wait()
            server.first.clear()
        assert len(proxy.heard) == asked
        assert len(server.heard) == 2 - asked
        assert all(text.startswith(b"CONNECT ") and b"hush" not in text for text in proxy.heard)
