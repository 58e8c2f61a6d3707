"""Client certificates: expiry and the deny list of revoked ones.

The deny list, a TOML file, lists certificates by hexadecimal serial number, or those of a caller issued before a time:

    [serials]
    5f9d01aa = 2026-11-23T10:00:00Z     # when it was revoked
    [names]
    gpu-host-07 = 2026-11-23T10:00:00Z  # revokes its certificates with an earlier start

It is reloaded within a second of a change; if the new file cannot be used, the old list stays in force.
"""

import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final

from cryptography import x509
from pydantic import AwareDatetime, BaseModel, BeforeValidator, Field

from gpuscale.common.errors import FailedPreconditionError, UnauthenticatedError
from gpuscale.common.security.followed import Followed, cause

CHECK_PERIOD: Final = 1.0
"""Seconds between two checks of the deny list."""
MOST_KEPT: Final = 4096
"""Size of the cache of parsed certificates."""


@dataclass(frozen=True, slots=True)
class ShownCertificate:
    """Content of a certificate."""

    serial: int  # its serial number
    uri: str  # the URI that names its caller; empty without one
    begins: float  # start of its validity, in seconds since 1970
    ends: float  # end of its validity, likewise

    @property
    def name(self) -> str:
        """Name of its caller; empty without one."""
        return self.uri.rpartition("/")[2]


@lru_cache(MOST_KEPT)
def read_certificate(pem: bytes) -> ShownCertificate:
    """Parse a PEM certificate; ValueError for anything else."""
    return shown(x509.load_pem_x509_certificate(pem))


@lru_cache(64)
def first_to_end(pem: bytes) -> ShownCertificate:
    """The certificate in a PEM bundle that expires first; ValueError if there is none."""
    return min(map(shown, x509.load_pem_x509_certificates(pem)), key=lambda one: one.ends)


def shown(found: x509.Certificate) -> ShownCertificate:
    """Content of a certificate."""
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    begins, ends = found.not_valid_before_utc, found.not_valid_after_utc
    return ShownCertificate(
        found.serial_number, uris[0] if uris else "", begins.timestamp(), ends.timestamp()
    )


def read_serial(text: object) -> int:
    """Parse a hexadecimal serial number, with or without colons; ValueError for anything else."""
    return int(str(text).replace(":", ""), 16)


_Serial = Annotated[int, BeforeValidator(read_serial)]
_Time = Annotated[AwareDatetime, Field(strict=True)]


class DenyList(BaseModel, frozen=True, extra="forbid"):
    """Revoked certificates."""

    # when each was revoked
    serials: Mapping[_Serial, _Time] = Field(default_factory=dict[int, AwareDatetime])
    # by caller: certificates with an earlier start are refused
    names: Mapping[str, _Time] = Field(default_factory=dict[str, AwareDatetime])

    def has(self, shown: ShownCertificate) -> bool:
        """Whether a certificate is revoked."""
        before = self.names.get(shown.name)
        return shown.serial in self.serials or (before is not None and shown.begins < before.timestamp())


def read_deny_list(path: Path) -> DenyList:
    """Read a deny list. Raises OSError or ValueError if it cannot be used."""
    return DenyList.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))


class CertificateCheck:
    """Checks for each call that the certificate of its connection is still valid. `revoked` is the file of the deny list.

    Raises FailedPreconditionError: the file cannot be used (reason REVOKED_FILE).
    """

    def __init__(self, revoked: Path | None) -> None:
        self._revoked = None
        if revoked is None:
            return
        try:
            self._revoked = Followed("deny list", (revoked,), lambda: read_deny_list(revoked), CHECK_PERIOD)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else cause(error)
            message = f"{revoked} cannot be used as deny list of certificates: {why}"
            raise FailedPreconditionError(message, reason="REVOKED_FILE") from error

    def check(self, pem: bytes) -> None:
        """Check a PEM certificate. Raises UnauthenticatedError: it has expired (CERTIFICATE_EXPIRED) or was revoked (CERTIFICATE_REVOKED)."""
        found = read_certificate(pem)
        if found.ends <= time.time():
            raise UnauthenticatedError("the client certificate has expired", reason="CERTIFICATE_EXPIRED")
        if self._revoked is None:
            return
        self._revoked.newer()
        if self._revoked.current.has(found):
            raise UnauthenticatedError("the client certificate was revoked", reason="CERTIFICATE_REVOKED")
