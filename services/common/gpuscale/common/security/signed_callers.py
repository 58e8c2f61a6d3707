"""Callers identified by a signed token, or by a standby of the same service.

A standby names the caller of each call that it forwards to the leader. In each term the leader writes a secret into their
database, whose readers can do everything anyway. The standby sends an HMAC with that secret over the epoch, the method and
the caller, never the secret.
"""

import hashlib
import hmac
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

from pydantic import BaseModel, Field, ValidationError

from gpuscale.common.errors import UnauthenticatedError
from gpuscale.common.security import signed_tokens
from gpuscale.common.security.auth import RESERVED_NAMES, Limits, Principal, Role
from gpuscale.common.security.token_tables import OidcSettings

_MAX_NAME = 253


class LoginClaims(BaseModel, frozen=True):
    """Claims of a login token."""

    sub: str = Field(min_length=1, max_length=_MAX_NAME)
    role: Role
    tenants: tuple[str, ...] = ()
    max_priority: int = 0


class SignedCallers:
    """Identifies bearers of signed tokens.

    Args:
        ca_file: authority of logins, if any.
        oidc: OIDC provider, if any.
        revoked: by caller, a time in seconds since 1970; earlier tokens are revoked.
        before: the instance to replace; keys of the same provider are kept.

    Attributes:
        provider: the provider with its keys.

    Raises:
        OSError, ValueError: the authority file cannot be used.
    """

    def __init__(
        self,
        ca_file: Path | None,
        oidc: OidcSettings | None,
        revoked: Mapping[str, float],
        before: "SignedCallers | None",
    ) -> None:
        self._logins = None if ca_file is None else signed_tokens.LoginTokens(ca_file)
        self._oidc = oidc
        self._revoked = revoked
        self._kept: dict[bytes, tuple[Principal, signed_tokens.SignedToken]] = {}
        self.provider: signed_tokens.Provider | None = None
        if oidc is not None:
            self.provider = signed_tokens.Provider(oidc.issuer, oidc.client_id, oidc.ca_file)
            if before is not None and before.provider is not None and before.provider.same_as(self.provider):
                self.provider = before.provider
            self.provider.on_fetched = self._kept.clear

    @property
    def takes_logins(self) -> bool:
        """Whether login tokens are accepted."""
        return self._logins is not None

    def principal(self, token: str) -> Principal:
        """The caller that a token identifies.

        Raises:
            KeysNeededError: its key is not known yet.
            UnauthenticatedError: reasons TOKEN_INVALID, TOKEN_EXPIRED, TOKEN_REVOKED, or NO_GROUP (no group with a role).
            UnavailableError: its provider does not answer.
        """
        if self.provider is not None:
            self.provider.stay_fresh()
        if self._logins is not None and self._logins.keys.newer() is not None:
            self._kept.clear()  # a former authority may have signed them
        digest = hashlib.sha256(token.encode()).digest()
        found = self._kept.get(digest)
        if found is None:
            issuer = signed_tokens.unchecked(token).get("iss")
            if self._logins is not None and issuer == signed_tokens.LOGIN_ISSUER:
                signed = self._logins.check(token)
                try:
                    says = LoginClaims.model_validate(signed.claims)
                except ValidationError:
                    raise signed_tokens.invalid("it has no valid subject and role") from None
                limits = Limits(says.tenants, says.max_priority)
                found = Principal(says.sub, says.role, "token", limits), signed
            elif self.provider is not None and self._oidc is not None and issuer == self.provider.issuer:
                signed = self.provider.check(token)
                found = _by_groups(self._oidc, signed.claims), signed
            else:
                raise signed_tokens.invalid("its issuer is unknown")
            while len(self._kept) >= signed_tokens.MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[digest] = found
        principal, signed = found
        if signed.ends <= time.time():
            raise UnauthenticatedError("the token has expired", reason="TOKEN_EXPIRED")
        if signed.begins <= self._revoked.get(principal.name, float("-inf")):
            raise UnauthenticatedError("the token was revoked: log in again", reason="TOKEN_REVOKED")
        return principal


def _by_groups(oidc: OidcSettings, claims: Mapping[str, object]) -> Principal:
    """The caller of a provider's token, with the highest role, all tenants and the highest priority of its groups."""
    value = claims.get(oidc.name_claim)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise signed_tokens.invalid(f"its {oidc.name_claim} names nobody")
    if oidc.name_claim == "email" and claims.get("email_verified") is not True:
        raise signed_tokens.invalid("its email is not verified")
    name = f"{oidc.prefix}{value}"
    if len(name) > _MAX_NAME or name in RESERVED_NAMES:
        raise signed_tokens.invalid(f"its {oidc.name_claim} is too long, or reserved")
    listed = claims.get(oidc.groups_claim)
    names = cast("list[object]", listed) if isinstance(listed, list) else []
    groups = [group for key, group in oidc.groups.items() if key in names]
    if not groups:
        raise UnauthenticatedError(f"no group of {name} may call here", reason="NO_GROUP")
    tenants = tuple(dict.fromkeys(tenant for group in groups for tenant in group.tenants))
    limits = Limits(tenants, max(group.max_priority for group in groups))
    return Principal(name, max(group.role for group in groups), "token", limits)


MOST_BYTES: Final = 8_192
"""Limit for a sealed caller; all metadata of a call have 16 KiB."""


def seal(epoch: int, secret: str, path: str, caller: Principal) -> str:
    """Metadata that names a caller to the leader; very long limits can make it exceed `MOST_BYTES`."""
    text = json.dumps(asdict(caller), separators=(",", ":"))
    return f"{epoch} {_code(epoch, secret, path, text)} {text}"


def unseal(epoch: int, secret: str, path: str, values: Sequence[str | bytes]) -> Principal | None:
    """The caller named by metadata of `seal`; None if it is of another term than `epoch`.

    Raises UnauthenticatedError: invalid HMAC (reason NOT_A_GATEWAY).
    """
    value = values[0] if len(values) == 1 else ""
    term, code, text = (*str(value).split(" ", 2), "", "", "")[:3]
    if term.isdecimal() and term != str(epoch):
        return None
    if not hmac.compare_digest(code.encode(), _code(epoch, secret, path, text).encode()):
        raise UnauthenticatedError(
            "only another process on the same database may call for others here", reason="NOT_A_GATEWAY"
        )
    said: dict[str, Any] = json.loads(text)
    said["role"] = Role(said["role"])
    said["limits"] = Limits(tuple(said["limits"]["tenants"]), said["limits"]["max_priority"])
    return Principal(**said)


def _code(epoch: int, secret: str, path: str, text: str) -> str:
    return hmac.digest(secret.encode(), f"{epoch} {path} {text}".encode(), "sha256").hex()
