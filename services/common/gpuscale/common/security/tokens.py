"""The tokens file: who may call with which bearer token, as SHA-256 digests.

    [tokens.alice]
    role = "operator"          # viewer, agent, operator or admin
    sha256 = "9f86d081..."     # `printf %s "$TOKEN" | sha256sum`
    expires = 2027-01-01T00:00:00Z  # optional, with its time zone
    tenants = ["ml", "vision"] # optional: whose quotas it may use, in place of its own
    max_priority = 10          # optional: the highest priority that it may ask for, in place of 0

    [certificates.bob]         # the same two, of the caller whom a client certificate names
    tenants = ["ml"]

A token is 256 random bits or more, so that its plain digest tells nothing. The file is read again within a second of a
change; one that cannot be used leaves the tokens in force as they were.
"""

import hashlib
import hmac
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
)

from gpuscale.common.errors import FailedPreconditionError, UnauthenticatedError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.security.principal import RESERVED_NAMES, Limits, Principal, Role

CHECK_PERIOD: Final = 1.0
"""Seconds between two looks at the file."""

_log = get_logger(__name__)


def _role(name: object) -> object:
    return Role[name.upper()] if isinstance(name, str) and name.upper() in Role.__members__ else name


_Tenant = Annotated[str, StringConstraints(min_length=1, max_length=253, strip_whitespace=True)]


class _Limits(BaseModel, frozen=True, extra="forbid"):
    tenants: tuple[_Tenant, ...] = Field((), max_length=1000)
    max_priority: int = Field(0, ge=-1000, le=1000)

    def limits(self) -> Limits:
        """As a caller has them."""
        return Limits(self.tenants, self.max_priority)


class _Token(_Limits, frozen=True, extra="forbid"):
    role: Annotated[Role, BeforeValidator(_role)]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)]
    expires: AwareDatetime | None = None


def _free(name: str) -> str:
    if name in RESERVED_NAMES:
        raise ValueError(f"{name} stands for callers without a token; give it another name")
    return name


_Name = Annotated[str, AfterValidator(_free)]


class _Tokens(BaseModel, frozen=True, extra="forbid"):
    tokens: dict[_Name, _Token]
    certificates: dict[_Name, _Limits] = Field(default_factory=dict[_Name, _Limits])


@dataclass(frozen=True, slots=True)
class _Entry:
    principal: Principal
    digest: str
    expires: datetime | None


class TokenFile:
    """The tokens of one file.

    Raises:
        FailedPreconditionError: the file cannot be used (reason TOKENS_FILE); only when it is opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_check = time.monotonic() + CHECK_PERIOD
        try:
            self._seen = self._signature()
            self._entries, self._certificates = self._read()
        except (OSError, ValueError) as error:
            message = f"{path} cannot be used as tokens file: {_cause(error)}"
            raise FailedPreconditionError(message, reason="TOKENS_FILE") from error

    def principal(self, token: str) -> Principal:
        """Whom a token stands for.

        Raises:
            UnauthenticatedError: nobody (TOKEN_INVALID), or not any more (TOKEN_EXPIRED).
        """
        self._refresh()
        digest = hashlib.sha256(token.encode()).hexdigest()
        for entry in self._entries:
            if hmac.compare_digest(entry.digest, digest):
                if entry.expires is not None and entry.expires <= datetime.now(UTC):
                    raise UnauthenticatedError("the token has expired", reason="TOKEN_EXPIRED")
                return entry.principal
        raise UnauthenticatedError("the token is not known here", reason="TOKEN_INVALID")

    def limits_of_certificate(self, name: str) -> Limits:
        """What the caller may ask of the queue whom a client certificate names."""
        self._refresh()
        return self._certificates.get(name, Limits())

    def _refresh(self) -> None:
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_PERIOD
        try:
            signature = self._signature()
            if signature == self._seen:
                return
            self._seen = signature
            self._entries, self._certificates = self._read()
        except (OSError, ValueError) as error:
            _log.warning(
                "changed tokens file cannot be used, the old tokens stay",
                file=str(self._path),
                problem=_cause(error),
            )
            return
        _log.info("tokens file read again", file=str(self._path), tokens=len(self._entries))

    def _signature(self) -> tuple[int, int, int]:
        stat = self._path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> tuple[tuple[_Entry, ...], Mapping[str, Limits]]:
        found = _Tokens.model_validate(tomllib.loads(self._path.read_text(encoding="utf-8")))
        entries = tuple(
            _Entry(Principal(name, token.role, "token", token.limits()), token.sha256, token.expires)
            for name, token in found.tokens.items()
        )
        return entries, {name: one.limits() for name, one in found.certificates.items()}


def _cause(error: OSError | ValueError) -> str:
    """What is wrong with the file, without its contents."""
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)
