"""`gpuscalectl certs init|issue`: your own certificate authority, and certificates for servers and callers, as files."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gpuscale.cli.commands.private_files import write_private
from gpuscale.cli.commands.tokens import ROLE
from gpuscale.cli.console.command import FILE, command, one_name
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.parameters import option, repeated
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.names import is_id

AUTHORITY_DAYS = 3650
"""How long a new authority is valid."""
_SKEW = timedelta(minutes=5)  # clocks of other hosts may be slow
_COLUMNS = (("NAME", "name"), ("CERTIFICATE", "certificate"), ("KEY", "key"))
DAYS = option(
    "--days",
    type=click.IntRange(1, 3650),
    default=397,
    metavar="N",
    help="How long the certificate is valid.",
)
DIRECTORY = option("--dir", "directory", type=FILE, required=True, metavar="DIR", help="Where the files are.")


@command("certs init --dir pki --host gpu-gateway --host 127.0.0.1")
@DIRECTORY
@repeated(
    "--host",
    metavar="NAME",
    help="Name or IP address of the server. Without it: those of the present certificate, or localhost and 127.0.0.1.",
)
@DAYS
def init(session: Session, directory: Path, host: tuple[str, ...], days: int) -> None:
    """Create an authority, unless the directory has one, and a certificate for a server.

    Run it again to renew the server's certificate: a running server loads it by itself.
    """
    hosts = list(host) or ["localhost", "127.0.0.1"]
    try:
        if not host and (directory / "server.crt").exists():
            hosts = hosts_of(read_pair(directory, "server").certificate)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (directory / "ca.key").exists():
            make_authority("gpuscale").write(directory, "ca")
            note(f"created an authority; keep {directory / 'ca.key'} where nobody else can read it")
        make_server(read_pair(directory, "ca"), hosts, days).write(directory, "server")
    except (OSError, ValueError) as error:
        raise _unusable(directory, error) from error
    note(f"callers reach the server at: {', '.join(hosts)}")
    note(
        f"for a server: --tls-cert-file {directory / 'server.crt'} --tls-key-file {directory / 'server.key'}"
    )
    note(f"for a caller: --ca-file {directory / 'ca.crt'}")
    _show(session, directory, "ca", "server")


@command("certs issue host-1 --dir pki --role agent")
@one_name()
@DIRECTORY
@ROLE
@option("--trust-domain", default="gpuscale.local", metavar="NAME", help="Trust domain of the SPIFFE id.")
@DAYS
def issue(session: Session, name: str, directory: Path, role: str, trust_domain: str, days: int) -> None:
    """Issue a certificate that names a caller and its role, for servers with --tls-client-ca-file."""
    if not is_id(name) or name in {"ca", "server"}:
        raise InvalidArgumentError(f"{name!r} is not a valid name of a caller", field="name")
    uri = f"spiffe://{trust_domain}/gpuscale/{role}/{name}"
    try:
        make_client(read_pair(directory, "ca"), uri, name, days).write(directory, name)
    except (OSError, ValueError) as error:
        raise _unusable(directory, error) from error
    note(f"{name} calls as {role}, with --cert-file and --key-file: {uri}")
    _show(session, directory, name)


def _show(session: Session, directory: Path, *names: str) -> None:
    records = [
        {"name": name, "certificate": str(directory / f"{name}.crt"), "key": str(directory / f"{name}.key")}
        for name in names
    ]
    session.output.write_records("certificates", records, _COLUMNS)


def _unusable(directory: Path, error: OSError | ValueError) -> FailedPreconditionError:
    text = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
    name = error.filename if isinstance(error, OSError) and error.filename else directory
    return FailedPreconditionError(f"{name}: {text}", reason="CERTIFICATES")


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
    names: list[x509.GeneralName] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return _issue(authority, hosts[0], names, ExtendedKeyUsageOID.SERVER_AUTH, days)


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


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])
