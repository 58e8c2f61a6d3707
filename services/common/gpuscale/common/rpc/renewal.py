"""Certificates that a program has renewed by the fleet while it runs."""

import asyncio
import time
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
from gpuscale.common.security.authority import key_pem, make_request
from gpuscale.common.security.certificates import read_certificate
from gpuscale.internal.monitor import v1 as internal

LOOK_PERIOD: Final = 60.0
"""Seconds between two looks at how much of a certificate's life is left, and between two attempts to renew it."""
RENEWED_AT: Final = 2 / 3
"""The part of its life after which a certificate is renewed."""

_log = get_logger(__name__)


async def renew_certificate(fleet: grpc.aio.Channel, file: Path, ca_file: Path) -> NoReturn:
    """Renew a client certificate whenever a third of its life is left, until cancelled.

    `file` holds certificate and key, and is replaced at once, so that they always fit; `ca_file` where the authority is another.
    """
    stub = api.CertificateServiceStub(fleet)
    while True:
        try:
            if is_due(await asyncio.to_thread(file.read_bytes)):
                key, csr = make_request()
                with rpc_errors():
                    request = api.RenewCertificateRequest(csr=csr)
                    answer = await stub.RenewCertificate(request, timeout=RPC_TIMEOUT)
                pems = (answer.certificate_pem, answer.authority_pem)
                await asyncio.to_thread(write_host_files, file, ca_file, key, *pems)
                _log.info("certificate renewed", file=str(file))
        except (GpuscaleError, OSError, ValueError) as error:
            _log.warning("cannot renew the certificate", file=str(file), problem=str(error))
        await asyncio.sleep(LOOK_PERIOD)


async def follow_fleet(fleet: grpc.aio.Channel, place: Path) -> NoReturn:
    """Keep the files of a host of services as the fleet has them, until cancelled: certificates, tokens file and deny list.

    The first certificates are valid long, so they are renewed at once.
    """
    stub, renewed = internal.ServicesHostServiceStub(fleet), False
    own, pause = place / SERVICES_FILES[1], Backoff(initial=1.0, cap=LOOK_PERIOD)
    while True:
        try:
            shown = await asyncio.to_thread(own.read_bytes)
            key, csr = (None, b"") if renewed and not is_due(shown) else make_request()
            caller = ((CALLER_KEY, f"operator/{read_certificate(shown).name}"),)
            request = internal.FollowFilesRequest(csr=csr)
            with rpc_errors():
                async for answer in stub.FollowFiles(request, metadata=caller, timeout=2 * LOOK_PERIOD):
                    await asyncio.to_thread(write_services_files, place, answer.files, key)
                    key, renewed = None, True
                    pause.reset()
        except (GpuscaleError, OSError, ValueError) as error:
            _log.warning("cannot follow the files of the fleet", problem=str(error))
            await asyncio.sleep(pause.next())


def is_due(pem: bytes) -> bool:
    """Whether a third or less of a certificate's life is left."""
    shown = read_certificate(pem)
    return time.time() >= shown.begins + (shown.ends - shown.begins) * RENEWED_AT


SERVICES_FILES: Final = ("pki/server.pem", "pki/gate.pem", "pki/ca.crt", "tokens.toml", "revoked.toml")
"""What a host of services has from the fleet: certificates with their key of its servers and of its gateway as a caller, and whom to let in."""


def write_services_files(
    place: Path, files: api.JoinResponse, key: ec.EllipticCurvePrivateKey | None
) -> None:
    """Write `SERVICES_FILES` where they have changed, certificates where there is a key; ValueError where they do not fit."""
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
    """Write a certificate with its key, and the authority below which it was signed, where they have changed; ValueError where they do not fit."""
    public = x509.load_pem_x509_certificate(certificate.encode()).public_key()
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if public.public_bytes(*form) != key.public_key().public_bytes(*form):
        raise ValueError("the certificate that came is of another key")
    if not ca_file.exists() or ca_file.read_text(encoding="ascii") != authority:
        write_private(ca_file, authority.encode("ascii"), public=True)
    write_private(file, certificate.encode("ascii") + key_pem(key))
