"""Each role may call each method that the contract gives it, and no other, on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.types.v1 import options_pb2
from gpuscale.common.names import LEASE_KEY
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.security.auth import Authenticator
from tests.contract.descriptors import Rpc, rpcs
from tests.support.tokens import bearer, write_tokens

RPCS = rpcs()
ROLES = {"viewer": 1, "agent": 2, "operator": 3, "admin": 4}


class Everything(grpc.GenericRpcHandler):
    """Answers every method of the contract with nothing, without looking at the request."""

    def __init__(self) -> None:
        self.kinds = {rpc.path: rpc for rpc in RPCS}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        rpc = self.kinds.get(handler_call_details.method)
        if rpc is None:
            return None
        if rpc.client_streaming:
            return grpc.stream_stream_rpc_method_handler(nothing)
        if rpc.server_streaming:
            return grpc.unary_stream_rpc_method_handler(nothing)
        return grpc.unary_unary_rpc_method_handler(empty)


async def nothing(request: Any, context: Any) -> AsyncIterator[bytes]:
    return
    yield b""


async def empty(request: Any, context: Any) -> bytes:
    return b""


async def status(channel: grpc.aio.Channel, rpc: Rpc, metadata: Any) -> grpc.StatusCode:
    call: Any
    if rpc.client_streaming:
        call = channel.stream_stream(rpc.path)(timeout=60, metadata=metadata)
    elif rpc.server_streaming:
        call = channel.unary_stream(rpc.path)(b"", timeout=60, metadata=metadata)
    else:
        call = channel.unary_unary(rpc.path)(b"", timeout=60, metadata=metadata)
    found: grpc.StatusCode = await call.code()
    return found


@pytest.mark.parametrize("name", [*ROLES, "nobody"])
async def test_a_role_may_call_what_the_contract_gives_it(tmp_path: Path, name: str) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", **{role: role for role in ROLES})
    server = Server(ServerOptions(), Authenticator(tokens_file=tokens))
    server.add_generic(Everything(), {rpc.path.split("/")[1] for rpc in RPCS})
    address = server.bind()
    wrong: list[str] = []
    async with server, open_channel(address) as channel:
        for rpc in RPCS:
            needed = int(rpc.method.GetOptions().Extensions[options_pb2.method].role)
            assert needed in {*ROLES.values(), options_pb2.ROLE_ANYONE}, f"{rpc.path} has no role"
            expected = grpc.StatusCode.UNAUTHENTICATED
            if needed == options_pb2.ROLE_ANYONE:
                expected = grpc.StatusCode.OK
            elif name in ROLES:
                allowed = ROLES[name] >= needed
                expected = grpc.StatusCode.OK if allowed else grpc.StatusCode.PERMISSION_DENIED
            if (found := await status(channel, rpc, bearer(name))) is not expected:
                wrong.append(f"{rpc.path}: {found.name}, not {expected.name}")
    assert wrong == []
    assert len(RPCS) > 50


async def test_a_lease_token_may_renew_release_and_admit_work_and_nothing_else() -> None:
    """Even where whoever shows it could do anything without: it is on the server's own host, without tokens."""
    server = Server(ServerOptions(), Authenticator())
    server.add_generic(Everything(), {rpc.path.split("/")[1] for rpc in RPCS})
    address = server.bind()
    found: dict[grpc.StatusCode, set[str]] = {}
    async with server, open_channel(address) as channel:
        for rpc in RPCS:
            code = await status(channel, rpc, ((LEASE_KEY, "A" * 43),))
            found.setdefault(code, set()).add(rpc.path)
    roles = {rpc.path: rpc.method.GetOptions().Extensions[options_pb2.method].role for rpc in RPCS}
    anyone = {path for path, role in roles.items() if role == options_pb2.ROLE_ANYONE}
    service = "/gpuscale.api.allocator.v1.AllocatorService"
    assert found.pop(grpc.StatusCode.OK) - anyone == {
        f"{service}/RenewReservation",
        f"{service}/ReleaseReservation",
        "/gpuscale.api.monitor.v1.WorkService/AdmitWork",
    }
    assert set(found) == {grpc.StatusCode.PERMISSION_DENIED}
