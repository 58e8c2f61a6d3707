"""Where a server listens, and what it refuses to."""

import logging
import socket
from pathlib import Path
from uuid import uuid4

import pytest
from pydantic import SecretStr

from gpuscale.common import errors
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import Server, ServerOptions, parse_listen
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.security.auth import Authenticator, Principal, Role, current_principal
from tests.support.throwaway import Allocator, Served, serve
from tests.support.tokens import write_tokens


def bind(listen: str, **options: object) -> str:
    return Server(ServerOptions(listen=listen, **options), Authenticator()).bind()  # type: ignore[arg-type]


async def test_port_0_takes_a_free_port() -> None:
    address = bind("127.0.0.1:0")
    assert address.startswith("127.0.0.1:")
    assert not address.endswith(":0")


async def test_a_second_server_on_the_address_is_refused() -> None:
    """M4: gRPC's default lets both have it, and calls go to either."""
    async with serve() as served:
        with pytest.raises(errors.FailedPreconditionError) as caught:
            bind(served.address)
        assert caught.value.reason == "ADDRESS_IN_USE"
        assert served.address in caught.value.message
        await served.get()


async def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(errors.FailedPreconditionError) as caught:
        bind("192.0.2.1:7070", insecure_allow_remote=True)
    assert caught.value.reason == "BIND_FAILED"


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:7070", "example.org:7070"])
async def test_other_hosts_need_tls(listen: str) -> None:
    with pytest.raises(errors.FailedPreconditionError) as caught:
        bind(listen)
    assert caught.value.reason == "INSECURE_BIND"


async def test_insecure_remote_is_possible_and_loud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        bind("0.0.0.0:0", insecure_allow_remote=True)
    assert any("plain text" in str(record.msg) for record in caplog.records)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "127.8.8.8:0"])
async def test_loopback_needs_no_tls(listen: str) -> None:
    bind(listen)


@pytest.mark.parametrize(
    "listen",
    [
        "",
        "7070",
        ":7070",
        "127.0.0.1",
        "127.0.0.1:",
        "host:-1",
        "host:65536",
        "::1:0",
        "[::1]",
        "h:1e3",
        "h:²",
    ],
)
def test_addresses_that_are_none(listen: str) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        parse_listen(listen)


def test_ipv6_addresses_are_read_and_written() -> None:
    address = parse_listen("[::1]:7070")
    assert (address.host, address.port, address.loopback, str(address)) == ("::1", 7070, True, "[::1]:7070")
    assert not parse_listen("[2001:db8::1]:7070").loopback


async def over_unix(name: str, served: Served, token: SecretStr | None = None) -> None:
    async with open_channel(f"unix-abstract:{name}", token=token) as channel:
        await Served(served.server, name, channel).release()


async def test_callers_of_the_internal_socket_with_its_token_are_local_admins(tmp_path: Path) -> None:
    """Also where TCP callers need a token of the file. Nobody can take its place, and be told the token, while it is there."""
    callers: list[Principal] = []

    async def work(request: object, context: object) -> object:
        callers.append(current_principal())
        return Allocator.answer()

    name = f"gpuscale-test-{uuid4()}"
    own = SecretStr("own")
    tokens = write_tokens(tmp_path / "tokens.toml", someone="admin")
    authenticator = Authenticator(tokens_file=tokens, internal_token=own)
    options = ServerOptions(internal_socket=name)
    async with serve(Allocator(work), options=options, authenticator=authenticator) as served:
        await over_unix(name, served, own)
        for refused in (served.release(), over_unix(name, served), over_unix(name, served, SecretStr("no"))):
            with pytest.raises(errors.UnauthenticatedError), rpc_errors():
                await refused
        with socket.socket(socket.AF_UNIX) as other, pytest.raises(OSError, match="in use"):
            other.bind(f"\0{name}")
    assert callers == [Principal("local", Role.ADMIN, "local")]


async def test_an_internal_socket_whose_name_is_taken_is_not_shared() -> None:
    name = f"gpuscale-test-{uuid4()}"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0{name}")
        with pytest.raises(errors.FailedPreconditionError) as caught:
            bind("127.0.0.1:0", internal_socket=name)
    assert caught.value.reason == "BIND_FAILED"
