"""Renewal of the certificates of a running program by the fleet."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gpuscale.api.monitor import v1 as api
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff
from gpuscale.common.secrets import write_private
from gpuscale.common.security.auth import CALLER_KEY
from gpuscale.common.security.certificate_authority import is_issued_by, key_pem, make_request
from gpuscale.common.security.certificates import read_certificate
from gpuscale.internal.monitor import v1 as internal

LOOK_PERIOD: Final = 60.0
"""Seconds between two checks whether a certificate is due, and between two attempts to renew it."""
RENEWED_AT: Final = 2 / 3
"""Fraction of its validity after which a certificate is renewed."""

_log = get_logger(__name__)


async def renew_certificate(fleet: grpc.aio.Channel, file: Path, ca_file: Path) -> NoReturn:
    """Renew a client certificate when a third of its validity is left, until cancelled.

    `file` has both certificate and key, so that an atomic replacement keeps them matching; `ca_file` is replaced if it
    changed. When a new authority comes first in it, the certificate is renewed at once.
    """
    stub = api.CertificateServiceStub(fleet)
    while True:
        try:
            if await asyncio.to_thread(is_due, file, ca_file):
                key, csr = make_request()
                with rpc_errors():
                    request = api.RenewCertificateRequest(csr=csr)
                    answer = await stub.RenewCertificate(request, timeout=RPC_TIMEOUT)
                pems = (answer.certificate_pem, answer.authority_pem)
                await asyncio.to_thread(write_host_files, file, ca_file, key, *pems)
                _log.info("certificate renewed", file=str(file))
        except (GpuscaleError, OSError, ValueError) as error:
            _log.warning("cannot renew the certificate", file=str(file), problem=await _problem(error, file))
        await asyncio.sleep(LOOK_PERIOD)


async def follow_fleet(fleet: grpc.aio.Channel, place: Path) -> NoReturn:
    """Keep the files of a services host in sync with the fleet until cancelled: certificates, tokens file, deny list.

    The first certificates have a long validity, so they are renewed at once.
    """
    stub, renewed = internal.ServicesHostServiceStub(fleet), False
    own, pause = place / SERVICES_FILES[1], Backoff(initial=1.0, cap=LOOK_PERIOD)
    while True:
        try:
            shown = await asyncio.to_thread(own.read_bytes)
            due = await asyncio.to_thread(is_due, own, place / SERVICES_FILES[2])
            key, csr = make_request() if due or not renewed else (None, b"")
            caller = ((CALLER_KEY, f"operator/{read_certificate(shown).name}"),)
            request = internal.FollowFilesRequest(csr=csr)
            with rpc_errors():
                async for answer in stub.FollowFiles(request, metadata=caller, timeout=2 * LOOK_PERIOD):
                    await asyncio.to_thread(write_services_files, place, answer.files, key)
                    key, renewed = None, True
                    pause.reset()
        except (GpuscaleError, OSError, ValueError) as error:
            problem = await _problem(error, own, "--kind KIND ")
            _log.warning("cannot follow the files of the fleet", problem=problem)
            await asyncio.sleep(pause.next())


async def _problem(error: Exception, file: Path, kind: str = "") -> str:
    """Why a call with a certificate failed: of one that has expired, gRPC says that the socket closed."""
    with suppress(OSError, ValueError):
        own = read_certificate(await asyncio.to_thread(file.read_bytes))
        if own.ends <= time.time():
            token = f"gpuscalectl join-token create {kind}--node {own.name}"
            return f"the certificate {file} has expired; for another, gpuscalectl join here with a token of: {token}"
    return str(error)


def is_due(file: Path, ca_file: Path | None = None) -> bool:
    """Whether a third or less of a certificate's validity is left, or the first authority of `ca_file` did not issue it."""
    pem = file.read_bytes()
    shown = read_certificate(pem)
    if time.time() >= shown.begins + (shown.ends - shown.begins) * RENEWED_AT:
        return True
    newest = None if ca_file is None else x509.load_pem_x509_certificate(ca_file.read_bytes())
    return newest is not None and not is_issued_by(x509.load_pem_x509_certificate(pem), newest)


SERVICES_FILES: Final = ("pki/server.pem", "pki/gate.pem", "pki/ca.crt", "tokens.toml", "revoked.toml")
"""Files of a services host: certificate and key of its servers, the same of its gateway as a client, and those for authentication."""


def write_services_files(
    place: Path, files: api.JoinResponse, key: ec.EllipticCurvePrivateKey | None
) -> None:
    """Write changed `SERVICES_FILES`; certificates only with a key, ValueError if it does not match."""
    server, gate, authority, tokens, revoked = (place / name for name in SERVICES_FILES)
    if key is not None:
        of_gateway = files.gateway_certificate_pem or files.certificate_pem
        write_host_files(server, authority, key, files.certificate_pem, files.authority_pem)
        write_host_files(gate, authority, key, of_gateway, files.authority_pem)
    for file, text in ((authority, files.authority_pem), (tokens, files.tokens), (revoked, files.revoked)):
        if not file.exists() or file.read_text("utf-8") != text:
            write_private(file, text.encode(), public=file is not tokens)


def write_host_files(
    file: Path, ca_file: Path, key: ec.EllipticCurvePrivateKey, certificate: str, authority: str
) -> None:
    """Write a certificate with its key, and a changed authority; ValueError if certificate and key do not match."""
    public = x509.load_pem_x509_certificate(certificate.encode()).public_key()
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if public.public_bytes(*form) != key.public_key().public_bytes(*form):
        raise ValueError("the new certificate has another key")
    if not ca_file.exists() or ca_file.read_text(encoding="ascii") != authority:
        write_private(ca_file, authority.encode("ascii"), public=True)
    write_private(file, certificate.encode("ascii") + key_pem(key))
