"""Who a caller is, for every way to connect, what a tokens file may hold, and the role of every method."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from pydantic import SecretStr

from gpuscale.api.allocator import v1 as _allocator  # noqa: F401  (fills the pool)
from gpuscale.api.types.v1 import options_pb2
from gpuscale.common import errors
from gpuscale.common.security import auth
from gpuscale.common.security.auth import (
    ANONYMOUS,
    CALLER_KEY,
    LOCAL,
    Authenticator,
    Limits,
    Principal,
    Role,
    TokenFile,
    current_principal,
    find_method,
    forwarded_as,
    require,
)
from tests.support.tokens import bearer, token, write_tokens

REMOTE, LOOPBACK, UNIX = "ipv4:192.0.2.7:41000", "ipv4:127.0.0.1:41000", "unix:"
SPIFFE = "spiffe://example.org/gpuscale/operator/alice"


class Context:
    """What the authenticator asks a gRPC context."""

    def __init__(
        self, peer: str, *, tls: bool = False, spiffe: str | None = None, metadata: Any = ()
    ) -> None:
        self._peer, self._tls, self._spiffe, self._metadata = peer, tls, spiffe, metadata

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> Mapping[str, list[bytes]]:
        found = {"transport_security_type": [b"ssl" if self._tls else b"insecure"]}
        return found if self._spiffe is None else {**found, "peer_spiffe_id": [self._spiffe.encode()]}

    def invocation_metadata(self) -> Sequence[tuple[str, Any]]:
        return self._metadata


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens.toml", alice="operator", bob="viewer")


def who(authenticator: Authenticator, context: Context) -> Principal | str:
    """The caller, or the reason for which it is refused."""
    try:
        return authenticator.identify(context, "/s/M", context.peer(), context.invocation_metadata())  # type: ignore[arg-type]
    except errors.UnauthenticatedError as error:
        return error.reason


def test_roles_are_those_of_the_contract() -> None:
    named = {f"ROLE_{role.name}": role.value for role in Role}
    contract = dict(options_pb2.Role.items())
    assert {**named, "ROLE_UNSPECIFIED": 0, "ROLE_ANYONE": 5} == contract


@pytest.mark.parametrize("peer", [LOOPBACK, "ipv4:127.8.9.10:1", "ipv6:[::1]:1", "ipv6:%5B::1%5D:1"])
def test_without_configuration_this_host_is_admin(peer: str) -> None:
    assert who(Authenticator(), Context(peer)) == LOCAL
    assert (LOCAL.name, LOCAL.role, LOCAL.kind) == ("local", Role.ADMIN, "local")


@pytest.mark.parametrize(
    "peer", [REMOTE, "ipv6:[2001:db8::1]:1", "ipv6:[::127.0.0.1]:1", "ipv4:12.7.0.1:1", "ipv6:[::1234]:1", ""]
)
def test_without_configuration_other_hosts_are_refused(peer: str) -> None:
    assert who(Authenticator(), Context(peer)) == "INSECURE_TRANSPORT"
    assert who(Authenticator(), Context(peer, tls=True)) == "TOKEN_MISSING"


def test_insecure_remote_trusts_the_network_where_nothing_else_is_configured(token_file: Path) -> None:
    assert who(Authenticator(insecure_allow_remote=True), Context(REMOTE)) == ANONYMOUS
    with_tokens = Authenticator(tokens_file=token_file, insecure_allow_remote=True)
    assert who(with_tokens, Context(REMOTE)) == "TOKEN_MISSING"
    assert who(with_tokens, Context(REMOTE, metadata=bearer("alice"))) == Principal(
        "alice", Role.OPERATOR, "token"
    )


@pytest.mark.parametrize("internal", [None, SecretStr("the-parts-own")])
def test_the_unix_socket_is_for_who_has_its_token_alone(token_file: Path, internal: SecretStr | None) -> None:
    """Whatever else lets callers in, and whoever may open it: replicas run as the same user."""
    shown = (("authorization", "Bearer the-parts-own"),)
    wrong = ((), bearer("alice"), (*shown, *shown), (("authorization", "Bearer the-parts-ow\xfc"),))
    for tokens_file in (None, token_file):
        authenticator = Authenticator(
            tokens_file=tokens_file, internal_token=internal, insecure_allow_remote=True
        )
        for metadata in wrong:
            for peer in (UNIX, "unix:/a/name", "unix-abstract:a-name"):
                assert who(authenticator, Context(peer, metadata=metadata)) == "TOKEN_INVALID"
        expected = LOCAL if internal else "TOKEN_INVALID"
        assert who(authenticator, Context(UNIX, metadata=shown)) == expected
        assert who(authenticator, Context(LOOPBACK, metadata=shown)) != LOCAL or tokens_file is None


def test_a_token_in_plain_text_from_another_host_is_refused(token_file: Path) -> None:
    authenticator = Authenticator(tokens_file=token_file)
    assert who(authenticator, Context(REMOTE, metadata=bearer("alice"))) == "INSECURE_TRANSPORT"
    assert who(authenticator, Context(REMOTE, tls=True, metadata=bearer("alice"))) == Principal(
        "alice", Role.OPERATOR, "token"
    )


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", ""),),
        (("authorization", "Bearer"),),
        (("authorization", "Bearer "),),
        (("authorization", token("alice")),),
        (("authorization", "Basic YTpi"),),
        (("authorization", f"Bearer {token('alice')} more"),),
        (("authorization", "Bearer " + "x" * 13000),),
        (("authorization", b"Bearer bytes"),),
        (*bearer("alice"), *bearer("alice")),
    ],
)
def test_malformed_tokens(token_file: Path, metadata: Sequence[tuple[str, Any]]) -> None:
    assert (
        who(Authenticator(tokens_file=token_file), Context(LOOPBACK, metadata=metadata)) == "TOKEN_MALFORMED"
    )


def test_certificates_name_callers_only_where_they_are_accepted() -> None:
    context = Context(REMOTE, tls=True, spiffe=SPIFFE)
    alice = Principal("alice", Role.OPERATOR, "certificate")
    assert who(Authenticator(accept_certificates=True), context) == alice
    assert who(Authenticator(), context) == "TOKEN_MISSING"
    local = Context(LOOPBACK, tls=True, spiffe=SPIFFE)
    assert who(Authenticator(accept_certificates=True), local) == alice
    found = who(Authenticator(accept_certificates=True), Context(LOOPBACK, tls=True))
    assert found == "CERTIFICATE_WITHOUT_IDENTITY"


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://example.org/other/operator/alice",
        "spiffe://example.org/gpuscale/root/alice",
        "spiffe://example.org/gpuscale/operator/",
        "spiffe://example.org/gpuscale/operator/Alice",
        "spiffe://example.org/gpuscale/operator/a/b",
        "https://example.org/gpuscale/operator/alice",
    ],
)
def test_certificates_without_our_identity(uri: str) -> None:
    certificate = Context(REMOTE, tls=True, spiffe=uri)
    assert who(Authenticator(accept_certificates=True), certificate) == "CERTIFICATE_WITHOUT_IDENTITY"


GATEWAY = "spiffe://example.org/gpuscale/gateway/gate"


def called_for(*values: str | bytes) -> tuple[tuple[str, Any], ...]:
    return tuple((CALLER_KEY, value) for value in values)


def test_a_gateways_certificate_speaks_for_whom_it_names(token_file: Path) -> None:
    token_file.write_text(token_file.read_text() + '[certificates.carol]\ntenants = ["ml"]\n')
    authenticator = Authenticator(tokens_file=token_file, accept_certificates=True)
    carol = Principal("carol", Role.ADMIN, "gateway", Limits(("ml",)), via="gate")
    context = Context(REMOTE, tls=True, spiffe=GATEWAY, metadata=called_for("admin/carol"))
    assert who(authenticator, context) == carol
    odd = Principal("a/b ü", Role.VIEWER, "token")
    assert who(
        authenticator, Context(REMOTE, tls=True, spiffe=GATEWAY, metadata=forwarded_as(odd))
    ) == Principal("a/b ü", Role.VIEWER, "gateway", via="gate")
    both = Context(REMOTE, tls=True, spiffe=GATEWAY, metadata=(*called_for("admin/carol"), *bearer("bob")))
    assert who(authenticator, both) == Principal("bob", Role.VIEWER, "token")


@pytest.mark.parametrize(
    "values",
    [
        *((), ("admin",), ("root/eve",), ("gateway/eve",), ("admin/",), ("admin/local",), ("admin/%6cocal",)),
        *(("admin/a%1fb",), ("admin/eve", "admin/eve"), (b"admin/eve",), ("admin/e ve",)),
    ],
)
def test_a_gateway_that_names_nobody_gets_nowhere(values: tuple[str | bytes, ...]) -> None:
    context = Context(REMOTE, tls=True, spiffe=GATEWAY, metadata=called_for(*values))
    assert who(Authenticator(accept_certificates=True), context) == "GATEWAY_WITHOUT_CALLER"


def test_nobody_but_a_gateway_calls_for_others(token_file: Path) -> None:
    """Neither with a certificate nor with a token; who is an admin without either may be less."""
    forged = called_for("admin/carol")
    certificate = Context(REMOTE, tls=True, spiffe=SPIFFE, metadata=forged)
    assert who(Authenticator(accept_certificates=True), certificate) == "NOT_A_GATEWAY"
    with_tokens = Authenticator(tokens_file=token_file)
    assert who(with_tokens, Context(LOOPBACK, metadata=forged)) == "TOKEN_MISSING"
    with_token = Context(LOOPBACK, metadata=(*forged, *bearer("bob")))
    assert who(with_tokens, with_token) == Principal("bob", Role.VIEWER, "token")
    carol = Principal("carol", Role.VIEWER, "gateway", via="local")
    assert who(Authenticator(), Context(LOOPBACK, metadata=called_for("viewer/carol"))) == carol
    assert forwarded_as(carol) == forwarded_as(LOCAL) == forwarded_as(None) == ()
    assert who(Authenticator(), Context(REMOTE, metadata=forged)) == "INSECURE_TRANSPORT"
    anonymous = who(Authenticator(insecure_allow_remote=True), Context(REMOTE, metadata=forged))
    assert anonymous == Principal("carol", Role.ADMIN, "gateway", via="anonymous")


def test_a_token_decides_before_a_certificate(token_file: Path) -> None:
    authenticator = Authenticator(tokens_file=token_file, accept_certificates=True)
    for metadata, found in ((bearer("bob"), "bob"), ((), "alice"), (bearer("nobody"), "TOKEN_INVALID")):
        caller = who(authenticator, Context(REMOTE, tls=True, spiffe=SPIFFE, metadata=metadata))
        assert (caller.name if isinstance(caller, Principal) else caller) == found


@pytest.mark.parametrize("name", ["local", "anonymous"])
def test_nobody_bears_the_name_of_callers_without_a_token(tmp_path: Path, name: str) -> None:
    """They would own, and could release, what a caller on loopback or of a trusted network holds."""
    with pytest.raises(errors.FailedPreconditionError, match=f"{name} stands for callers without a token"):
        Authenticator(tokens_file=write_tokens(tmp_path / "tokens.toml", **{name: "operator"}))
    spiffe = SPIFFE.replace("alice", name)
    certificate = Context(LOOPBACK, tls=True, spiffe=spiffe)
    assert who(Authenticator(accept_certificates=True), certificate) == "CERTIFICATE_WITHOUT_IDENTITY"


def test_roles_include_the_lower_ones() -> None:
    for mine in Role:
        for needed in Role:
            if mine >= needed:
                require(Principal("x", mine, "token"), needed)
            else:
                with pytest.raises(errors.PermissionDeniedError):
                    require(Principal("x", mine, "token"), needed)


def test_nobody_calls_outside_of_a_call() -> None:
    with pytest.raises(LookupError):
        current_principal()


def test_an_expired_token(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.toml", old="admin", new="admin")
    text = path.read_text().replace("[tokens.new]", "expires = 2001-01-01T00:00:00Z\n[tokens.new]")
    path.write_text(text + "expires = 2999-01-01T00:00:00+02:00\n")
    authenticator = Authenticator(tokens_file=path)
    assert who(authenticator, Context(LOOPBACK, metadata=bearer("old"))) == "TOKEN_EXPIRED"
    assert who(authenticator, Context(LOOPBACK, metadata=bearer("new"))) == Principal(
        "new", Role.ADMIN, "token"
    )


DIGEST = hashlib.sha256(b"secret").hexdigest()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tokens = 1", "tokens"),
        ("", "tokens"),
        ("[tokens.a", "at end of document"),
        (f'[tokens.a]\nrole = "root"\nsha256 = "{DIGEST}"', "tokens.a.role"),
        (f'[tokens.a]\nrole = 0\nsha256 = "{DIGEST}"', "tokens.a.role"),
        ('[tokens.a]\nrole = "admin"', "tokens.a.sha256"),
        (f'[tokens.a]\nrole = "admin"\nsha256 = "{DIGEST}"\ntenants = "ml"', "tokens.a.tenants"),
        ("[tokens]\n[certificates.a]\nmax_priority = 1001", "certificates.a.max_priority"),
        (f'[tokens.a]\nrole = "admin"\nsha256 = "{DIGEST[1:]}"', "tokens.a.sha256"),
        ('[tokens.a]\nrole = "admin"\nsha256 = "secret"', "tokens.a.sha256"),
        (
            f'[tokens.a]\nrole = "admin"\nsha256 = "{DIGEST}"\nexpires = 2027-01-01T00:00:00',
            "tokens.a.expires",
        ),
        (
            f'[tokens.a]\nrole = "admin"\nsha256 = "{DIGEST}"\nexpire = 2027-01-01T00:00:00Z',
            "tokens.a.expire",
        ),
        ("\udcff", "codec"),
        (None, "No such file"),
    ],
)
def test_tokens_files_that_cannot_be_used(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "tokens.toml"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(errors.FailedPreconditionError) as caught:
        TokenFile(path)
    assert caught.value.reason == "TOKENS_FILE"
    assert str(path) in caught.value.message
    assert problem in caught.value.message
    assert "secret" not in caught.value.message, "what stands in the file is not repeated"


def test_limits_stand_with_the_token_or_under_the_name_of_the_certificate(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "tokens.toml", bob="operator", ann="operator")
    more = 'tenants = ["ml", "x"]\nmax_priority = 5\n[certificates.cat]\ntenants = ["c"]\n'
    path.write_text(path.read_text() + more)
    limits = {name: TokenFile(path).principal(token(name)).limits for name in ("ann", "bob")}
    assert limits == {"ann": Limits(("ml", "x"), 5), "bob": Limits()}
    authenticator = Authenticator(tokens_file=path, accept_certificates=True)
    for name, found in (("cat", Limits(("c",))), ("dog", Limits())):
        spiffe = f"spiffe://lab/gpuscale/operator/{name}"
        caller = who(authenticator, Context(REMOTE, tls=True, spiffe=spiffe))
        assert caller == Principal(name, Role.OPERATOR, "certificate", found)
    assert (LOCAL.tenants, Principal("dog", Role.OPERATOR, "token").tenants) == (("local",), ("dog",))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock that a tokens file goes by; change its only item."""
    now = [1000.0]
    monkeypatch.setattr(auth.time, "monotonic", lambda: now[0])
    return now


def replace(path: Path, text: str) -> None:
    """Replace a file as careful writers do."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def test_a_changed_tokens_file_counts_within_a_second(token_file: Path, clock: list[float]) -> None:
    """Also for tokens that are taken away."""
    file = TokenFile(token_file)
    replace(token_file, write_tokens(token_file.with_name("other"), carol="admin").read_text())
    clock[0] += 1.0
    assert file.principal(token("carol")).name == "carol"
    with pytest.raises(errors.UnauthenticatedError):
        file.principal(token("alice"))


def test_a_bad_change_leaves_the_tokens_and_is_logged_once(
    token_file: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    file = TokenFile(token_file)
    replace(token_file, "[tokens.alice]\nrole = 'admin'\nsha256 = 'plain-secret'\n")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock[0] += 1.0
            assert file.principal(token("alice")) == Principal("alice", Role.OPERATOR, "token")
    (record,) = caplog.records
    assert "plain-secret" not in str(record.msg)
    replace(token_file, write_tokens(token_file.with_name("other"), carol="admin").read_text())
    clock[0] += 1.0
    assert file.principal(token("carol")).name == "carol"


def test_a_tokens_file_that_vanishes_leaves_the_tokens(token_file: Path, clock: list[float]) -> None:
    file = TokenFile(token_file)
    token_file.unlink()
    clock[0] += 1.0
    assert file.principal(token("bob")).name == "bob"


def test_the_file_is_not_looked_at_for_every_call(
    token_file: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TokenFile(token_file)
    looks: list[Path] = []
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path: looks.append(path) or stat(path))
    for _ in range(300):
        file.principal(token("alice"))
        clock[0] += 0.01
    assert 2 <= len(looks) <= 3


def test_methods_of_others() -> None:
    health = find_method("/grpc.health.v1.Health/Watch")
    assert health.role is None
    reflection = find_method("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    assert reflection.role is Role.VIEWER


@pytest.mark.parametrize(
    "path",
    [
        "/gpuscale.api.allocator.v1.AllocatorService/NoSuch",
        "/gpuscale.api.allocator.v1.AllocatorService",
        "/grpc.health.v1.Health/Other",
        *("/grpc.channelz.v1.Channelz/GetServers", "", "/", "//", "/\x00"),
    ],
)
def test_anything_else(path: str) -> None:
    assert find_method(path) is None


def test_a_method_that_was_given_no_role() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="test/forgotten.proto", package="test", syntax="proto3")
    file.dependency.append("google/protobuf/duration.proto")
    service = file.service.add(name="ForgottenService")
    service.method.add(
        name="Do", input_type=".google.protobuf.Duration", output_type=".google.protobuf.Duration"
    )
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    assert find_method("/test.ForgottenService/Do") is None
