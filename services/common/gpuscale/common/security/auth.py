"""Authentication: from a connection and its metadata to a `Principal`, and the role that each method needs.

| caller | is |
|---|---|
| unix socket | `local`, admin, with the token that the server made for its own parts; nobody else |
| unix socket of an agent | `local`, of role agent: what it admits, a lease token decides |
| loopback, neither tokens nor client certificates configured | `local`, admin |
| bearer token in the metadata `authorization` | what the tokens file says; only over TLS or from loopback |
| client certificate with `spiffe://<trust domain>/gpuscale/<role>/<name>` | that role and name |
| client certificate with `spiffe://<trust domain>/gpuscale/gateway/<name>` | whom the metadata `gpuscale-caller` names; nobody itself |
| plain text from elsewhere, `insecure_allow_remote`, nothing configured | `anonymous`, admin |
| metadata `gpuscale-lease-token` | whoever holds that lease: for the methods that take one, of the reservation that they name |
| standby of this service, by what its database says (`gpuscale.common.security.signed_callers`) | whom the metadata `gpuscale-forwarded` name |
| anybody else | refused with UNAUTHENTICATED |

A token that is sent decides alone, a lease token first, so that a wrong one is noticed; it is never looked past to a certificate.
A lease token is checked where its reservation is known; until then whoever shows it counts as unknown. A certificate that
has expired or was revoked since its connection was made is refused, whatever comes with it (`gpuscale.common.security.certificates`).

A gateway says in `gpuscale-caller` (`<role>/<name>`) whom it recognised. That counts from a certificate of role gateway, and
from who is trusted as an admin without showing anything: it may only lower what the caller may do. From any other
certificate it is refused, with or without a gateway between.

The tokens file says who may call with which bearer token, as SHA-256 digests:

    [tokens.alice]
    role = "operator"          # viewer, agent, operator or admin
    sha256 = "9f86d081..."     # `printf %s "$TOKEN" | sha256sum`
    expires = 2027-01-01T00:00:00Z  # optional, with its time zone
    label = "2026-11"          # optional: what lists and metrics call this secret
    previous = [{ sha256 = "…", label = "2026-10", expires = 2026-12-01T00:00:00Z }]  # optional: valid beside it
    tenants = ["ml", "vision"] # optional: whose quotas it may use, in place of its own
    max_priority = 10          # optional: the highest priority that it may ask for, in place of 0

    [certificates.bob]         # the same two, of the caller whom a client certificate names
    tenants = ["ml"]

    [logins]                   # lets in who has a token of `gpuscalectl login` with a code
    ca_file = "/etc/gpuscale/pki/ca.crt"    # the authority that signs them

    [oidc]                     # lets in whom a provider names, by its ID tokens
    issuer = "https://id.example"
    client_id = "gpuscale"
    name_claim = "email"       # optional: whose value, after prefix, is the caller's name; sub without it
    prefix = "oidc:"           # optional: keeps its names apart from those of tokens
    groups_claim = "groups"    # optional
    scopes = "openid email"    # optional: what `gpuscalectl login` asks for
    ca_file = "id-ca.crt"      # optional: authority of the provider's TLS

    [oidc.groups.ml-people]    # what members of a group may do; of several groups the most
    role = "operator"
    tenants = ["ml"]

    [revoked]                  # callers whose logins from before that time count no more
    "oidc:eve@example.org" = 2026-12-01T00:00:00Z

A token is 256 random bits or more, so that its plain digest tells nothing. The file is read again within a second of a
change; one that cannot be used leaves the tokens in force as they were.
"""

import hashlib
import hmac
import re
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from urllib.parse import quote, unquote, urlsplit

import grpc

from gpuscale.api.types.v1 import options_pb2
from gpuscale.common import wire
from gpuscale.common.errors import FailedPreconditionError, PermissionDeniedError, UnauthenticatedError
from gpuscale.common.names import LEASE_KEY, is_id
from gpuscale.common.security.followed import Followed, cause

if TYPE_CHECKING:
    from gpuscale.common.secrets import SecretStr
    from gpuscale.common.security.certificates import CertificateCheck
    from gpuscale.common.security.signed_callers import SignedCallers
    from gpuscale.common.security.token_tables import OidcSettings

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
"""A call, as servicers get it."""
Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]]"
"""What a caller sent along with a call."""


class Role(IntEnum):
    """What a caller may do; each role includes the ones before it. The numbers are the contract's."""

    VIEWER = options_pb2.ROLE_VIEWER
    AGENT = options_pb2.ROLE_AGENT
    OPERATOR = options_pb2.ROLE_OPERATOR
    ADMIN = options_pb2.ROLE_ADMIN


ANY_TENANT: Final = "*"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a caller other than an admin may request."""

    # whose quotas it may use, the one first that a request without a tenant counts against; its own name
    # alone where there are none. `*` stands for all: the autoscaler reserves for whoever made an endpoint
    tenants: tuple[str, ...] = ()
    max_priority: int = 0  # the highest priority that it may ask for


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller."""

    # whom the token or certificate names; "local" for callers of this host, "anonymous" for any other caller
    # of a server that was told to trust its network
    name: str
    role: Role  # what it may do
    kind: Literal["local", "token", "certificate", "gateway", "anonymous", "lease"]  # how it was recognised
    limits: Limits = Limits()  # what it may ask of the queue, unless it is an admin
    via: str = ""  # the gateway that recognised it; empty where it was recognised here
    # what it shows in place of an identity, not checked yet; of kind lease alone
    lease_token: str = field(default="", repr=False)

    @property
    def tenants(self) -> tuple[str, ...]:
        """Whose quotas it may use by name, the default one first."""
        return tuple(one for one in self.limits.tenants if one != ANY_TENANT) or (self.name,)

    def may_use(self, tenant: str) -> bool:
        """Whether it may use the quota of a tenant; an admin may use those of all."""
        return self.role >= Role.ADMIN or tenant in self.tenants or ANY_TENANT in self.limits.tenants


LOCAL = Principal("local", Role.ADMIN, "local")
ANONYMOUS = Principal("anonymous", Role.ADMIN, "anonymous")
RESERVED_NAMES = frozenset({LOCAL.name, ANONYMOUS.name})
"""Names that no token and no certificate may have: its bearer would own what callers without one made."""

_current: ContextVar[Principal] = ContextVar("gpuscale_principal")


current_principal: Callable[[], Principal] = _current.get
"""The caller of the current RPC, for its handler and all tasks that it starts. Raises LookupError: no RPC is being handled, or one
that needs no caller (health checks)."""


def find_principal() -> Principal | None:
    """The caller of the current RPC; None if nobody was recognised."""
    return _current.get(None)


set_principal: Callable[[Principal], object] = _current.set
"""For the interceptor: set the caller of the current RPC."""


# Methods of others' contracts, which cannot bear our option. None: no caller is needed.
_FOREIGN: Final[Mapping[str, Role | None]] = {
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/List": None,
    "/grpc.health.v1.Health/Watch": None,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Role.VIEWER,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.VIEWER,
}


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """One method."""

    path: str  # `/package.Service/Method`
    role: Role | None  # the least role that may call it; None where no caller is needed
    ours: bool  # whether its messages bear the rules of our contract
    # how long a call may wait before it is answered; None where calls do not wait
    wait: options_pb2.Wait | None = None
    pages: bool = False  # whether it lists in pages
    lease_token: bool = False  # whether a lease token does in place of a caller


def find_method(path: str) -> MethodInfo | None:
    """What the contract says about a method; None if it gives no role, so nobody may call it.

    A method of ours is found once its generated module has been imported, as every servicer does.
    """
    if path in _FOREIGN:
        return MethodInfo(path, _FOREIGN[path], ours=False)
    try:
        method = wire.find_method(path)
    except KeyError:
        return None
    options = method.GetOptions().Extensions[options_pb2.method]
    if options.role == options_pb2.ROLE_UNSPECIFIED:
        return None
    wait = options.wait if options.HasField("wait") else None
    pages = "page_token" in method.input_type.fields_by_name
    least = None if options.role == options_pb2.ROLE_ANYONE else Role(options.role)
    return MethodInfo(path, least, ours=True, wait=wait, pages=pages, lease_token=options.lease_token)


MAX_PREVIOUS: Final = 8
"""Secrets of one name that may be valid beside its newest."""
CHECK_PERIOD: Final = 1.0
"""Seconds between two looks at the file."""


def is_safe(url: str) -> bool:
    """Whether what is fetched from a URL can be believed: over TLS, or from this host."""
    parts = urlsplit(url)
    return bool(parts.hostname) and (
        parts.scheme == "https" or (parts.scheme, parts.hostname) == ("http", "127.0.0.1")
    )


class KeysNeededError(UnauthenticatedError):
    """A token is signed with a key that may have been published since the last look; `fetch` looks, then ask again."""

    def __init__(self, fetch: Callable[[], Awaitable[None]]) -> None:
        super().__init__("the key that signed the token is not known here", reason="TOKEN_INVALID")
        self.fetch = fetch


@dataclass(frozen=True, slots=True)
class TokenSecret:
    """One secret of a tokens file."""

    # the caller that it names; a name may have several, so that they can be changed without a gap
    principal: Principal
    label: str  # what it is called
    digest: str  # SHA-256 of the secret, in hexadecimal
    expires: datetime | None  # until when it is valid; None for ever


class TokenFile:
    """The tokens of one file.

    Raises:
        FailedPreconditionError: the file cannot be used (reason TOKENS_FILE); only when it is opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_use: dict[str, float] = {}
        self._signed: SignedCallers | None = None
        try:
            self._file = Followed("tokens file", (path,), self._read, CHECK_PERIOD)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else cause(error)
            message = f"{path} cannot be used as tokens file: {why}"
            raise FailedPreconditionError(message, reason="TOKENS_FILE") from error

    def principal(self, token: str) -> Principal:
        """The caller that a token names.

        Raises:
            KeysNeededError: it is signed with a key that is not known yet.
            UnauthenticatedError: nobody (TOKEN_INVALID), or not any more (TOKEN_EXPIRED).
            UnavailableError: its provider does not answer.
        """
        self._file.newer()
        if self._signed is not None and token.startswith("eyJ"):  # as every JWT does
            return self._signed.principal(token)
        digest = hashlib.sha256(token.encode()).hexdigest()
        for entry in self._file.current[0]:
            if hmac.compare_digest(entry.digest, digest):
                if entry.expires is not None and entry.expires <= datetime.now(UTC):
                    raise UnauthenticatedError("the token has expired", reason="TOKEN_EXPIRED")
                self._last_use[digest] = time.time()
                return entry.principal
        raise UnauthenticatedError("the token is not known here", reason="TOKEN_INVALID")

    def secrets(self) -> Sequence[tuple[TokenSecret, float | None]]:
        """Every secret, and when it was last used with this server: seconds since 1970, None for not since its start."""
        return [(entry, self._last_use.get(entry.digest)) for entry in self._file.current[0]]

    def limits_of_certificate(self, name: str) -> Limits:
        """The limits of the caller that a client certificate names."""
        self._file.newer()
        return self._file.current[1].get(name, Limits())

    @property
    def takes_logins(self) -> bool:
        """Whether tokens of logins with a code are taken."""
        self._file.newer()
        return self._signed is not None and self._signed.takes_logins

    @property
    def oidc(self) -> "OidcSettings | None":
        """The provider that the file names."""
        self._file.newer()
        return self._file.current[2]

    def _read(self) -> "tuple[tuple[TokenSecret, ...], Mapping[str, Limits], OidcSettings | None]":
        from gpuscale.common.security.token_tables import TokensTable  # by pydantic, which takes 10 MB

        found = TokensTable.model_validate(tomllib.loads(self._path.read_text(encoding="utf-8")))
        if found.logins is None and found.oidc is None:
            self._signed = None
        else:
            try:
                from gpuscale.common.security.signed_callers import SignedCallers
            except ImportError as error:
                raise ValueError(
                    f"logins need a library ({error}): pip install 'gpuscale[server]'"
                ) from error
            ca_file = None if found.logins is None else self._path.parent / found.logins.ca_file
            revoked = {name: since.timestamp() for name, since in found.revoked.items()}
            self._signed = SignedCallers(ca_file, found.oidc, revoked, self._signed)
        entries = tuple(
            TokenSecret(
                Principal(name, token.role, "token", token.limits()), one.label, one.sha256, one.expires
            )
            for name, token in found.tokens.items()
            for one in (token, *token.previous)
        )
        return entries, {name: limits.limits() for name, limits in found.certificates.items()}, found.oidc


_LOOPBACK: Final = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "ipv6:[::ffff:127.", "ipv6:%5B::ffff:127.")
_SPIFFE_ID: Final = re.compile(
    r"spiffe://[^/]+/gpuscale/(?P<role>gateway|viewer|agent|operator|admin)/(?P<name>[^/]+)"
)
CALLER_KEY: Final = "gpuscale-caller"
"""The metadata in which a gateway names whom it calls for."""
FORWARDED_KEY: Final = "gpuscale-forwarded"
"""The metadata in which a standby names whom it calls for; such a call is not forwarded again."""
_CALLER: Final = re.compile(r"(?P<role>viewer|agent|operator|admin)/(?P<name>[\x21-\x7e]+)")
_BEARER: Final = re.compile(r"[Bb]earer +(?P<token>[\x21-\x7e]{1,12288})")
_LEASE_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_NO_AUTH: Final[Mapping[str, Iterable[bytes]]] = {}


@dataclass(frozen=True, slots=True)
class Caller:
    """What a connection and a request tell about a caller."""

    loopback: bool  # whether it is on this host
    secure: bool  # whether the connection is TLS
    authorization: Sequence[str | bytes] = ()  # the values of the header or metadata of that name
    spiffe_id: str | None = None  # what its client certificate says; TLS has checked the certificate
    certificate: bytes | None = None  # the client certificate itself, PEM
    forwarded: Sequence[str | bytes] = ()  # the values of the metadata by which a gateway names its caller


class Authenticator:
    """Identifies callers.

    Args:
        tokens_file: the tokens that are accepted; see `gpuscale.common.security.auth`. With it, loopback callers need one too.
        accept_certificates: whether client certificates (checked by TLS against the client CA) name callers.
        insecure_allow_remote: whether plain text from other hosts is trusted.
        internal_token: what callers of the unix socket show, which serves the parts of this process alone; without one it
            lets nobody in. That the socket can be opened says little: workers may run as the same user.
        revoked_file: the deny list of client certificates, where they are accepted.
        socket_role: what every caller of a unix socket may do, in place of `internal_token`.

    Raises:
        FailedPreconditionError: the tokens file or the deny list cannot be used.
    """

    def __init__(
        self,
        *,
        tokens_file: Path | None = None,
        accept_certificates: bool = False,
        insecure_allow_remote: bool = False,
        internal_token: "SecretStr | None" = None,
        revoked_file: Path | None = None,
        socket_role: Role | None = None,
    ) -> None:
        self._tokens = None if tokens_file is None else TokenFile(tokens_file)
        self._accept_certificates = accept_certificates
        self._certificates: CertificateCheck | None = None
        if accept_certificates:  # what reads them takes 16 MB
            from gpuscale.common.security import certificates

            self._certificates = certificates.CertificateCheck(revoked_file)
        self._insecure_allow_remote = insecure_allow_remote
        self._internal = (
            None if internal_token is None else f"Bearer {internal_token.get_secret_value()}".encode()
        )
        self._socket_caller = None if socket_role is None else Principal(LOCAL.name, socket_role, "local")
        self._trusts_loopback = self._tokens is None and not accept_certificates
        self.open_forwarded: Callable[[str, Sequence[str | bytes]], Principal] | None = None
        """The caller that another process of this service names; set where several take turns."""

    def secrets(self) -> Sequence[tuple[TokenSecret, float | None]]:
        """The secrets of the tokens file, and when each was last used here."""
        return () if self._tokens is None else self._tokens.secrets()

    def identify(self, context: Context, path: str, peer: str, metadata: Metadata) -> Principal:
        """The caller of an RPC, of the method at `path`; `peer` and `metadata` are those of its context.

        Raises:
            UnauthenticatedError: it has no valid identity. Reasons: TOKEN_MISSING, TOKEN_MALFORMED, TOKEN_INVALID,
                TOKEN_EXPIRED, CERTIFICATE_WITHOUT_IDENTITY, CERTIFICATE_EXPIRED, CERTIFICATE_REVOKED, INSECURE_TRANSPORT,
                NOT_A_GATEWAY, GATEWAY_WITHOUT_CALLER.
            UnavailableError: a standby takes this process for the leader, which it is not (NOT_LEADER).
        """
        sent = dict(metadata)
        lease = _values(metadata, LEASE_KEY) if LEASE_KEY in sent else ()
        if peer.startswith("unix"):  # unix: or, of a client that gave its own end a name, unix-abstract:
            if lease and self._socket_caller is not None:
                return _holder(lease)
            return self._socket_caller or self._own_part(_values(metadata, "authorization"))
        if self.open_forwarded is not None and FORWARDED_KEY in sent:
            shown = next(iter((context.auth_context() or _NO_AUTH).get("x509_pem_cert", ())), None)
            if shown is not None and self._certificates is not None:
                self._certificates.check(shown)
            return self.open_forwarded(path, _values(metadata, FORWARDED_KEY))
        loopback, forwarded = peer.startswith(_LOOPBACK), CALLER_KEY in sent
        if lease and (loopback or self._insecure_allow_remote):
            return _holder(lease)
        if loopback and self._trusts_loopback and not forwarded:
            return LOCAL  # as `recognise` would say, without asking gRPC for what is not needed
        transport = context.auth_context() or _NO_AUTH
        if lease and _first(transport, "transport_security_type") == "ssl":
            return _holder(lease)
        return self.recognise(
            Caller(
                loopback=loopback,
                secure=_first(transport, "transport_security_type") == "ssl",
                authorization=_values(metadata, "authorization"),
                spiffe_id=_first(transport, "peer_spiffe_id"),
                certificate=next(iter(transport.get("x509_pem_cert", ())), None),
                forwarded=_values(metadata, CALLER_KEY),
            )
        )

    def _own_part(self, headers: Sequence[str | bytes]) -> Principal:
        header = headers[0] if len(headers) == 1 else ""
        given = header.encode() if isinstance(header, str) else header
        if self._internal is None or not compare_digest(given, self._internal):
            raise UnauthenticatedError(
                "this socket is for the parts of the process that made it", reason="TOKEN_INVALID"
            )
        return LOCAL

    def recognise(self, caller: Caller) -> Principal:
        """Who a caller is, by whatever protocol it came. Raises UnauthenticatedError: as `identify`."""
        if caller.loopback and self._trusts_loopback:
            return self._named_by(LOCAL.name, caller.forwarded) if caller.forwarded else LOCAL
        if not (caller.secure or caller.loopback or self._insecure_allow_remote):
            raise UnauthenticatedError("TLS is required", reason="INSECURE_TRANSPORT")
        if caller.certificate is not None and self._certificates is not None:
            self._certificates.check(caller.certificate)
        if self._tokens is not None and caller.authorization:
            return self._tokens.principal(_token(caller.authorization))
        if self._accept_certificates and caller.secure:
            return self._by_certificate(caller)
        if self._trusts_loopback and not caller.secure:
            return self._named_by(ANONYMOUS.name, caller.forwarded) if caller.forwarded else ANONYMOUS
        raise UnauthenticatedError("a bearer token is required", reason="TOKEN_MISSING")

    def _by_certificate(self, caller: Caller) -> Principal:
        found = _SPIFFE_ID.fullmatch(caller.spiffe_id or "")
        if found is None or not is_id(found["name"]) or found["name"] in RESERVED_NAMES:
            raise UnauthenticatedError(
                "the client certificate has no URI spiffe://<trust domain>/gpuscale/<role>/<name>",
                reason="CERTIFICATE_WITHOUT_IDENTITY",
            )
        if found["role"] == "gateway":
            return self._named_by(found["name"], caller.forwarded)
        if caller.forwarded:
            raise UnauthenticatedError(
                f"only a certificate of role gateway may call for others; {found['name']} has role {found['role']}",
                reason="NOT_A_GATEWAY",
            )
        return Principal(found["name"], _role(found), "certificate", self._limits(found["name"]))

    def _named_by(self, gateway: str, forwarded: Sequence[str | bytes]) -> Principal:
        """Whom a gateway calls for."""
        value = forwarded[0] if len(forwarded) == 1 else ""
        found = _CALLER.fullmatch(value) if isinstance(value, str) else None
        name = unquote(found["name"]) if found else ""
        if found is None or not name.isprintable() or name in RESERVED_NAMES:
            raise UnauthenticatedError(
                f"the gateway {gateway} does not say whom it calls for: callers need a token or certificate there",
                reason="GATEWAY_WITHOUT_CALLER",
            )
        return Principal(name, _role(found), "gateway", self._limits(name), via=gateway)

    def _limits(self, name: str) -> Limits:
        return Limits() if self._tokens is None else self._tokens.limits_of_certificate(name)


def forwarded_as(principal: Principal | None) -> tuple[tuple[str, str], ...]:
    """The metadata by which a gateway names a caller; none where nothing was shown but a place in a trusted network."""
    if principal is None or principal.kind == "lease" or {principal.name, principal.via} & RESERVED_NAMES:
        return ()
    return ((CALLER_KEY, f"{principal.role.name.lower()}/{quote(principal.name, safe='')}"),)


def require_for(principal: Principal, method: MethodInfo) -> None:
    """Check that a caller may call a method.

    Raises:
        PermissionDeniedError: its role is lower (reason ROLE_TOO_LOW), or it shows a lease token to a method that takes none
            (LEASE_TOKEN_NOT_ENOUGH).
    """
    if principal.kind == "lease":
        if not method.lease_token:
            raise PermissionDeniedError(
                "a lease token renews and releases its own reservation, and does nothing else",
                reason="LEASE_TOKEN_NOT_ENOUGH",
            )
    elif method.role is not None and principal.role < method.role:
        require(principal, method.role)


def require(principal: Principal, role: Role, what: str = "the call") -> None:
    """Check that a caller may do what needs `role`; `what` begins the error.

    Raises:
        PermissionDeniedError: its role is lower (reason ROLE_TOO_LOW).
    """
    if principal.role < role:
        raise PermissionDeniedError(
            f"{what} needs role {role.name.lower()}; {principal.name} has {principal.role.name.lower()}",
            reason="ROLE_TOO_LOW",
        )


def require_priority(principal: Principal, priority: int, field: str) -> None:
    """PermissionDeniedError (PRIORITY_TOO_HIGH), with the field, unless the caller may ask for the priority; admins may for any."""
    most = principal.limits.max_priority
    if principal.role < Role.ADMIN and priority > most:
        raise PermissionDeniedError(
            f"{field}: {principal.name} may ask for {most} at most. On the server's host:"
            f" gpuscalectl token limit {principal.name} --max-priority {priority}",
            reason="PRIORITY_TOO_HIGH",
            metadata={"field": field, "max_priority": str(most)},
        )


def _values(metadata: Metadata, name: str) -> list[str | bytes]:
    return [value for key, value in metadata if key == name]


def _holder(tokens: Sequence[str | bytes]) -> Principal:
    """Whoever shows a lease token; its digest tells holders apart in logs and limits."""
    token = tokens[0] if len(tokens) == 1 else ""
    if not isinstance(token, str) or not _LEASE_TOKEN.fullmatch(token):
        raise UnauthenticatedError(f"metadata {LEASE_KEY} must be one lease token", reason="TOKEN_MALFORMED")
    name = f"lease {hashlib.sha256(token.encode()).hexdigest()[:12]}"
    return Principal(name, Role.VIEWER, "lease", lease_token=token)


def _role(found: re.Match[str]) -> Role:
    return Role[found["role"].upper()]


def _token(headers: Sequence[str | bytes]) -> str:
    """The bearer token in the headers."""
    found = _BEARER.fullmatch(headers[0]) if isinstance(headers[0], str) else None
    if found is None or len(headers) > 1:
        raise UnauthenticatedError(
            "metadata authorization must be one 'Bearer <token>'", reason="TOKEN_MALFORMED"
        )
    return found["token"]


def _first(transport: Mapping[str, Iterable[bytes]], key: str) -> str | None:
    for value in transport.get(key, ()):
        return value.decode("utf-8", "replace")
    return None
