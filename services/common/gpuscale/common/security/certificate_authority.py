"""Our own certificate authority: its files, and what it signs.

Certificates are valid from five minutes before their creation, as clocks of other hosts may be slow, unless they replace a
revoked one (`gpuscale.common.security.certificates`).
"""

import hashlib
import ipaddress
import secrets
import time
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from gpuscale.common.secrets import write_private
from gpuscale.common.security.auth import Limits, Role
from gpuscale.common.security.certificates import DenyList, read_deny_list
from gpuscale.common.security.followed import Followed, cause

AUTHORITY_DAYS: Final = 3650
"""Validity of a new authority, in days."""
SERVICE_NAMES: Final = frozenset(
    (
        "admin",
        "adapter",
        "agent",
        "allocator",
        "autoscaler",
        "dashboard",
        "fleet",
        "gate",
        "gateway",
        "services",
    )
)
"""Names reserved for services; only an admin can give one to a host."""
SKEW: Final = timedelta(minutes=5)
LEAST_RSA_BITS: Final = 2048
_SERVES: Final = ExtendedKeyUsageOID.SERVER_AUTH
_CALLS: Final = ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, folder: Path, name: str, *others: x509.Certificate) -> None:
        """Write NAME.crt, with `others` appended, and the private NAME.key. Raises OSError on failure."""
        write_private(folder / f"{name}.key", key_pem(self.key))
        write_certificates(folder / f"{name}.crt", self.certificate, *others)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A key in unencrypted PKCS #8 PEM."""
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def write_certificates(file: Path, *certificates: x509.Certificate) -> None:
    """Replace a world-readable file of certificates. Raises OSError on failure."""
    pems = (one.public_bytes(serialization.Encoding.PEM) for one in certificates)
    write_private(file, b"".join(pems), public=True)


def read_pair(folder: Path, name: str) -> Pair:
    """Read a pair written by `Pair.write`. Raises OSError or ValueError for unusable files."""
    certificate = x509.load_pem_x509_certificate((folder / f"{name}.crt").read_bytes())
    key = serialization.load_pem_private_key((folder / f"{name}.key").read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{name}.key is not an elliptic-curve key")  # noqa: TRY004
    return Pair(certificate, key)


def make_authority(name: str) -> Pair:
    """Create an authority that may sign server and client certificates, but no further authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = _builder(subject, subject, key.public_key(), datetime.now(UTC) - SKEW, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    return Pair(builder.sign(key, hashes.SHA256()), key)


@dataclass(frozen=True, slots=True)
class CertificateSubject:
    """The subject of a certificate: its common name, and host names and IP addresses of a server.

    `uri` is the identity of a caller, `spiffe://<trust domain>/gpuscale/<role>/<name>`; empty for a server only.
    """

    name: str
    hosts: tuple[str, ...] = ()
    uri: str = ""


def subject_of(certificate: x509.Certificate) -> CertificateSubject:
    """The subject of a certificate."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    hosts = tuple(str(one.value) for one in names if isinstance(one, (x509.DNSName, x509.IPAddress)))
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return CertificateSubject(str(common[0].value) if common else "", hosts, uris[0] if uris else "")


def issue(
    authority: Pair, subject: CertificateSubject, days: float, *, begins: datetime | None = None
) -> Pair:
    """A new key with a certificate, valid no earlier than `begins`."""
    key = ec.generate_private_key(ec.SECP256R1())
    return Pair(sign(authority, subject, key.public_key(), days, begins=begins), key)


def sign(
    authority: Pair,
    subject: CertificateSubject,
    key: CertificatePublicKeyTypes,
    days: float,
    *,
    begins: datetime | None = None,
) -> x509.Certificate:
    """A certificate for an existing public key, as `issue`."""
    names: list[x509.GeneralName] = []
    for host in subject.hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    purposes = [_SERVES] if names else []
    if subject.uri:
        names.append(x509.UniformResourceIdentifier(subject.uri))
        purposes.append(_CALLS)
    usual = datetime.now(UTC) - SKEW
    start = usual if begins is None else max(usual, begins)
    builder = _builder(_name(subject.name), authority.certificate.subject, key, start, days)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(issuer, critical=False)
    return builder.sign(authority.key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: CertificatePublicKeyTypes, begins: datetime, days: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(datetime.now(UTC) + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def digest_of(authority: x509.Certificate) -> str:
    """The fingerprint of an authority: `sha256:` and the hexadecimal digest of its certificate."""
    return f"sha256:{hashlib.sha256(authority.public_bytes(serialization.Encoding.DER)).hexdigest()}"


def make_request() -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """A new key, and a DER certificate request with an empty subject, which the signer sets."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return key, request.public_bytes(serialization.Encoding.DER)


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether an authority signed a certificate, or is that certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return certificate == authority
    return True


@dataclass(eq=False)
class Signer:
    """Signs certificate requests with the authority in a directory, whose files it follows.

    Names are taken by `own`, this program's server certificate, by callers in `tokens_file`, and by certificates beside
    the authority. A certificate for a name on the deny list `revoked` starts late enough to be valid again.

    Raises FailedPreconditionError: the directory or a file cannot be used (reason AUTHORITY).
    """

    directory: Path
    days: float
    trust_domain: str
    own: Path | None = None
    revoked: Path | None = None
    tokens_file: Path | None = None

    def __post_init__(self) -> None:
        others = (self.own, self.revoked, self.tokens_file)
        files = [self.directory / "ca.crt", self.directory / "ca.key", *filter(None, others)]
        try:
            self._file = Followed("authority", files, self._read)
        except (OSError, ValueError) as error:
            message = f"the authority in {self.directory} cannot be used: {cause(error)}"
            raise FailedPreconditionError(message, reason="AUTHORITY") from error

    def _read(self) -> tuple[Pair, str, frozenset[str], DenyList]:
        pair = read_pair(self.directory, "ca")
        pem = (self.directory / "ca.crt").read_text(encoding="ascii")
        taken = set[str](SERVICE_NAMES)
        if self.own is not None:
            taken.update(subject_of(x509.load_pem_x509_certificate(self.own.read_bytes())).hosts)
        if self.tokens_file is not None:
            callers = tomllib.loads(self.tokens_file.read_text(encoding="utf-8"))
            taken.update(name for table in ("tokens", "certificates") for name in callers.get(table, ()))
        revoked = DenyList() if self.revoked is None else read_deny_list(self.revoked)
        return pair, pem, frozenset(map(str.casefold, taken)), revoked

    @property
    def bundle(self) -> str:
        """The PEM certificates of the authority; two during a replacement."""
        self._file.newer()
        return self._file.current[1]

    @property
    def digest(self) -> str:
        """The fingerprint of the signing authority."""
        self._file.newer()
        return digest_of(self._file.current[0].certificate)

    def is_taken(self, name: str) -> bool:
        """Whether a name is taken, ignoring case, by a service, a caller in the tokens file or an issued certificate."""
        self._file.newer()
        folded = name.casefold()
        issued = {file.stem.casefold() for file in self.directory.glob("*.crt")}
        return folded in self._file.current[2] | issued

    def has_signed(self, certificate: x509.Certificate) -> bool:
        """Whether an authority in `bundle` signed a certificate."""
        trusted = x509.load_pem_x509_certificates(self.bundle.encode("ascii"))
        return any(is_issued_by(certificate, one) for one in trusted)

    def identity(self, role: str, name: str) -> str:
        """The URI that identifies a caller."""
        return f"spiffe://{self.trust_domain}/gpuscale/{role}/{name}"

    def shared_files(self) -> tuple[str, str]:
        """The content of the tokens file and of the deny list, for another host of services. Raises UnavailableError: they cannot be read."""
        try:
            found = [
                "" if one is None else one.read_text("utf-8") for one in (self.tokens_file, self.revoked)
            ]
        except (OSError, ValueError) as error:
            raise UnavailableError(
                f"cannot read the tokens file or deny list: {type(error).__name__}"
            ) from error
        return found[0], found[1]

    def sign(self, request: bytes, subject: CertificateSubject, days: float | None = None) -> str:
        """Sign the key in a DER request; returns a PEM certificate. Raises InvalidArgumentError: the request is malformed, or its key is too weak."""
        try:
            found = x509.load_der_x509_csr(request)
            whole, key = found.is_signature_valid, found.public_key()
        except (ValueError, UnsupportedAlgorithm):
            message = "csr must be a certificate request (PKCS #10), DER"
            raise InvalidArgumentError(message, field="csr") from None
        strong = isinstance(key, ec.EllipticCurvePublicKey) or (
            isinstance(key, rsa.RSAPublicKey) and key.key_size >= LEAST_RSA_BITS
        )
        if not whole or not strong:
            raise InvalidArgumentError(
                "csr must be signed by its own key, of an elliptic curve or RSA with 2048 bits", field="csr"
            )
        self._file.newer()
        authority, _, _, revoked = self._file.current
        begins = revoked.names.get(subject.uri.rpartition("/")[2])
        signed = sign(authority, subject, key, days or self.days, begins=begins)
        return signed.public_bytes(serialization.Encoding.PEM).decode("ascii")

    def sign_token(self, name: str, role: Role, limits: Limits, seconds: float) -> tuple[str, datetime]:
        """Sign a bearer token (`gpuscale.common.security.signed_tokens`); returns it with its expiry."""
        from joserfc import jwt
        from joserfc.jwk import ECKey

        from gpuscale.common.security.signed_tokens import LOGIN_ISSUER, key_id

        self._file.newer()
        authority = self._file.current[0]
        now = int(time.time())
        claims = {
            "iss": LOGIN_ISSUER,
            "aud": LOGIN_ISSUER,
            "sub": name,
            "role": role.value,
            "tenants": limits.tenants,
            "max_priority": limits.max_priority,
            "iat": now,
            "exp": now + int(seconds),
            "jti": secrets.token_hex(8),
        }
        header = {"alg": "ES256", "kid": key_id(authority.certificate)}
        token = jwt.encode(header, claims, ECKey.import_key(authority.key))
        return token, datetime.fromtimestamp(now + int(seconds), UTC)
