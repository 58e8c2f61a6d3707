"""TLS and client certificates, with certificates that are replaced while the server runs."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gpuscale.common import errors
from gpuscale.common.rpc.channel import ClientTls, open_channel, open_sync_channel
from gpuscale.common.rpc.server import ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.security.auth import Authenticator
from gpuscale.common.security.tls import ServerTls, server_credentials
from tests.support.certificates import Authority
from tests.support.throwaway import Served, serve
from tests.support.tokens import token

SPIFFE = "spiffe://example.org/gpuscale"


CLOSING = """
import os
import sys
from pathlib import Path
import grpc
from pydantic import SecretStr
from gpuscale.common.rpc.channel import ClientTls, open_sync_channel

class Plugin(grpc.AuthMetadataPlugin):
    def __call__(self, context, callback):
        callback((), None)

grpc.access_token_call_credentials = None  # makes a plugin of a token
for token in (SecretStr("abc"), *[Plugin()] * 5):
    with open_sync_channel("127.0.0.1:1", tls=ClientTls(Path(sys.argv[1])), token=token) as channel:
        assert channel.unary_unary("/a/b").future(b"", timeout=5).exception()
    print("event_engine" in os.popen(f"ps -T -o comm= -p {os.getpid()}").read())
"""


async def release(served: Served, tls: ClientTls | None, bearer: str | None = None, **call: Any) -> None:
    """One call that needs role operator, over a channel of its own."""
    secret = None if bearer is None else SecretStr(token(bearer))
    async with open_channel(served.address, tls=tls, token=secret) as channel:
        with rpc_errors():
            await Served(served.server, served.address, channel).release(**call)


def test_who_closes_the_last_channel_waits_for_no_thread_that_lets_go_of_a_plugin(tmp_path: Path) -> None:
    """Once in some thousand times each would wait for the other, for ever: no plugin is made, or gRPC's threads stay."""
    program = [sys.executable, "-c", CLOSING, str(Authority(tmp_path).file)]
    ran = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True, timeout=120)
    assert ran.stdout.split()[1:] == ["True"] * 5


@pytest.mark.parametrize("trouble", ["plain text", "another authority"])
async def test_clients_that_do_not_fit_are_not_served(tmp_path: Path, trouble: str) -> None:
    """M14: to the client every failure of TLS is UNAVAILABLE."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    tls = None if trouble == "plain text" else other.trust()
    async with serve(options=ServerOptions(tls=authority.server())) as served:
        with pytest.raises(errors.UnavailableError):
            await release(served, tls, timeout=30.0)


@pytest.mark.parametrize("trouble", ["none", "another authority", "expired"])
async def test_client_certificates_that_do_not_count(tmp_path: Path, trouble: str) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    uri = f"{SPIFFE}/admin/mallory"
    foreign = other.client(uri, "foreign")
    clients = {
        "none": authority.trust(),
        "another authority": ClientTls(authority.file, foreign.cert_file, foreign.key_file),
        "expired": authority.client(uri, valid=False),
    }
    options = ServerOptions(tls=authority.server(client_ca=authority))
    async with serve(options=options, authenticator=Authenticator(accept_certificates=True)) as served:
        with pytest.raises(errors.UnavailableError):
            await release(served, clients[trouble], timeout=30.0)


async def test_a_new_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    """M13: new connections see it, open ones live on, and a bad file changes nothing."""
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    async with (
        serve(options=ServerOptions(tls=first.server())) as served,
        open_channel(served.address, tls=first.trust()) as old,
    ):
        await Served(served.server, served.address, old).get()
        second.server()
        await release(served, second.trust())
        with pytest.raises(errors.UnavailableError):
            await release(served, first.trust(), timeout=30.0)
        await Served(served.server, served.address, old).get()


async def test_a_bad_certificate_leaves_the_old_one_and_a_new_one_waits_for_its_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    tls = authority.server()
    async with serve(options=ServerOptions(tls=tls)) as served:
        good = tls.cert_file.read_bytes()
        for bad in (b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", None):
            if bad is None:
                tls.cert_file.unlink()
            else:
                tls.cert_file.write_bytes(bad)
            with caplog.at_level(logging.WARNING):
                await release(served, authority.trust())
            assert any("cannot be used" in str(record.msg) for record in caplog.records)
            caplog.clear()
        tls.cert_file.write_bytes(good)
        await release(served, authority.trust())
        new = authority.server("new")
        new.cert_file.replace(tls.cert_file)
        await release(served, authority.trust())
        new.key_file.replace(tls.key_file)
        await release(served, authority.trust())


@pytest.mark.parametrize(
    ("days", "said"), [(-1, "has expired"), (1.5, "ends soon"), (60, None)], ids=["expired", "soon", "good"]
)
def test_a_certificate_that_clients_will_refuse_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, days: float, said: str | None
) -> None:
    with caplog.at_level(logging.WARNING):
        server_credentials(Authority(tmp_path).expired_server(days=days))
    told = [str(record.msg) for record in caplog.records]
    assert all("expired.pem" in text for text in told)
    assert [said in text for text in told] == [True] if said else told == []
    assert said != "ends soon" or "1" in told[0]


@pytest.mark.parametrize("missing", ["cert_file", "key_file", "client_ca_file"])
def test_files_that_cannot_be_used_at_the_start(tmp_path: Path, missing: str) -> None:
    authority = Authority(tmp_path)
    tls = authority.server(client_ca=authority)
    getattr(tls, missing).unlink()
    with pytest.raises(errors.FailedPreconditionError) as caught:
        server_credentials(tls)
    assert caught.value.reason == "TLS_FILES"
    assert getattr(tls, missing).name in caught.value.message


def test_a_key_of_another_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, two = authority.server("one"), authority.server("two")
    with pytest.raises(errors.FailedPreconditionError):
        server_credentials(ServerTls(one.cert_file, two.key_file))


async def test_a_client_file_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "list.crt").write_text(
        "no certificate\n"
    )  # gRPC itself takes it, and then connects to no server
    for file in ("no-such.pem", "list.crt"):
        with pytest.raises(errors.FailedPreconditionError, match=file) as caught:
            open_channel("127.0.0.1:1", tls=ClientTls(tmp_path / file))
        assert caught.value.reason == "TLS_FILES"
    with pytest.raises(errors.FailedPreconditionError):
        open_sync_channel("127.0.0.1:1", tls=ClientTls(tmp_path / "no-such.pem"))
