"""Authentication: from a connection and its metadata to a `Principal`.

| caller | is |
|---|---|
| unix socket | `local`, admin, with the token that the server made for its own parts; nobody else |
| loopback, neither tokens nor client certificates configured | `local`, admin |
| bearer token in the metadata `authorization` | what the tokens file says; only over TLS or from loopback |
| client certificate with `spiffe://<trust domain>/gpuscale/<role>/<name>` | that role and name |
| plain text from elsewhere, `insecure_allow_remote`, nothing configured | `anonymous`, admin |
| anybody else | refused with UNAUTHENTICATED |

A token that is sent decides alone, so that a wrong one is noticed; it is never looked past to a certificate.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path
from typing import Any, Final

import grpc
from pydantic import SecretStr

from gpuscale.common.errors import PermissionDeniedError, UnauthenticatedError
from gpuscale.common.names import is_id
from gpuscale.common.security.principal import (
    ANONYMOUS,
    LOCAL,
    RESERVED_NAMES,
    Limits,
    Principal,
    Role,
    current_principal,
)
from gpuscale.common.security.tokens import TokenFile

__all__ = ["Authenticator", "Caller", "Principal", "Role", "current_principal", "require"]

_LOOPBACK: Final = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "ipv6:[::ffff:127.", "ipv6:%5B::ffff:127.")
_SPIFFE_ID: Final = re.compile(
    r"spiffe://[^/]+/gpuscale/(?P<role>viewer|agent|operator|admin)/(?P<name>[^/]+)"
)
_BEARER: Final = re.compile(r"[Bb]earer +(?P<token>[\x21-\x7e]{1,4096})")
_NO_AUTH: Final[Mapping[str, Iterable[bytes]]] = {}


@dataclass(frozen=True, slots=True)
class Caller:
    """What a connection and a request tell of a caller.

    Attributes:
        loopback: whether it is on this host.
        secure: whether the connection is TLS.
        authorization: the values of the header or metadata of that name.
        spiffe_id: what its client certificate says; TLS has checked the certificate.
    """

    loopback: bool
    secure: bool
    authorization: Sequence[str | bytes] = ()
    spiffe_id: str | None = None


class Authenticator:
    """Says who calls.

    Args:
        tokens_file: the tokens that are accepted; see `gpuscale.common.security.tokens`. With it, loopback callers need one too.
        accept_certificates: whether client certificates (checked by TLS against the client CA) name callers.
        insecure_allow_remote: whether plain text from other hosts is trusted.
        internal_token: what callers of the unix socket show, which serves the parts of this process alone; without one it
            lets nobody in. That the socket can be opened says little: workers may run as the same user.

    Raises:
        FailedPreconditionError: the tokens file cannot be used.
    """

    def __init__(
        self,
        *,
        tokens_file: Path | None = None,
        accept_certificates: bool = False,
        insecure_allow_remote: bool = False,
        internal_token: SecretStr | None = None,
    ) -> None:
        self._tokens = None if tokens_file is None else TokenFile(tokens_file)
        self._accept_certificates = accept_certificates
        self._insecure_allow_remote = insecure_allow_remote
        self._internal = (
            None if internal_token is None else f"Bearer {internal_token.get_secret_value()}".encode()
        )
        self._trusts_loopback = self._tokens is None and not accept_certificates

    def identify(self, context: grpc.aio.ServicerContext[Any, Any]) -> Principal:
        """The caller of an RPC.

        Raises:
            UnauthenticatedError: it has no valid identity. Reasons: TOKEN_MISSING, TOKEN_MALFORMED, TOKEN_INVALID,
                TOKEN_EXPIRED, CERTIFICATE_WITHOUT_IDENTITY, INSECURE_TRANSPORT.
        """
        peer = context.peer()
        if peer.startswith("unix:"):
            return self._own_part(context)
        loopback = peer.startswith(_LOOPBACK)
        if loopback and self._trusts_loopback:
            return LOCAL  # as `recognise` would say, without asking gRPC for what is not needed
        transport = context.auth_context() or _NO_AUTH
        metadata = context.invocation_metadata() or ()
        return self.recognise(
            Caller(
                loopback=loopback,
                secure=_first(transport, "transport_security_type") == "ssl",
                authorization=[value for key, value in metadata if key == "authorization"],
                spiffe_id=_first(transport, "peer_spiffe_id"),
            )
        )

    def _own_part(self, context: grpc.aio.ServicerContext[Any, Any]) -> Principal:
        shown = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
        header = shown[0] if len(shown) == 1 else ""
        given = header.encode() if isinstance(header, str) else header
        if self._internal is None or not compare_digest(given, self._internal):
            raise UnauthenticatedError(
                "this socket is for the parts of the process that made it", reason="TOKEN_INVALID"
            )
        return LOCAL

    def recognise(self, caller: Caller) -> Principal:
        """Who a caller is, by whatever protocol it came.

        Raises:
            UnauthenticatedError: as `identify`.
        """
        if caller.loopback and self._trusts_loopback:
            return LOCAL
        if not (caller.secure or caller.loopback or self._insecure_allow_remote):
            raise UnauthenticatedError("TLS is required", reason="INSECURE_TRANSPORT")
        if self._tokens is not None and caller.authorization:
            return self._tokens.principal(_token(caller.authorization))
        if self._accept_certificates and caller.secure:
            return self._by_certificate(caller.spiffe_id)
        if self._trusts_loopback and not caller.secure:
            return ANONYMOUS
        raise UnauthenticatedError("a bearer token is required", reason="TOKEN_MISSING")

    def _by_certificate(self, identity: str | None) -> Principal:
        found = _SPIFFE_ID.fullmatch(identity or "")
        if found is None or not is_id(found["name"]) or found["name"] in RESERVED_NAMES:
            raise UnauthenticatedError(
                "the client certificate has no URI spiffe://<trust domain>/gpuscale/<role>/<name>",
                reason="CERTIFICATE_WITHOUT_IDENTITY",
            )
        name, role = found["name"], Role[found["role"].upper()]
        limits = Limits() if self._tokens is None else self._tokens.limits_of_certificate(name)
        return Principal(name, role, "certificate", limits)


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


def _token(headers: Sequence[str | bytes]) -> str:
    """The bearer token that came along."""
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
