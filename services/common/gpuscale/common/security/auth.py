"""Authentication: from a connection and its metadata to a `Principal`, and the role that each method needs.

| caller | principal |
|---|---|
| unix socket, with the token that the server created for its own parts | `local`, admin |
| unix socket of an agent | `local`, role agent; a lease token decides what is admitted |
| loopback, neither tokens nor client certificates configured | `local`, admin |
| bearer token in the metadata `authorization` | as the tokens file says; only over TLS or from loopback |
| client certificate with `spiffe://<trust domain>/gpuscale/<role>/<name>` | that role and name |
| client certificate with `spiffe://<trust domain>/gpuscale/gateway/<name>` | the caller in the metadata `gpuscale-caller` |
| plain text from elsewhere, `insecure_allow_remote`, nothing configured | `anonymous`, admin |
| metadata `gpuscale-lease-token` | the holder of that lease, for methods that accept one, on the reservation in the request |
| standby of this service, proven by a secret in their database (`gpuscale.common.security.signed_callers`) | the caller in the metadata `gpuscale-forwarded` |
| anybody else | rejected with UNAUTHENTICATED |

If a token is sent, it alone decides, a lease token first: an invalid token is rejected even if the certificate is valid.
A lease token is verified with its reservation; until then its bearer counts as unknown. A certificate that expired or was
revoked after its connection was made is rejected in any case (`gpuscale.common.security.certificates`).

A gateway names the caller it recognised in `gpuscale-caller` (`<role>/<name>`). This is accepted with a certificate of role
gateway, and from callers that are trusted as admin without credentials, whose role it can only lower. With any other
certificate it is rejected, also through a gateway.

The tokens file lists callers with SHA-256 digests of their bearer tokens (docs/security.md; schema: `token_tables`).

A token has at least 256 random bits, so an unsalted digest is safe. The file is reloaded within a second of a change; if
the new file cannot be used, the old tokens stay in force.
"""

import hashlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from urllib.parse import quote, unquote, urlsplit

import grpc

from gpuscale.api.types.v1 import options_pb2
from gpuscale.common import errors, wire
from gpuscale.common.names import LEASE_KEY, is_id
from gpuscale.common.secrets import DatabaseUnavailableError
from gpuscale.common.security.followed import Followed, cause

if TYPE_CHECKING:
    from gpuscale.common.secrets import SecretStr
    from gpuscale.common.security.certificates import CertificateCheck
    from gpuscale.common.security.signed_callers import SignedCallers
    from gpuscale.common.security.token_tables import OidcSettings

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
"""The context of a call."""
Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]]"
"""The metadata of a call."""


class Role(IntEnum):
    """Roles; each includes the ones before it. The numbers are those of the contract."""

    VIEWER = options_pb2.ROLE_VIEWER
    AGENT = options_pb2.ROLE_AGENT
    OPERATOR = options_pb2.ROLE_OPERATOR
    ADMIN = options_pb2.ROLE_ADMIN


ANY_TENANT: Final = "*"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a caller that is not an admin."""

    # quotas it may use, the default first; empty for its own only. `*` means all: the autoscaler reserves
    # for the owners of endpoints
    tenants: tuple[str, ...] = ()
    max_priority: int = 0  # highest priority it may request


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller."""

    # from the token or certificate; "local" for callers on this host, "anonymous" for other callers of a
    # server that trusts its network
    name: str
    role: Role
    kind: Literal[
        "local", "token", "certificate", "gateway", "anonymous", "lease"
    ]  # how it was authenticated
    limits: Limits = Limits()  # not for an admin
    via: str = ""  # the gateway that authenticated it; empty if this process did
    # not verified yet; for kind lease only
    lease_token: str = field(default="", repr=False)

    @property
    def tenants(self) -> tuple[str, ...]:
        """The quotas it may use by name, the default first."""
        return tuple(one for one in self.limits.tenants if one != ANY_TENANT) or (self.name,)

    def may_use(self, tenant: str) -> bool:
        """Whether it may use the quota of a tenant; an admin may use all."""
        return self.role >= Role.ADMIN or tenant in self.tenants or ANY_TENANT in self.limits.tenants


LOCAL = Principal("local", Role.ADMIN, "local")
ANONYMOUS = Principal("anonymous", Role.ADMIN, "anonymous")
RESERVED_NAMES = frozenset({LOCAL.name, ANONYMOUS.name})
"""Names forbidden in tokens and certificates: their bearer would own what callers without credentials created."""

_current: ContextVar[Principal] = ContextVar("gpuscale_principal")


current_principal: Callable[[], Principal] = _current.get
"""The caller of the current RPC, for its handler and the tasks it starts. Raises LookupError outside RPCs, and in those that need
no caller (health checks)."""


find_principal: Callable[[], Principal | None] = partial(_current.get, None)
"""The caller of the current RPC, or None."""


def is_admin() -> bool:
    """Whether the caller of the current RPC may know where programs are."""
    caller = find_principal()
    return caller is not None and caller.role >= Role.ADMIN


def for_caller(error: errors.GpuscaleError) -> errors.GpuscaleError:
    """An error as the caller of the current RPC may read it."""
    if isinstance(error, DatabaseUnavailableError) and not is_admin():
        return errors.UnavailableError("the state cannot be used now", reason=error.reason)
    return error


set_principal: Callable[[Principal], object] = _current.set
"""Set the caller of the current RPC; for the interceptor."""


# Methods of foreign contracts, without our option. None: no caller needed.
_FOREIGN: Final[Mapping[str, Role | None]] = {
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/List": None,
    "/grpc.health.v1.Health/Watch": None,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": Role.VIEWER,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Role.VIEWER,
}


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """Properties of a method."""

    path: str  # `/package.Service/Method`
    role: Role | None  # the role it requires; None if no caller is needed
    ours: bool  # whether it belongs to our contract
    # how long a call may wait; None if calls do not wait
    wait: options_pb2.Wait | None = None
    pages: bool = False  # whether it has pages
    lease_token: bool = False  # whether it accepts a lease token


def find_method(path: str) -> MethodInfo | None:
    """The properties of a method; None if the contract gives no role, so nobody may call it.

    Finds our methods after the import of their generated module, which every servicer does.
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
"""Maximum number of previous secrets of a name."""
CHECK_PERIOD: Final = 1.0
"""Seconds between two checks of the file."""


def is_safe(url: str) -> bool:
    """Whether a URL can be trusted: https, or this host."""
    parts = urlsplit(url)
    return bool(parts.hostname) and (
        parts.scheme == "https" or (parts.scheme, parts.hostname) == ("http", "127.0.0.1")
    )


class KeysNeededError(errors.UnauthenticatedError):
    """A token is signed with an unknown key; `await fetch()` for newer keys, then retry."""

    def __init__(self, fetch: Callable[[], Awaitable[None]]) -> None:
        super().__init__("the key that signed the token is not known here", reason="TOKEN_INVALID")
        self.fetch = fetch


@dataclass(frozen=True, slots=True)
class TokenSecret:
    """One secret of a tokens file."""

    principal: Principal  # its caller, who may have several for a rotation without a gap
    label: str
    digest: str  # SHA-256 of the secret, in hexadecimal
    expires: datetime | None  # None for never


class TokenFile:
    """The tokens of one file. Raises FailedPreconditionError if it cannot be used (reason TOKENS_FILE)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_use: dict[str, float] = {}
        self._signed: SignedCallers | None = None
        try:
            self._file = Followed("tokens file", (path,), self._read, CHECK_PERIOD)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else cause(error)
            message = f"{path} cannot be used as tokens file: {why}"
            raise errors.FailedPreconditionError(message, reason="TOKENS_FILE") from error

    def principal(self, token: str) -> Principal:
        """The caller that a token identifies.

        Raises:
            KeysNeededError: it is signed with an unknown key.
            UnauthenticatedError: TOKEN_INVALID or TOKEN_EXPIRED.
            UnavailableError: its provider does not answer.
        """
        self._file.newer()
        if self._signed is not None and token.startswith("eyJ"):  # any JWT
            return self._signed.principal(token)
        digest = hashlib.sha256(token.encode()).hexdigest()
        for entry in self._file.current[0]:
            if hmac.compare_digest(entry.digest, digest):
                if entry.expires is not None and entry.expires <= datetime.now(UTC):
                    raise errors.UnauthenticatedError("the token has expired", reason="TOKEN_EXPIRED")
                self._last_use[digest] = time.time()
                return entry.principal
        raise errors.UnauthenticatedError("the token is not known here", reason="TOKEN_INVALID")

    def secrets(self) -> Sequence[tuple[TokenSecret, float | None]]:
        """Every secret with the time of its last use, in seconds since 1970; None if not used since the start."""
        return [(entry, self._last_use.get(entry.digest)) for entry in self._file.current[0]]

    def limits_of_certificate(self, name: str) -> Limits:
        """The limits of a caller with a client certificate."""
        self._file.newer()
        return self._file.current[1].get(name, Limits())

    @property
    def takes_logins(self) -> bool:
        """Whether login tokens are accepted."""
        self._file.newer()
        return self._signed is not None and self._signed.takes_logins

    @property
    def oidc(self) -> "OidcSettings | None":
        """The OIDC provider in the file."""
        self._file.newer()
        return self._file.current[2]

    def _read(self) -> "tuple[tuple[TokenSecret, ...], Mapping[str, Limits], OidcSettings | None]":
        import tomllib

        from gpuscale.common.security.token_tables import TokensTable  # loads pydantic: 10 MB

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
"""Metadata with the caller of a gateway."""
FORWARDED_KEY: Final = "gpuscale-forwarded"
"""Metadata with the caller of a standby; such a call is not forwarded again."""
_CALLER: Final = re.compile(r"(?P<role>viewer|agent|operator|admin)/(?P<name>[\x21-\x7e]+)")
_BEARER: Final = re.compile(r"[Bb]earer +(?P<token>[\x21-\x7e]{1,12288})")
_LEASE_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_NO_AUTH: Final[Mapping[str, Iterable[bytes]]] = {}


@dataclass(frozen=True, slots=True)
class Caller:
    """What a connection and a request say about a caller."""

    loopback: bool  # on this host
    secure: bool  # over TLS
    authorization: Sequence[str | bytes] = ()  # values of the header or metadata
    spiffe_id: str | None = None  # from its certificate, verified by TLS
    certificate: bytes | None = None  # its client certificate, PEM
    forwarded: Sequence[str | bytes] = ()  # values of the metadata `gpuscale-caller`


class Authenticator:
    """Identifies callers.

    Args:
        tokens_file: accepted tokens, see the module. With it, loopback callers need one too.
        accept_certificates: whether client certificates (verified by TLS) identify callers.
        insecure_allow_remote: whether plain text from other hosts is trusted.
        internal_token: token for the unix socket, known only to parts of this process; None admits nobody there. Opening
            the socket proves nothing: workers may run as the same user.
        revoked_file: deny list of client certificates, if these are accepted.
        socket_role: role of every caller of the unix socket, instead of `internal_token`.

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
        if accept_certificates:  # loads cryptography: 16 MB
            from gpuscale.common.security import certificates

            self._certificates = certificates.CertificateCheck(revoked_file)
        self._insecure_allow_remote = insecure_allow_remote
        self._internal = (
            None if internal_token is None else f"Bearer {internal_token.get_secret_value()}".encode()
        )
        self._socket_caller = None if socket_role is None else Principal(LOCAL.name, socket_role, "local")
        self._trusts_loopback = self._tokens is None and not accept_certificates
        self.open_forwarded: Callable[[str, Sequence[str | bytes]], Principal] | None = None
        """Reads the caller from a standby; set if several processes compete for the lead."""

    def secrets(self) -> Sequence[tuple[TokenSecret, float | None]]:
        """The secrets of the tokens file with the time of their last use."""
        return () if self._tokens is None else self._tokens.secrets()

    def identify(self, context: Context, path: str, peer: str, metadata: Metadata) -> Principal:
        """The caller of an RPC to the method at `path`; `peer` and `metadata` are those of its context.

        Raises:
            UnauthenticatedError: no valid identity. Reasons: TOKEN_MISSING, TOKEN_MALFORMED, TOKEN_INVALID,
                TOKEN_EXPIRED, CERTIFICATE_WITHOUT_IDENTITY, CERTIFICATE_EXPIRED, CERTIFICATE_REVOKED, INSECURE_TRANSPORT,
                NOT_A_GATEWAY, GATEWAY_WITHOUT_CALLER.
            UnavailableError: forwarded by a standby, but this process does not lead (NOT_LEADER).
        """
        sent = dict(metadata)
        lease = _values(metadata, LEASE_KEY) if LEASE_KEY in sent else ()
        if peer.startswith("unix"):  # unix:, or unix-abstract: if the client named its end
            if self._socket_caller is not None:
                return _holder(lease) if lease else self._socket_caller
            headers = _values(metadata, "authorization")
            header = headers[0] if len(headers) == 1 else ""
            given = header.encode() if isinstance(header, str) else header
            if self._internal is None or not compare_digest(given, self._internal):
                raise errors.UnauthenticatedError(
                    "this socket is only for parts of the process that created it", reason="TOKEN_INVALID"
                )
            return LOCAL
        if self.open_forwarded is not None and FORWARDED_KEY in sent:
            shown = next(iter((context.auth_context() or _NO_AUTH).get("x509_pem_cert", ())), None)
            if shown is not None and self._certificates is not None:
                self._certificates.check(shown)
            return self.open_forwarded(path, _values(metadata, FORWARDED_KEY))
        loopback, forwarded = peer.startswith(_LOOPBACK), CALLER_KEY in sent
        if lease and (loopback or self._insecure_allow_remote):
            return _holder(lease)
        if loopback and self._trusts_loopback and not forwarded:
            return LOCAL  # as `recognise`, without the cost of auth_context
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

    def recognise(self, caller: Caller) -> Principal:
        """The caller, of gRPC or HTTP. Raises UnauthenticatedError as `identify`."""
        if caller.loopback and self._trusts_loopback:
            return self._named_by(LOCAL.name, caller.forwarded) if caller.forwarded else LOCAL
        if not (caller.secure or caller.loopback or self._insecure_allow_remote):
            raise errors.UnauthenticatedError("TLS is required", reason="INSECURE_TRANSPORT")
        if caller.certificate is not None and self._certificates is not None:
            self._certificates.check(caller.certificate)
        if self._tokens is not None and caller.authorization:
            headers = caller.authorization
            found = _BEARER.fullmatch(headers[0]) if isinstance(headers[0], str) else None
            if found is None or len(headers) > 1:
                raise errors.UnauthenticatedError(
                    "metadata authorization must be one 'Bearer <token>'", reason="TOKEN_MALFORMED"
                )
            return self._tokens.principal(found["token"])
        if self._accept_certificates and caller.secure:
            found = _SPIFFE_ID.fullmatch(caller.spiffe_id or "")
            if found is None or not is_id(found["name"]) or found["name"] in RESERVED_NAMES:
                raise errors.UnauthenticatedError(
                    "the client certificate has no URI spiffe://<trust domain>/gpuscale/<role>/<name>",
                    reason="CERTIFICATE_WITHOUT_IDENTITY",
                )
            if found["role"] == "gateway":
                return self._named_by(found["name"], caller.forwarded)
            if caller.forwarded:
                raise errors.UnauthenticatedError(
                    f"only a certificate of role gateway may call for others; {found['name']} has role {found['role']}",
                    reason="NOT_A_GATEWAY",
                )
            return Principal(found["name"], _role(found), "certificate", self._limits(found["name"]))
        if self._trusts_loopback and not caller.secure:
            return self._named_by(ANONYMOUS.name, caller.forwarded) if caller.forwarded else ANONYMOUS
        raise errors.UnauthenticatedError("a bearer token is required", reason="TOKEN_MISSING")

    def _named_by(self, gateway: str, forwarded: Sequence[str | bytes]) -> Principal:
        value = forwarded[0] if len(forwarded) == 1 else ""
        found = _CALLER.fullmatch(value) if isinstance(value, str) else None
        name = unquote(found["name"]) if found else ""
        if found is None or not name.isprintable() or name in RESERVED_NAMES:
            raise errors.UnauthenticatedError(
                f"the gateway {gateway} does not say whom it calls for: callers need a token or certificate there",
                reason="GATEWAY_WITHOUT_CALLER",
            )
        return Principal(name, _role(found), "gateway", self._limits(name), via=gateway)

    def _limits(self, name: str) -> Limits:
        return Limits() if self._tokens is None else self._tokens.limits_of_certificate(name)


def forwarded_as(principal: Principal | None) -> tuple[tuple[str, str], ...]:
    """Metadata for a gateway to name its caller; empty for a caller without credentials."""
    if principal is None or principal.kind == "lease" or {principal.name, principal.via} & RESERVED_NAMES:
        return ()
    return ((CALLER_KEY, f"{principal.role.name.lower()}/{quote(principal.name, safe='')}"),)


def require_for(principal: Principal, method: MethodInfo) -> None:
    """Check that a caller may call a method.

    Raises PermissionDeniedError: ROLE_TOO_LOW, or LEASE_TOKEN_NOT_ENOUGH for a method that accepts no lease token.
    """
    if principal.kind == "lease":
        if not method.lease_token:
            raise errors.PermissionDeniedError(
                "a lease token renews and releases its own reservation, admits its work, and does nothing else",
                reason="LEASE_TOKEN_NOT_ENOUGH",
            )
    elif method.role is not None and principal.role < method.role:
        require(principal, method.role)


def require(principal: Principal, role: Role, what: str = "the call") -> None:
    """Raise PermissionDeniedError (ROLE_TOO_LOW), which begins with `what`, unless a caller has `role`."""
    if principal.role < role:
        raise errors.PermissionDeniedError(
            f"{what} needs role {role.name.lower()}; {principal.name} has {principal.role.name.lower()}",
            reason="ROLE_TOO_LOW",
        )


def to_allow(principal: Principal, option: str) -> str:
    """How an admin allows a caller more, by a login or by its token."""
    return (
        f"An admin can allow more: gpuscalectl login-code create {principal.name} --role {principal.role.name.lower()} {option},"
        f" or of a token: gpuscalectl token limit {principal.name} {option} --tokens-file FILE"
    )


def require_priority(principal: Principal, priority: int, field: str) -> None:
    """Raise PermissionDeniedError (PRIORITY_TOO_HIGH) unless the caller may request the priority; admins may request any."""
    most = principal.limits.max_priority
    if principal.role < Role.ADMIN and priority > most:
        raise errors.PermissionDeniedError(
            f"{field}: {principal.name} may ask for {most} at most. {to_allow(principal, f'--max-priority {priority}')}",
            reason="PRIORITY_TOO_HIGH",
            metadata={"field": field, "max_priority": str(most)},
        )


def require_tenant(principal: Principal, tenant: str, field: str) -> None:
    """Raise PermissionDeniedError (OTHER_TENANT) unless the caller may use the tenant's quota."""
    if not principal.may_use(tenant):
        may = ", ".join(principal.tenants)
        raise errors.PermissionDeniedError(
            f"{field}: {principal.name} cannot use the quota of {tenant}, only of: {may}. {to_allow(principal, f'--tenant {tenant}')}",
            reason="OTHER_TENANT",
            metadata={"field": field, "tenant": tenant},
        )


def _values(metadata: Metadata, name: str) -> list[str | bytes]:
    return [value for key, value in metadata if key == name]


def _holder(tokens: Sequence[str | bytes]) -> Principal:
    """The bearer of a lease token, named by its digest in logs and limits."""
    token = tokens[0] if len(tokens) == 1 else ""
    if not isinstance(token, str) or not _LEASE_TOKEN.fullmatch(token):
        raise errors.UnauthenticatedError(
            f"metadata {LEASE_KEY} must be one lease token", reason="TOKEN_MALFORMED"
        )
    name = f"lease {hashlib.sha256(token.encode()).hexdigest()[:12]}"
    return Principal(name, Role.VIEWER, "lease", lease_token=token)


def _role(found: re.Match[str]) -> Role:
    return Role[found["role"].upper()]


def _first(transport: Mapping[str, Iterable[bytes]], key: str) -> str | None:
    for value in transport.get(key, ()):
        return value.decode("utf-8", "replace")
    return None
