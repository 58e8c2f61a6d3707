"""Schema of the tokens file (docs/security.md); `auth` imports this module only if there is such a file."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, Field, StringConstraints

from gpuscale.common.security.auth import MAX_PREVIOUS, RESERVED_NAMES, Limits, Role, is_safe

_Tenant = Annotated[str, StringConstraints(min_length=1, max_length=253, strip_whitespace=True)]


class LimitsTable(BaseModel, frozen=True, extra="forbid"):
    """The limits of a caller."""

    tenants: tuple[_Tenant, ...] = Field((), max_length=1000)
    """Quotas that it may use instead of its own."""
    max_priority: int = Field(0, ge=-1000, le=1000)

    def limits(self) -> Limits:
        """As a value without pydantic."""
        return Limits(self.tenants, self.max_priority)


class _Secret(BaseModel, frozen=True, extra="forbid"):
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)]
    expires: AwareDatetime | None = None
    label: Annotated[str, StringConstraints(max_length=63)] = ""
    """Name of this secret in lists and metrics."""


_ReadRole = Annotated[Role, BeforeValidator(lambda name: Role.__members__.get(str(name).upper(), name))]


class _Token(LimitsTable, _Secret, frozen=True, extra="forbid"):
    role: _ReadRole
    previous: tuple[_Secret, ...] = Field((), max_length=MAX_PREVIOUS)
    """Secrets that are also valid."""


def _not_reserved(name: str) -> str:
    if name in RESERVED_NAMES:
        raise ValueError(f"{name} stands for callers without a token; give it another name")
    return name


_Name = Annotated[str, AfterValidator(_not_reserved)]


class _Group(LimitsTable, frozen=True, extra="forbid"):
    role: _ReadRole


def _safe(url: str) -> str:
    if not is_safe(url):
        raise ValueError("must begin with https://")
    return url


class OidcSettings(BaseModel, frozen=True, extra="forbid"):
    """An OIDC provider, whose ID tokens identify callers."""

    issuer: Annotated[str, AfterValidator(_safe)]
    client_id: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    name_claim: str = "sub"
    prefix: Annotated[str, StringConstraints(min_length=1, max_length=63)] = "oidc:"
    groups_claim: str = "groups"
    scopes: str = "openid profile email groups offline_access"
    """What `gpuscalectl login` requests."""
    ca_file: Path | None = None
    """Authority for the provider's TLS."""
    groups: dict[str, _Group] = Field(min_length=1)
    """Rights of a group; several groups add up."""


class _Logins(BaseModel, frozen=True, extra="forbid"):
    ca_file: Path


class TokensTable(BaseModel, frozen=True, extra="forbid"):
    """The whole file."""

    tokens: dict[_Name, _Token]
    certificates: dict[_Name, LimitsTable] = Field(default_factory=dict[_Name, LimitsTable])
    logins: _Logins | None = None
    oidc: OidcSettings | None = None
    revoked: dict[str, AwareDatetime] = Field(default_factory=dict[str, AwareDatetime])
    """By caller: logins from before are revoked."""
