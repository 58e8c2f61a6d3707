"""A certificate authority of your own, and certificates for TLS between gpuscale's programs (X.509 by `cryptography`)."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gpuscale.cli.commands.private_files import write_private

AUTHORITY_DAYS = 3650
"""How long a new authority is valid."""
_SKEW = timedelta(minutes=5)  # clocks of other hosts may be slow


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, folder: Path, name: str) -> None:
        """Write NAME.crt and NAME.key, the key for its owner only.

        Raises:
            OSError: a file cannot be written.
        """
        key = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_private(folder / f"{name}.key", key)
        certificate = folder / f"{name}.crt"
        write_private(certificate, self.certificate.public_bytes(serialization.Encoding.PEM))
        certificate.chmod(0o644)


def read_pair(folder: Path, name: str) -> Pair:
    """A pair that `Pair.write` wrote.

    Raises:
        OSError: a file cannot be read.
        ValueError: it holds something else.
    """
    certificate = x509.load_pem_x509_certificate((folder / f"{name}.crt").read_bytes())
    key = serialization.load_pem_private_key((folder / f"{name}.key").read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{name}.key is not an elliptic-curve key")  # noqa: TRY004
    return Pair(certificate, key)


def make_authority(name: str) -> Pair:
    """A new authority that may sign certificates of servers and clients, and no further authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = _builder(subject, subject, key, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    return Pair(builder.sign(key, hashes.SHA256()), key)


def make_server(authority: Pair, hosts: Sequence[str], days: int) -> Pair:
    """A certificate of a server that is reached by these names and IP addresses."""
    return _issue(authority, hosts[0], [_host(host) for host in hosts], ExtendedKeyUsageOID.SERVER_AUTH, days)


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The names and IP addresses of a server's certificate.

    Raises:
        ValueError: it has none.
    """
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ValueError("server.crt names no host; pass --host") from None
    return [str(one.value) for one in names]


def make_client(authority: Pair, uri: str, name: str, days: int) -> Pair:
    """A certificate that names a caller by a URI, `spiffe://<trust domain>/gpuscale/<role>/<name>`."""
    identity = x509.UniformResourceIdentifier(uri)
    return _issue(authority, name, [identity], ExtendedKeyUsageOID.CLIENT_AUTH, days)


def _issue(
    authority: Pair, name: str, names: Sequence[x509.GeneralName], purpose: x509.ObjectIdentifier, days: int
) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name(name), authority.certificate.subject, key, days)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(issuer, critical=False)
    return Pair(builder.sign(authority.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
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


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])
