"""Certificates of a throwaway authority, with SPIFFE identities where wanted."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gpuscale.common.rpc.channel import ClientTls
from gpuscale.common.security.tls import ServerTls


class Authority:
    """A certificate authority whose files lie in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def server(self, name: str = "server", *, client_ca: "Authority | None" = None) -> ServerTls:
        """Write a certificate for 127.0.0.1 and localhost; a second one of that name replaces the first."""
        cert, key = self._write(name, self._ca.issue_cert("127.0.0.1", "localhost"))
        return ServerTls(cert, key, None if client_ca is None else client_ca.file)

    def expired_server(self, *, days: float = -1) -> ServerTls:
        """Write a certificate for 127.0.0.1 that was good until yesterday, or is for `days` from now on."""
        end = datetime.now(UTC) + timedelta(days=days)
        return ServerTls(*self._write("expired", self._ca.issue_cert("127.0.0.1", not_after=end)))

    def _write(self, name: str, issued: trustme.LeafCert) -> tuple[Path, Path]:
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return cert, key

    def client(self, uri: str | None = None, name: str = "client", *, valid: bool = True) -> ClientTls:
        """Write a client certificate with a URI as its identity, or without one; `valid` or expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        end = now + timedelta(days=1 if valid else -1)
        issuer = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        ca_key = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(issuer.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(end)
        )
        known_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        builder = builder.add_extension(
            known_by, critical=False
        )  # Python 3.13 refuses certificates without it
        if uri is not None:
            names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
            builder = builder.add_extension(names, critical=False)
        cert_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        signed = builder.sign(ca_key, hashes.SHA256())
        cert_file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        key_file.write_bytes(key.private_bytes(*form))
        return ClientTls(self.file, cert_file, key_file)

    def trust(self) -> ClientTls:
        """What a client without a certificate needs."""
        return ClientTls(self.file)
