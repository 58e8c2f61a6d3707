"""No program lets gRPC send its calls, and the tokens in them, through a proxy that the environment happens to name."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from pydantic import SecretStr

from gpuscale.api.autoscaler.v1 import (
    CreateEndpointRequest,
    Endpoint,
    EndpointSpec,
    ReplicaTemplate,
    Signal,
    WaitingSignal,
)
from gpuscale.api.monitor.v1 import ListNodesRequest
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.runtime.tasks import TaskScope
from tests.support.certificates import Authority
from tests.support.ports import free_port

SERVICES = Path(__file__).parents[3] / "services"
VARIABLES = ("grpc_proxy", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy")
SCRIPTS = {
    "gpuscalectl": ["--address={server}", "get", "nodes"],
    "gpuscale-agent": ["--listen={listen}", "--node=alpha", "--source=simulated", "--fleet-address={server}"],
    "gpuscale-allocator": ["--listen={listen}", "--data-dir={tmp}/data", "--fleet-address={server}"],
    "gpuscale-autoscaler": [
        "--listen={listen}",
        "--data-dir={tmp}/data",
        "--fleet-address={server}",
        "--allocator-address={server}",
    ],
    "gpuscale-adapter": ["--data-dir={tmp}/data", "--node=alpha", "--autoscaler-address={server}"],
    "gpuscale-container-adapter": ["--data-dir={tmp}/data", "--autoscaler-address={server}"],
    "gpuscale-gateway": ["--listen={listen}", "--fleet-address={server}"],
    "gpuscale-dashboard": ["--listen={listen}", "--gateway-address={server}"],
}


# What has these call their servers; the others begin to by themselves.
ASKED: dict[str, tuple[str, Message]] = {
    "gpuscale-gateway": ("/gpuscale.api.monitor.v1.FleetService/ListNodes", ListNodesRequest()),
    "gpuscale-autoscaler": (
        "/gpuscale.api.autoscaler.v1.EndpointService/CreateEndpoint",
        CreateEndpointRequest(
            endpoint=Endpoint(
                name="endpoints/e",
                spec=EndpointSpec(
                    max_replicas=1,
                    signals=[Signal(id="waiting", waiting=WaitingSignal())],
                    template=ReplicaTemplate(template="worker"),
                ),
            ),
            request_id="4a54ecf6-2f0c-4f0c-9b1b-37a0d9ffb9a1",
        ),
    ),
}


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


async def _ended(channel: grpc.aio.Channel, method: str, request: Message) -> None:
    with suppress(grpc.aio.AioRpcError):
        call = channel.unary_unary(method, type(request).SerializeToString, bytes)
        await call(request, wait_for_ready=True)


@pytest.mark.parametrize("program", SCRIPTS)
async def test_a_program_calls_its_server_and_never_a_proxy(program: str, tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with listening() as (proxy, server):
        environment = dict.fromkeys(VARIABLES, f"http://user:secret@{proxy.address}")
        flags = [flag.format(server=server.address, tmp=tmp_path, listen=listen) for flag in SCRIPTS[program]]
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name(program)),
            *flags,
            env={**os.environ, "no_proxy": "", "HOME": str(tmp_path), **environment},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(100), open_channel(listen) as channel, TaskScope() as tasks:
                if program in ASKED:
                    method, request = ASKED[program]
                    tasks.start("call", _ended(channel, method, request))
                await server.first.wait()
        finally:
            process.kill()
            await process.wait()
        assert proxy.heard == []
        assert server.heard[0].startswith(b"PRI * HTTP/2.0")


def test_only_the_modules_that_state_the_limits_open_channels() -> None:
    opens = re.compile(r"\b(in)?secure_channel\(")
    found = {path.name for path in SERVICES.rglob("*.py") if opens.search(path.read_text("utf-8"))}
    assert found == {"channel.py"}


@pytest.mark.parametrize("asked", [True, False])
async def test_a_proxy_that_is_asked_for_tunnels_tls_and_nothing_else(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = Authority(tmp_path).trust()
    async with listening() as (proxy, server):
        if asked:
            monkeypatch.setenv("GPUSCALE_HTTP_PROXY", f"http://{proxy.address}")
        for trust in (tls, None):
            async with open_channel(server.address, tls=trust, token=SecretStr("hush")) as channel:
                channel.get_state(try_to_connect=True)
                async with asyncio.timeout(10):
                    await server.first.wait()
            server.first.clear()
        assert len(proxy.heard) == asked
        assert len(server.heard) == 2 - asked
        assert all(text.startswith(b"CONNECT ") and b"hush" not in text for text in proxy.heard)
