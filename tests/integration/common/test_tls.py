"""TLS: files that are replaced or do not fit, certificates that are revoked, and an authority that is."""

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from pydantic import SecretStr

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common import errors
from gpuscale.common.config.settings import UpstreamSettings
from gpuscale.common.rpc import interceptor
from gpuscale.common.rpc.channel import ClientTls, open_channel, open_sync_channel
from gpuscale.common.rpc.server import ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.security import certificates, tls
from gpuscale.common.security.auth import Authenticator
from gpuscale.common.security.certificate_authority import read_pair
from gpuscale.common.security.tls import ServerTls, server_credentials
from gpuscale.gateway.main import serve as serve_gateway
from gpuscale.gateway.settings import GatewaySettings
from gpuscale.internal.monitor import v1 as monitor_internal
from tests.support.certificates import Authority
from tests.support.cli import python, run_cli
from tests.support.first_host import programs
from tests.support.ports import free_port
from tests.support.promtool import value
from tests.support.throwaway import Allocator, Served, serve
from tests.support.tokens import token, write_tokens
from tests.support.waiting import eventually

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
    ran = python(CLOSING, Authority(tmp_path).file)
    assert (ran.code, ran.out.split()[1:]) == (0, ["True"] * 5), ran


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


def test_a_certificate_that_openssl_alone_reads_is_not_warned_of(tmp_path: Path) -> None:
    tls = Authority(tmp_path).server()
    text = tls.cert_file.read_text()
    tls.cert_file.write_text(text.replace(" CERTIFICATE-", " TRUSTED CERTIFICATE-"))
    server_credentials(tls)


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
    (tmp_path / "list.crt").write_text("no certificate\n")  # gRPC takes it, and then connects to no server
    for file in ("no-such.pem", "list.crt"):
        with pytest.raises(errors.FailedPreconditionError, match=file) as caught:
            open_channel("127.0.0.1:1", tls=ClientTls(tmp_path / file))
        assert caught.value.reason == "TLS_FILES"
    with pytest.raises(errors.FailedPreconditionError):
        open_sync_channel("127.0.0.1:1", tls=ClientTls(tmp_path / "no-such.pem"))


def certs(*arguments: str | Path) -> None:
    ran = run_cli("certs", *map(str, arguments))
    assert ran.code == 0, ran.err


@pytest.fixture
def pki(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An authority with certificates of a server, of alice and of bob; changes count at once."""
    monkeypatch.setattr(certificates, "CHECK_PERIOD", 0.0)
    monkeypatch.setattr(tls, "CLIENT_PERIOD", 0.0)
    folder = tmp_path / "pki"
    certs("init", "--dir", folder)
    for name in ("alice", "bob"):
        certs("issue", name, "--dir", folder, "--role", "operator")
    (folder / "revoked.toml").touch()
    return folder


def server_tls(pki: Path) -> ServerTls:
    return ServerTls(pki / "server.crt", pki / "server.key", pki / "ca.crt")


def caller(pki: Path, name: str) -> ClientTls:
    return ClientTls(pki / "ca.crt", pki / f"{name}.crt", pki / f"{name}.key")


async def refusal(call: Any) -> str | None:
    """The reason for which a call fails; None where it does not."""
    try:
        with rpc_errors():
            await call
    except errors.GpuscaleError as error:
        return error.reason
    return None


async def test_a_revoked_certificate_lets_nobody_in_over_an_open_connection_either(
    pki: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither new calls nor, for longer than a minute, open streams, nor whatever token comes with it."""
    monkeypatch.setattr(interceptor, "RECHECK_PERIOD", 0.05)
    revoked = pki / "revoked.toml"
    tokens = write_tokens(pki / "tokens.toml", carol="operator")
    authenticator = Authenticator(tokens_file=tokens, accept_certificates=True, revoked_file=revoked)
    options = ServerOptions(tls=server_tls(pki))
    async with (
        serve(options=options, authenticator=authenticator) as served,
        open_channel(served.address, tls=caller(pki, "alice")) as alice,
        open_channel(served.address, tls=caller(pki, "bob")) as bob,
        open_channel(served.address, tls=caller(pki, "alice"), token=SecretStr(token("carol"))) as carol,
    ):
        ours = [Served(served.server, served.address, channel) for channel in (alice, bob, carol)]
        assert [await refusal(one.release()) for one in ours] == [None, None, None]
        stream = ours[0].telemetry.StreamTelemetry()
        await stream.write(monitor_internal.StreamTelemetryRequest())
        await stream.read()
        certs("revoke", "alice", "--revoked-file", revoked)
        reasons = [await refusal(one.release()) for one in ours]
        assert reasons == ["CERTIFICATE_REVOKED", None, "CERTIFICATE_REVOKED"]
        async with asyncio.timeout(60):
            assert await stream.code() == grpc.StatusCode.UNAUTHENTICATED
        certs("issue", "alice", "--dir", pki, "--role", "operator", "--revoked-file", revoked)
        async with open_channel(served.address, tls=caller(pki, "alice")) as again:
            assert await refusal(Served(served.server, served.address, again).release()) is None


@asynccontextmanager
async def gateway(pki: Path) -> AsyncGenerator[GatewaySettings]:
    """The program, with nobody behind it."""
    made = GatewaySettings(
        listen=f"127.0.0.1:{free_port()}",
        metrics_listen=f"127.0.0.1:{free_port()}",
        tls_cert_file=pki / "server.crt",
        tls_key_file=pki / "server.key",
        tls_client_ca_file=pki / "ca.crt",
        revoked_file=pki / "revoked.toml",
        ca_file=pki / "ca.crt",
        cert_file=pki / "alice.crt",
        key_file=pki / "alice.key",
        fleet_address=f"127.0.0.1:{free_port()}",
    )
    async with programs(gateway=(serve_gateway, made)):
        yield made


async def test_the_gateway_and_its_metrics_know_the_deny_list_and_tell_when_certificates_end(
    pki: Path,
) -> None:
    serial = f"{read_pair(pki, 'bob').certificate.serial_number:X}"
    context = ssl.create_default_context(cafile=pki / "ca.crt")
    context.load_cert_chain(pki / "bob.crt", pki / "bob.key")
    async with (
        gateway(pki) as settings,
        open_channel(settings.listen, tls=caller(pki, "bob")) as bob,
        httpx.AsyncClient(verify=context, trust_env=False, timeout=30) as scraper,
    ):
        fleet = monitor_api.FleetServiceStub(bob)

        async def scrape() -> httpx.Response:
            try:
                return await scraper.get(f"https://{settings.metrics_listen}/metrics")
            except httpx.TransportError as error:
                raise AssertionError("not yet") from error

        answer = await eventually(scrape)
        ends = "gpuscale_certificate_expires_timestamp_seconds"
        for file, name in (("tls_cert_file", "server"), ("cert_file", "alice"), ("ca_file", "ca")):
            expected = read_pair(pki, name).certificate.not_valid_after_utc.timestamp()
            assert value(answer.text, ends, file=file) == expected
        request = monitor_api.ListNodesRequest()
        assert await refusal(fleet.ListNodes(request, timeout=30)) == "UPSTREAM_UNAVAILABLE"
        certs("revoke", "bob", "--serial", serial, "--revoked-file", pki / "revoked.toml")
        assert await refusal(fleet.ListNodes(request, timeout=30)) == "CERTIFICATE_REVOKED"
        answer = await scrape()
        assert (answer.status_code, answer.text) == (401, "the client certificate was revoked\n")


async def test_an_authority_is_replaced_while_calls_go_on(pki: Path) -> None:
    """As operations.md has it. The caller's channel and its stream stay open all the time."""
    seen: list[bytes] = []

    async def work(request: Any, context: Any) -> Any:
        seen.append(next(iter(context.auth_context()["x509_pem_cert"])))
        return Allocator.answer()

    upstream = UpstreamSettings(
        ca_file=pki / "ca.crt", cert_file=pki / "alice.crt", key_file=pki / "alice.key"
    )
    options = ServerOptions(tls=server_tls(pki))
    authenticator = Authenticator(accept_certificates=True)
    old = pki / "old"
    old.mkdir()
    for file in pki.glob("alice.*"):
        (old / file.name).write_bytes(file.read_bytes())
    async with (
        serve(Allocator(work), options=options, authenticator=authenticator) as served,
        upstream.open_channel(served.address) as channel,
    ):
        alice = Served(served.server, served.address, channel)
        stream = alice.telemetry.StreamTelemetry()
        await stream.write(monitor_internal.StreamTelemetryRequest())
        await stream.read()
        await alice.release()
        for unfit in (b"", (pki / "bob.key").read_bytes(), (old / "alice.key").read_bytes()):
            (pki / "alice.key").write_bytes(unfit)  # what does not fit changes nothing
            await alice.release(timeout=30)
        for step in (["rotate-ca"], ["renew"], ["rotate-ca", "--finish"]):
            certs(*step, "--dir", pki)
            await alice.release()
            async with upstream.open_channel(served.address) as fresh:
                await Served(served.server, served.address, fresh).release()
            await stream.write(monitor_internal.StreamTelemetryRequest())
            await stream.read()
        renewed = (pki / "alice.crt").read_bytes()
        assert [one == renewed for one in seen] == [False] * 6 + [True] * 4
        stale = ClientTls(pki / "ca.crt", old / "alice.crt", old / "alice.key")
        async with open_channel(served.address, tls=stale) as refused:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await Served(served.server, served.address, refused).release(timeout=30.0)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
