"""Certificates that callers show: when they end, and the deny list of those that count no more.

The deny list, a TOML file, names certificates by their serial number, in hexadecimal, or all those of a caller that were issued
before a time:

    [serials]
    5f9d01aa = 2026-11-23T10:00:00Z     # when it was revoked
    [names]
    gpu-host-07 = 2026-11-23T10:00:00Z  # its certificates that are valid from an earlier time on

It is read again within a second of a change; one that cannot be used leaves the list in force as it was.
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
"""Seconds between two looks at the deny list."""
MOST_KEPT: Final = 4096
"""Certificates that are not taken apart again for each call."""


@dataclass(frozen=True, slots=True)
class ShownCertificate:
    """What a certificate says."""

    serial: int  # its serial number
    uri: str  # the URI that names its caller; empty without one
    begins: float  # since when it is valid, in seconds since 1970
    ends: float  # until when, likewise

    @property
    def name(self) -> str:
        """Whom it names; empty for nobody."""
        return self.uri.rpartition("/")[2]


@lru_cache(MOST_KEPT)
def read_certificate(pem: bytes) -> ShownCertificate:
    """A certificate, in PEM. Raises ValueError: it is none."""
    return shown(x509.load_pem_x509_certificate(pem))


@lru_cache(64)
def first_to_end(pem: bytes) -> ShownCertificate:
    """The one of several certificates, as in a bundle of authorities, that ends first.

    Raises:
        ValueError: there is none.
    """
    return min(map(shown, x509.load_pem_x509_certificates(pem)), key=lambda one: one.ends)


def shown(found: x509.Certificate) -> ShownCertificate:
    """What a certificate says."""
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
    """A serial number in hexadecimal, with colons or without. Raises ValueError: it is none."""
    return int(str(text).replace(":", ""), 16)


_Serial = Annotated[int, BeforeValidator(read_serial)]
_Time = Annotated[AwareDatetime, Field(strict=True)]


class DenyList(BaseModel, frozen=True, extra="forbid"):
    """Certificates that count no more."""

    # when each was revoked
    serials: Mapping[_Serial, _Time] = Field(default_factory=dict[int, AwareDatetime])
    # the time before which the certificates of a caller are refused
    names: Mapping[str, _Time] = Field(default_factory=dict[str, AwareDatetime])

    def has(self, shown: ShownCertificate) -> bool:
        """Whether a certificate is on it."""
        before = self.names.get(shown.name)
        return shown.serial in self.serials or (before is not None and shown.begins < before.timestamp())


def read_deny_list(path: Path) -> DenyList:
    """The deny list of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none.
    """
    return DenyList.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))


class CertificateCheck:
    """Whether certificates that TLS let in once count still: connections outlive them. `revoked` is the file of the deny list.

    Raises:
        FailedPreconditionError: it cannot be used (reason REVOKED_FILE).
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
        """Let a certificate pass.

        Raises:
            UnauthenticatedError: it has ended (CERTIFICATE_EXPIRED), or was revoked (CERTIFICATE_REVOKED).
        """
        found = read_certificate(pem)
        if found.ends <= time.time():
            raise UnauthenticatedError("the client certificate has expired", reason="CERTIFICATE_EXPIRED")
        if self._revoked is None:
            return
        self._revoked.newer()
        if self._revoked.current.has(found):
            raise UnauthenticatedError("the client certificate was revoked", reason="CERTIFICATE_REVOKED")
