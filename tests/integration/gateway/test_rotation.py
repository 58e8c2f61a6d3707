"""Certificates that are replaced on disk while calls go on: no call fails, and new connections see the new one."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from gpuscale.common.rpc.channel import ClientTls, open_channel
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.security.auth import Authenticator
from gpuscale.gateway.forwarder import Forwarder
from gpuscale.gateway.upstreams import Lanes, Upstream
from tests.integration.gateway.raw_service import FLEET, UNARY, RawService
from tests.support.certificates import Authority

ROTATIONS = 5
CALLERS = 8


def served_certificate(address: str, tls: ClientTls) -> str:
    """The certificate that a new connection is shown."""
    host, _, port = address.partition(":")
    return ssl.get_server_certificate((host, int(port)), ca_certs=str(tls.ca_file), timeout=30)


async def test_certificates_change_under_load_without_a_failed_call(tmp_path: Path) -> None:
    """Each caller connects anew for every other call, so that handshakes fall between the writing of two files."""
    authority = Authority(tmp_path)
    files, trust = authority.server(), authority.trust()
    upstream = Server(ServerOptions(), Authenticator())
    upstream.add_generic(RawService(), [FLEET])
    upstream_address = upstream.bind()
    made, stop, rotated = 0, asyncio.Event(), asyncio.Event()

    async def caller(address: str) -> None:
        nonlocal made
        while not stop.is_set():
            async with open_channel(address, tls=trust) as channel:
                for _ in range(2):
                    assert await channel.unary_unary(UNARY)(b"x", timeout=60) == b"echo x"
                    made += 1
            rotated.set()

    async with upstream, open_channel(upstream_address) as channel:
        gateway = Server(ServerOptions(tls=files), Authenticator())
        fleet = Upstream("fleet", channel, Lanes(lambda: channel), private=True)
        gateway.add_generic(Forwarder({FLEET: fleet}), [FLEET])
        address = gateway.bind()
        async with gateway, asyncio.TaskGroup() as tasks, open_channel(address, tls=trust) as old:
            assert await old.unary_unary(UNARY)(b"a", timeout=60) == b"echo a"
            seen = {await asyncio.to_thread(served_certificate, address, trust)}
            for _ in range(CALLERS):
                tasks.create_task(caller(address))
            for _ in range(ROTATIONS):
                authority.server()  # writes the certificate, then the key: not at once
                rotated.clear()
                await asyncio.wait_for(rotated.wait(), 60)
                seen.add(await asyncio.to_thread(served_certificate, address, trust))
            stop.set()
            assert await old.unary_unary(UNARY)(b"b", timeout=60) == b"echo b"
    assert len(seen) == ROTATIONS + 1
    assert made > 2 * ROTATIONS
