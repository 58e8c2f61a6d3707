"""Hosts that join: tokens, certificates for their requests, and renewal, on the real fleet, gateway, agent and CLI."""

import json
import re
import tomllib
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from pydantic import SecretStr

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types.v1 import options_pb2
from gpuscale.cli.commands import hosts, joining
from gpuscale.cli.commands.hosts import settings_text
from gpuscale.common import errors
from gpuscale.common.rpc import certificate_renewal
from gpuscale.common.rpc.channel import ClientTls, open_channel
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.tasks import TaskScope
from gpuscale.common.security import certificates, tls
from gpuscale.common.security.auth import CALLER_KEY, Authenticator, Principal, Role, set_principal
from gpuscale.common.security.certificate_authority import (
    CertificateSubject,
    Signer,
    issue,
    make_authority,
    make_request,
    subject_of,
)
from gpuscale.common.wire import to_duration
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.app.agent import serve as serve_agent
from gpuscale.monitor.app.fleet import open_fleet
from gpuscale.monitor.app.settings import AgentSettings, FleetSettings
from gpuscale.monitor.fleet.join_servicer import Joined, Repeats
from tests.support.cli import run_cli
from tests.support.clock import ManualClock
from tests.support.first_host import Site, first_host, programs
from tests.support.ports import free_port
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("lead_outlasts_stalls")


@dataclass
class Fleet:
    """A fleet with an authority, of which everybody on loopback is admin."""

    channel: grpc.aio.Channel
    clock: ManualClock

    def __post_init__(self) -> None:
        self.join = api.JoinServiceStub(self.channel)

    async def token(self, **what: Any) -> str:
        with rpc_errors():
            made = await self.join.CreateJoinToken(api.CreateJoinTokenRequest(**what))
        return made.token

    async def joined(self, shown: str, node: str = "gpu-1", csr: bytes | None = None) -> x509.Certificate:
        key = make_request()[1] if csr is None else csr
        request = api.JoinRequest(token=shown, node=node, csr=key, hosts=["gpu-1.example"])
        with rpc_errors():
            answer = await self.join.Join(request)
        return x509.load_pem_x509_certificate(answer.certificate_pem.encode())

    async def refusal(self, shown: str, node: str = "gpu-1", csr: bytes | None = None) -> str:
        with pytest.raises(errors.GpuscaleError) as refused:
            await self.joined(shown, node, csr)
        return refused.value.reason


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncGenerator[Fleet]:
    make_authority("test").write(tmp_path, "ca")
    run_cli("certs", "init", "--dir", str(tmp_path), "--host", "Services.Example")
    run_cli("certs", "issue", "bob", "--dir", str(tmp_path))
    (tmp_path / "revoked.toml").touch()
    (tmp_path / "data").mkdir(mode=0o700)
    table = f'[tokens.Ops]\nrole = "viewer"\nsha256 = "{"0" * 64}"\n[certificates.batch]\nmax_priority = 1\n'
    (tmp_path / "tokens.toml").write_text(table)
    settings = FleetSettings(
        authority_dir=tmp_path,
        data_dir=tmp_path / "data",
        tls_cert_file=tmp_path / "server.crt",
        tls_key_file=tmp_path / "server.key",
        tls_client_ca_file=tmp_path / "ca.crt",
        revoked_file=tmp_path / "revoked.toml",
        tokens_file=tmp_path / "tokens.toml",
    )
    clock = ManualClock()
    server = Server(ServerOptions(), Authenticator())
    async with open_fleet(settings, clock=clock) as registrations:
        server.add(*registrations)
        async with open_channel(server.bind()) as channel, server:
            yield Fleet(channel, clock)


async def test_a_join_token_is_good_for_so_many_hosts_and_so_long(fleet: Fleet) -> None:
    shown = await fleet.token(uses=2, ttl=to_duration(60))
    assert await fleet.refusal(shown[:-1] + "~") == "JOIN_TOKEN_INVALID"
    assert await fleet.refusal(shown, csr=b"no request") == "INVALID_ARGUMENT"
    signed = await fleet.joined(shown)
    subject = subject_of(signed)
    assert subject.uri == "spiffe://gpuscale.local/gpuscale/agent/gpu-1"
    usage = signed.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert (subject.hosts, list(usage)) == ((), [ExtendedKeyUsageOID.CLIENT_AUTH])
    assert 6.9 < (signed.not_valid_after_utc - signed.not_valid_before_utc).total_seconds() / 86_400 < 7.1
    with rpc_errors():
        [listed] = (await fleet.join.ListJoinTokens(api.ListJoinTokensRequest())).join_tokens
    assert (listed.name, listed.uses_left) == (f"joinTokens/{shown.partition('.')[0]}", 1)
    assert shown.partition(".")[2] not in str(listed)
    await fleet.joined(shown, "gpu-2")
    assert await fleet.refusal(shown, "gpu-3") == "JOIN_TOKEN_INVALID"
    late, deleted = await fleet.token(ttl=to_duration(60)), await fleet.token(ttl=to_duration(3600))
    fleet.clock.advance(60)
    assert await fleet.refusal(late) == "JOIN_TOKEN_INVALID"
    with rpc_errors():
        await fleet.join.DeleteJoinToken(api.DeleteJoinTokenRequest(name=deleted.partition(".")[0]))
    assert await fleet.refusal(deleted) == "JOIN_TOKEN_INVALID"


async def test_join_tokens_are_of_hosts_and_found_by_them(fleet: Fleet) -> None:
    for node in ("gpu-1", "nodes/gpu-2"):
        await fleet.token(node=node)
    of_one = api.ListJoinTokensRequest(filter='node = "nodes/gpu-2" AND role = AGENT')
    [found] = (await fleet.join.ListJoinTokens(of_one)).join_tokens
    got = await fleet.join.GetJoinToken(api.GetJoinTokenRequest(name=found.name))
    assert (got.join_token, found.node) == (found, "nodes/gpu-2")
    for allowed in (False, True):
        await fleet.join.DeleteJoinToken(api.DeleteJoinTokenRequest(name=found.name, allow_missing=allowed))
    with pytest.raises(errors.InvalidArgumentError) as refused:
        await fleet.token(node="endpoints/x")
    assert [one.field for one in refused.value.violations] == ["node"]


@pytest.mark.parametrize("kind", [0, api.HostKind.HOST_KIND_GATEWAY])
async def test_a_use_that_cannot_be_stored_is_given_back(
    fleet: Fleet, tmp_path: Path, kind: "api.HostKind.ValueType"
) -> None:
    shown = await fleet.token(node="gpu-1" if kind else "", kind=kind)
    (tmp_path / "data").rename(tmp_path / "away")
    for _ in range(2):
        assert await fleet.refusal(shown) == "UNAVAILABLE"
    (tmp_path / "away").rename(tmp_path / "data")
    await fleet.joined(shown)
    assert await fleet.refusal(shown) == "JOIN_TOKEN_INVALID"


async def test_a_call_that_makes_a_token_may_be_repeated_while_that_may_be_used(fleet: Fleet) -> None:
    wanted = {"request_id": str(uuid.uuid4()), "ttl": to_duration(60)}
    made = await fleet.token(**wanted)
    assert await fleet.token(**wanted) == made
    assert await fleet.token(**{**wanted, "request_id": str(uuid.uuid4())}) != made
    with pytest.raises(errors.AlreadyExistsError) as refused:
        await fleet.token(**wanted, uses=2)
    assert refused.value.reason == "REQUEST_ID_REUSED"
    fleet.clock.advance(60)
    assert await fleet.token(**wanted) != made


def test_nobody_is_given_the_secret_of_another_caller() -> None:
    repeats = Repeats[str](ManualClock())
    request = api.CreateLoginCodeRequest(name="alice", request_id=str(uuid.uuid4()))

    def found() -> list[str | None]:
        set_principal(Principal("ann", Role.ADMIN, "token"))
        repeats.keep(request, "secret", 1e9)
        own = repeats.find(request)
        set_principal(Principal("bob", Role.ADMIN, "token"))
        return [own, repeats.find(request)]

    assert copy_context().run(found) == ["secret", None]


async def test_nobody_joins_under_the_name_of_somebody_else(fleet: Fleet) -> None:
    shown = await fleet.token(uses=9)
    for name in ("services.example", "local", "services", "ops", "batch", "bob"):
        assert await fleet.refusal(shown, name) == "NODE_NAME_TAKEN", name
    stream = monitor_internal.TelemetryServiceStub(fleet.channel).StreamTelemetry()
    await stream.write(
        monitor_internal.StreamTelemetryRequest(
            hello=monitor_internal.Hello(node="gpu-1", epoch="00000000-0000-4000-8000-000000000001")
        )
    )
    await eventually(lambda: _is_known(fleet, "gpu-1"))
    assert await fleet.refusal(shown, "gpu-1") == "NODE_EXISTS"
    own = await fleet.token(node="gpu-1")
    assert await fleet.refusal(own, "gpu-2") == "JOIN_TOKEN_OF_OTHER_NODE"
    await fleet.joined(own)
    operator = options_pb2.ROLE_OPERATOR
    for what in ({"role": operator}, {"role": options_pb2.ROLE_ADMIN, "node": "a"}, {"node": "anonymous"}):
        with pytest.raises(errors.InvalidArgumentError):
            await fleet.token(**what)
    gateway = await fleet.joined(await fleet.token(role=operator, node="gateway-2"), "gateway-2")
    assert subject_of(gateway).uri == "spiffe://gpuscale.local/gpuscale/operator/gateway-2"


async def test_a_host_of_services_gets_what_its_kind_needs_and_no_other_host_does(fleet: Fleet) -> None:
    async def joins(kind: api.HostKind.ValueType, **more: Any) -> api.JoinResponse:
        shown = await fleet.token(kind=kind, node="second")
        request = {"token": shown, "node": "second", "csr": make_request()[1], "hosts": ["second.example"]}
        with rpc_errors():
            answer = await fleet.join.Join(api.JoinRequest(**{**request, **more}))
            with pytest.raises(errors.UnauthenticatedError):
                await fleet.joined(shown, "second")
        return answer

    standby, gateway = [
        await joins(kind) for kind in (api.HostKind.HOST_KIND_STANDBY, api.HostKind.HOST_KIND_GATEWAY)
    ]
    own = "spiffe://gpuscale.local/gpuscale"
    found = {
        name: subject_of(x509.load_pem_x509_certificate(pem.encode()))
        for name, pem in {
            "standby": standby.certificate_pem,
            "its gateway": standby.gateway_certificate_pem,
            "gateway": gateway.certificate_pem,
        }.items()
    }
    names = ("second.example", "localhost", "127.0.0.1")
    assert (found["standby"].hosts, found["standby"].uri) == (names, f"{own}/operator/services")
    assert (found["its gateway"].hosts, found["its gateway"].uri) == (names, f"{own}/gateway/second")
    assert (found["gateway"].hosts, found["gateway"].uri) == (names, f"{own}/gateway/second")
    assert "[tokens.Ops]" in standby.tokens
    assert gateway.gateway_certificate_pem == ""
    for wrong in ([], ["a b"], ["*.example"], ["ä"]):
        with pytest.raises(errors.InvalidArgumentError, match="hosts"):
            await joins(api.HostKind.HOST_KIND_GATEWAY, hosts=wrong)
    for more in ({"node": ""}, {"uses": 2}, {"role": Role.OPERATOR.value}):
        with pytest.raises(errors.InvalidArgumentError, match="host of services"):
            await fleet.token(**{"kind": api.HostKind.HOST_KIND_STANDBY, "node": "second", **more})
    request = api.JoinRequest(
        token=await fleet.token(), node="gpu-5", csr=make_request()[1], hosts=["second.example"]
    )
    with rpc_errors():
        plain = await fleet.join.Join(request)
    assert subject_of(x509.load_pem_x509_certificate(plain.certificate_pem.encode())).hosts == ()
    assert (plain.tokens, plain.gateway_certificate_pem) == ("", "")


async def test_a_name_is_one_hosts_until_it_is_forgotten(fleet: Fleet, tmp_path: Path) -> None:
    shown, file = await fleet.token(uses=9), tmp_path / "data" / "joined"
    await fleet.joined(shown, "gpu-9")
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    assert Joined(file).what("gpu-9") == "agent", "a restart would free it"
    assert await fleet.refusal(shown, "gpu-9") == "NODE_EXISTS"
    await fleet.joined(await fleet.token(node="gpu-9"), "gpu-9")
    with rpc_errors():
        await api.FleetServiceStub(fleet.channel).ForgetNode(api.ForgetNodeRequest(name="nodes/gpu-9"))
    assert "gpu-9" not in Joined(file)
    await fleet.joined(shown, "gpu-9")
    gone = api.ForgetNodeRequest(name="nodes/gpu-10", allow_missing=True)
    await api.FleetServiceStub(fleet.channel).ForgetNode(gone)


def test_an_authority_needs_what_keeps_its_hosts_apart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs data_dir"):
        FleetSettings(authority_dir=tmp_path)
    pair = {"tls_cert_file": tmp_path, "tls_key_file": tmp_path, "tls_client_ca_file": tmp_path}
    with pytest.raises(ValueError, match="authority_dir needs revoked_file"):
        FleetSettings(authority_dir=tmp_path, data_dir=tmp_path, **pair)


def test_an_authority_signs_with_its_newest_key_and_knows_what_it_signed(tmp_path: Path) -> None:
    first, second = make_authority("first"), make_authority("second")
    first.write(tmp_path, "ca")
    signer, whom = Signer(tmp_path, 1, "lab"), CertificateSubject("a", uri="spiffe://lab/gpuscale/agent/a")
    assert signer.has_signed(issue(first, whom, 1).certificate)
    assert not signer.has_signed(issue(make_authority("first"), whom, 1).certificate)
    second.write(tmp_path, "ca", first.certificate)
    signed = x509.load_pem_x509_certificate(signer.sign(make_request()[1], whom).encode())
    signed.verify_directly_issued_by(second.certificate)
    assert signer.has_signed(issue(first, whom, 1).certificate)


async def test_a_request_must_be_signed_by_a_strong_key_of_its_own(fleet: Fleet) -> None:
    shown = await fleet.token()
    name = x509.Name([])
    for size in (1024, 2048):
        key = rsa.generate_private_key(65_537, size)
        csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
        text = csr.public_bytes(Encoding.DER)
        for bad in [text[:-1] + bytes([text[-1] ^ 1]), b"x" * 10_000] + ([text] if size == 1024 else []):
            with pytest.raises(errors.InvalidArgumentError) as refused:
                await fleet.joined(shown, csr=bad)
            assert [one.field for one in refused.value.violations] == ["csr"]
    await fleet.joined(shown, csr=text)


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Site]:
    monkeypatch.setattr(certificates, "CHECK_PERIOD", 0.0)
    monkeypatch.setattr(tls, "CLIENT_PERIOD", 0.0)
    async with first_host(tmp_path) as made:
        yield made


async def _is_known(fleet: Fleet, node: str) -> bool:
    nodes = (await api.FleetServiceStub(fleet.channel).ListNodes(api.ListNodesRequest())).nodes
    return f"nodes/{node}" in {one.name for one in nodes}


def audit(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / "audit.jsonl").read_text().splitlines(keepends=True)
        if line[-1] == "\n"
    ]


def agent(folder: Path) -> AgentSettings:
    """The settings that `join` wrote, for simulated GPUs."""
    found: Mapping[str, Any] = tomllib.loads((folder / "gpuscale.toml").read_text())["agent"]
    return AgentSettings.model_validate({**found, "listen": "127.0.0.1:0", "source": "simulated"})


async def test_a_host_joins_with_one_line_and_its_certificate_is_renewed_until_it_is_revoked(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(certificate_renewal, "LOOK_PERIOD", 0.05)
    folder = tmp_path / "host"
    pair = folder / "state/host/host.pem"
    created = await site.as_admin("join-token", "create")
    found = re.fullmatch(
        r"gpuscalectl (join \S+) --token (\S+) (--ca-hash sha256:[0-9a-f]{64})\n", created.out
    )
    assert found is not None, created
    words, shown, digest = found[1].split(), found[2], found[3].split()
    more = ("--token-file", "-", "--node", "gpu-7", "--dir", str(folder), "--at", f"fleet={site.fleet}")
    wrong = await site.ctl(*words, "--ca-hash", f"sha256:{'0' * 64}", *more, stdin=shown)
    assert (wrong.code, "does not match --ca-hash" in wrong.err) == (4, True)
    planned = await site.ctl(*words, *digest, *more, "--plan", stdin=shown)
    assert 'cert_file = "' in planned.out
    assert not folder.exists()
    joined = await site.ctl(*words, *digest, *more, stdin=f"{shown}\n")
    assert joined.code == 0, joined.err
    assert shown.partition(".")[2] not in joined.out + joined.err + (folder / "gpuscale.toml").read_text()
    assert oct(pair.stat().st_mode & 0o777) == "0o600"
    assert pair.with_name("ca.crt").read_text() == (site.pki / "ca.crt").read_text()
    assert (await site.ctl(*words, *digest, *more)).code == 0, "a host that has joined needs no token"
    more = (*more[:-3], str(tmp_path / "another"), *more[-2:])
    again = await site.ctl(*words, *digest, *more, stdin=shown)
    assert (again.code, "used up or expired" in again.err) == (8, True)

    def joins() -> list[tuple[str | None, str, str]]:
        lines = [line for line in audit(tmp_path) if line["method"].endswith("/Join")]
        return [(line["who"], line["resource"], line["result"]) for line in lines]

    await eventually(lambda: joins() == [(None, "gpu-7", "OK"), (None, "gpu-7", "UNAUTHENTICATED")])

    async def online() -> bool:
        return "ONLINE" in (await site.as_admin("get", "nodes")).out

    first = pair.read_bytes()
    async with programs(agent=(serve_agent, agent(folder))):
        await eventually(online)
        assert pair.read_bytes() == first
        monkeypatch.setattr(certificate_renewal, "RENEWED_AT", 0.0)
        await eventually(lambda: pair.read_bytes() != first)
        assert await online()
        serial = x509.load_pem_x509_certificate(pair.read_bytes()).serial_number
        assert serial != x509.load_pem_x509_certificate(first).serial_number
        revoked = ("--revoked-file", str(site.settings.revoked_file))
        assert (await site.ctl("certs", "revoke", "gpu-7", *revoked)).code == 0
        await eventually(lambda: "the client certificate was revoked" in caplog.text)
        told = await site.ctl("doctor", "--only", "host", "--config", str(folder / "gpuscale.toml"))
        assert re.search(r"fleet_address .* certificate was revoked\n +do: .*gpuscalectl leave", told.out), (
            told
        )
    assert [(await site.ctl("leave", "--dir", str(folder))).code for _ in range(2)] == [0, 4]
    assert not {"gpuscale.toml", "ca.crt", "host.pem"} & {path.name for path in folder.rglob("*")}


async def test_a_certificate_that_has_expired_is_told_with_what_gets_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a host, and of one of services: gRPC says that nothing answers, or the socket closed."""
    own, authority = tmp_path / certificate_renewal.SERVICES_FILES[1], make_authority("gone")
    own.parent.mkdir()
    subject = CertificateSubject("gpu-7", uri="spiffe://gpuscale.local/gpuscale/agent/gpu-7")
    own.write_bytes(issue(authority, subject, 0.0).certificate.public_bytes(Encoding.PEM))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port()}") as fleet, TaskScope() as tasks:
        for work in (
            certificate_renewal.renew_certificate(fleet, own, tmp_path),
            certificate_renewal.follow_fleet(fleet, tmp_path),
        ):
            tasks.spawn("certificate", work)
        told = f"the certificate {own} has expired; for another, gpuscalectl join here with a token of: "
        lines = [f"{told}gpuscalectl join-token create {kind}--node gpu-7" for kind in ("", "--kind KIND ")]
        await eventually(lambda: all(one in caplog.text for one in lines))


async def test_what_was_killed_on_its_way_is_typed_again(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another token, where the certificate had come; and what is there stays."""
    found = (await site.as_admin("join-token", "create")).out.split()
    shown, digest = found[4], found[5:]
    folder, where = tmp_path / "host", f"{site.gateway},second:7070"
    settings, pair = folder / "gpuscale.toml", folder / "state/host/host.pem"
    typed = ("join", site.gateway, *digest, "--node", "gpu-7", "--dir", str(folder))
    assert (await site.ctl(*typed, "--token", shown)).code == 0
    written, first = settings.read_text(), pair.read_bytes()
    settings.unlink()
    for other in (("--node", "gpu-8"), ("--ca-hash", f"sha256:{'0' * 64}")):
        assert (await site.ctl(*typed, *other)).code != 0
        assert not settings.exists()
    assert (await site.ctl(*typed)).code == 0
    assert (settings.read_text(), pair.read_bytes()) == (written, first)
    planned = await site.ctl(*typed, "--plan")
    assert (planned.code, planned.out) == (0, f"# {settings}\n{written}"), planned.err
    earlier = re.sub(r"(?m)^(work_socket|agent_address) = .*\n", "", written)
    settings.write_text(f"{earlier}[templates.mine]\ncommand = ['true']\n")
    assert (await site.ctl(*typed)).code == 0
    assert settings.read_text().startswith(earlier)
    pair.with_name("ca.crt").unlink()  # `leave` got as far
    assert [(await site.ctl("leave", "--dir", str(folder))).code for _ in range(2)] == [0, 4]
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["gpuscale.toml.left"]
    assert "templates.mine" in (folder / "gpuscale.toml.left").read_text()

    made = await site.as_admin("join-token", "create", "--kind", "standby", "--node", "second", "-o", "json")
    folder = tmp_path / "second"
    url = "postgresql://u@db/gpuscale"
    names = ("--role", "standby", "--node", "second", "--host", "second", "--postgresql", url)
    typed = ("join", where, *digest, *names, "--dir", str(folder))
    joined = await site.ctl(*typed, "--token", json.loads(made.out)["token"])
    assert joined.code == 0, joined.err
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "gpuscale.toml").unlink()
    assert (await site.ctl(*typed, "--host", "third")).code != 0
    assert (await site.ctl(*typed)).code == 0
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    moved = (*typed[:-3], f"{url}-2", *typed[-2:])
    assert (await site.ctl(*moved)).code == 0
    assert (folder / "database.url").read_text() == f"{url}-2"
    for module in (hosts, joining):  # it has been away for longer than its certificate lasts
        monkeypatch.setattr(module, "counts", lambda file: file.name == "authority.pem")
    refused = await site.ctl(*typed)
    assert "has expired; for another, pass a token of: join-token create --kind standby --node" in refused.err
    made = await site.as_admin("join-token", "create", "--kind", "standby", "--node", "second", "-o", "json")
    assert (await site.ctl(*typed, "--token", json.loads(made.out)["token"])).code == 0
    assert {path.name for path in before if path.read_bytes() != before[path]} == {"server.pem", "gate.pem"}


async def test_a_certificate_is_renewed_for_the_caller_on_its_connection_alone(site: Site) -> None:
    """Not for whoever has a token, those whom a gateway speaks for (that would hand out the gateway's), or operators who never joined."""
    request = api.RenewCertificateRequest(csr=make_request()[1])
    mine = ClientTls(site.pki / "ca.crt", site.pki / "services.crt", site.pki / "services.key")
    secret = SecretStr(site.admin.read_text().strip())
    calls = (
        (site.fleet, mine, None),
        (site.fleet, mine, None),
        (site.fleet, mine, secret),
        (site.gateway, mine, secret),
    )
    outcomes: list[str] = []

    async def join() -> None:
        made = await site.as_admin(
            "join-token", "create", "--node", "services", "--role", "operator", "-o", "json"
        )
        asked = api.JoinRequest(token=json.loads(made.out)["token"], node="services", csr=request.csr)
        async with open_channel(site.gateway, tls=ClientTls(site.pki / "ca.crt")) as channel:
            await api.JoinServiceStub(channel).Join(asked, timeout=30)

    async with AsyncExitStack() as stack:
        for address, files, shown in calls:
            channel = await stack.enter_async_context(open_channel(address, tls=files, token=shown))
            try:
                with rpc_errors():
                    answer = await api.CertificateServiceStub(channel).RenewCertificate(request, timeout=30)
                signed = x509.load_pem_x509_certificate(answer.certificate_pem.encode())
                outcomes.append(subject_of(signed).uri)
            except errors.GpuscaleError as error:
                outcomes.append(error.reason)
            if len(outcomes) == 1:
                await join()
    assert outcomes == [
        "NOT_RENEWABLE",
        "spiffe://gpuscale.local/gpuscale/operator/services",
        "NO_CERTIFICATE",
        "UNIMPLEMENTED",
    ]


async def test_only_gateways_that_joined_follow_the_files_of_the_fleet(site: Site, tmp_path: Path) -> None:
    """First no host of services has joined as `edge`; then one has, and the fleet is asked through a gateway too."""
    place, made = (
        tmp_path / "edge",
        await site.as_admin("join-token", "create", "--kind", "gateway", "--node", "edge", "-o", "json"),
    )
    for name, role in (("edge", "gateway"), ("agent-1", "agent")):
        assert (await site.ctl("certs", "issue", name, "--role", role, "--dir", str(site.pki))).code == 0

    async def outcome(address: str, certificate: Path, key: Path) -> str:
        tls = ClientTls(site.pki / "ca.crt", certificate, key)
        caller = ((CALLER_KEY, "operator/edge"),) if certificate.stem != "agent-1" else ()
        async with open_channel(address, tls=tls) as channel:
            request = monitor_internal.FollowFilesRequest(csr=make_request()[1])
            call = monitor_internal.ServicesHostServiceStub(channel).FollowFiles(
                request, metadata=caller, timeout=30
            )
            try:
                with rpc_errors():
                    return subject_of(_read((await anext(aiter(call))).files.certificate_pem)).uri
            except errors.GpuscaleError as error:
                return error.reason

    issued = site.pki / "edge.crt", site.pki / "edge.key"
    before = [
        await outcome(site.fleet, *issued),
        await outcome(site.fleet, site.pki / "agent-1.crt", site.pki / "agent-1.key"),
    ]
    assert before == ["NOT_RENEWABLE", "ROLE_TOO_LOW"]
    shown = json.loads(made.out)
    line = (
        "join",
        site.gateway,
        "--token",
        shown["token"],
        "--ca-hash",
        shown["caHash"],
        "--role",
        "gateway",
    )
    joined = await site.ctl(*line, "--node", "edge", "--host", "127.0.0.1", "--dir", str(place))
    assert joined.code == 0, joined.err
    own = place / "state/host/pki/gate.pem"
    assert _days(own) > 390, "it could not start weeks after it joined"
    async with (
        open_channel(site.fleet, tls=ClientTls(site.pki / "ca.crt", own, own)) as fleet,
        TaskScope() as tasks,
    ):
        tasks.spawn("files", certificate_renewal.follow_fleet(fleet, place / "state/host"))
        await eventually(lambda: _days(own) < 8)
    assert await outcome(site.fleet, own, own) == "spiffe://gpuscale.local/gpuscale/gateway/edge"
    assert await outcome(site.gateway, own, own) == "UNIMPLEMENTED"
    assert await outcome(site.fleet, *issued) == "NOT_RENEWABLE", "it names no host"
    assert (await site.as_admin("forget", "node", "edge")).code == 0
    assert await outcome(site.fleet, own, own) == "NOT_RENEWABLE", "it joined no more"
    revoked = ("certs", "revoke", "edge", "--revoked-file", str(site.pki.parent / "revoked.toml"))
    assert (await site.ctl(*revoked)).code == 0
    assert await outcome(site.fleet, own, own) == "CERTIFICATE_REVOKED"
    assert (await site.ctl("leave", "--dir", str(place))).code == 0
    assert [file.name for file in place.rglob("*") if file.is_file()] == ["gpuscale.toml.left"]


def _days(file: Path) -> int:
    found = _read(file.read_text())
    return (found.not_valid_after_utc - found.not_valid_before_utc).days


def _read(pem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode())


async def test_an_authority_is_kept_until_hosts_that_joined_have_left_it(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host leaves it as soon as it has the new ca.crt; its stream, once open, would hide that it cannot come back."""
    monkeypatch.setattr(certificate_renewal, "LOOK_PERIOD", 0.05)
    folder, at = tmp_path / "host", ("--dir", str(site.pki))
    _, _, _, _, shown, *digest = (await site.as_admin("join-token", "create")).out.split()
    typed = ("join", site.gateway, "--token", shown, *digest, "--node", "gpu-7", "--dir", str(folder))
    assert (await site.ctl(*typed, "--at", f"fleet={site.fleet}")).code == 0

    async def states() -> str:
        listed = await site.ctl(
            "certs", "list", *at, "-o", 'jsonpath={.certificates[?(@.name=="gpu-7")].state}'
        )
        return listed.out.strip()

    assert await states() == "VALID"
    pair = folder / "state/host/host.pem"
    first = pair.read_bytes()
    async with programs(agent=(serve_agent, agent(folder))):
        for step in ("rotate-ca", "renew"):
            assert (await site.ctl("certs", step, *at)).code == 0
        refused = await site.ctl("certs", "rotate-ca", "--finish", *at)
        assert (refused.code, "gpu-7 joined" in refused.err) == (2, True), refused
        assert await states() == "OLD AUTHORITY"
        pair.with_name("ca.crt").write_text((site.pki / "ca.crt").read_text())
        await eventually(lambda: pair.read_bytes() != first)
        renewed = pair.read_bytes()
        assert await states() == "VALID"
        ended = await site.ctl("certs", "rotate-ca", "--finish", *at)
        assert ended.code == 0, ended.err
    assert pair.read_bytes() == renewed, "once is enough"


async def test_doctor_asks_as_a_gateway_for_somebody(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With its certificate alone it was a caller without identity: logged, counted, and soon an alert."""
    config = tmp_path / "gateway.toml"
    config.write_text(
        settings_text({"gateway": site.gateway_settings.model_dump(mode="json", exclude_unset=True)})
    )
    caplog.clear()
    told = await site.ctl("doctor", "--only", "host", "--config", str(config))
    assert f"OK     service gateway fleet_address   {site.fleet} answers" in told.out, told
    assert "no valid identity" not in caplog.text
