"""`gpuscalectl certs`: your own certificate authority, certificates for servers and callers, as files, and their revocation."""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import tomlkit
from cryptography import x509

from gpuscale.cli.console.command import FILE, Session, command, config_home, names, one_name
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.parameters import option, repeated
from gpuscale.common import secrets
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.names import is_id
from gpuscale.common.rpc import certificate_renewal
from gpuscale.common.security import certificate_authority as pki
from gpuscale.common.security import certificates as issued
from gpuscale.common.security import followed

ROLES = ("viewer", "agent", "operator", "admin")
GATEWAY = "gateway"
_COLUMNS = ("name", "state", "expires", "serial", "identity", "hosts")
JOINED = {"host.pem", "server.pem", "gate.pem"}  # written by `join`, each a certificate with its key
SERVICE_DAYS = 397
DAYS = option(
    "--days",
    type=click.IntRange(1, 3650),
    default=SERVICE_DAYS,
    metavar="N",
    help="How long the certificate is valid.",
)
_USUAL = [
    one for one in (Path("/etc/gpuscale/pki"), config_home() / "gpuscale/pki") if os.access(one, os.X_OK)
]
"""The directory of `gpuscalectl init`, if it has run on this host."""
DIRECTORY = option(
    "--dir",
    "directory",
    type=FILE,
    metavar="DIR",
    show_default=False,
    help="Directory of the files; by default that of `gpuscalectl init` on this host.",
    **({"default": _USUAL[0]} if _USUAL else {"required": True}),
)
_REVOKED_HELP = "The deny list of the servers, TOML; $GPUSCALE_REVOKED_FILE."
REVOKED_FILE = option("--revoked-file", type=FILE, envvar="GPUSCALE_REVOKED_FILE", help=_REVOKED_HELP)


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
    hosts = host or ("localhost", "127.0.0.1")
    with _using(directory):
        if not host and (directory / "server.crt").exists():
            hosts = pki.subject_of(pki.read_pair(directory, "server").certificate).hosts
        if not hosts:
            raise ValueError("server.crt names no host; pass --host")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (directory / "ca.key").exists():
            pki.make_authority("gpuscale").write(directory, "ca")
            note(f"created an authority; keep {directory / 'ca.key'} where no one else can read it")
        subject = pki.CertificateSubject(hosts[0], hosts)
        pki.issue(pki.read_pair(directory, "ca"), subject, days).write(directory, "server")
    note(f"callers reach the server at: {', '.join(hosts)}")
    note(
        f"for a server: --tls-cert-file {directory / 'server.crt'} --tls-key-file {directory / 'server.key'}"
    )
    note(f"for a caller: --ca-file {directory / 'ca.crt'}")
    _show(session, directory, "ca", "server")


@command("certs issue host-1 --dir pki --role agent")
@one_name()
@DIRECTORY
@option(
    "--role",
    type=click.Choice((*ROLES, GATEWAY)),
    help="What its holder may do, viewer by default; gateway: call on behalf of the callers it authenticated.",
)
@option("--trust-domain", default="gpuscale.local", metavar="NAME", help="Trust domain of the SPIFFE id.")
@repeated(
    "--host",
    metavar="NAME",
    help="Name or IP address at which it serves, as /metrics of a host; without --role it does not call.",
)
@DAYS
@REVOKED_FILE
def issue_client(
    session: Session,
    name: str,
    directory: Path,
    role: str | None,
    trust_domain: str,
    host: tuple[str, ...],
    days: int,
    revoked_file: Path | None,
) -> None:
    """Issue a certificate that names a caller and its role, for servers with --tls-client-ca-file; with --host, one of a server."""
    if not is_id(name) or name in {"ca", "server"}:
        raise InvalidArgumentError(f"{name!r} is not a valid caller name", field="name")
    role = role or (None if host else "viewer")
    uri = f"spiffe://{trust_domain}/gpuscale/{role}/{name}" if role else ""
    with _using(directory):
        hosts = tuple(map(_host, host))
        if host and (directory / "server.crt").exists():
            own = pki.subject_of(pki.read_pair(directory, "server").certificate).hosts
            if taken := {*hosts} & {*map(str.lower, own)}:
                raise InvalidArgumentError(f"{min(taken)} is a name of the gateway", field="host")
        begins = _deny_list(revoked_file).names.get(name)
        subject = pki.CertificateSubject(name, hosts, uri)
        pki.issue(pki.read_pair(directory, "ca"), subject, days, begins=begins).write(directory, name)
    if role:
        calls = "for its callers" if role == GATEWAY else f"as {role}"
        note(f"{name} calls {calls}, with --cert-file and --key-file: {uri}")
    _show(session, directory, name)


def _host(typed: str) -> str:
    """A host name, which is no wildcard, in lower case, or an IP address in its short form. Raises InvalidArgumentError."""
    if re.fullmatch(r"[\w-]+(\.[\w-]+)*", typed, re.ASCII):
        return typed.lower()
    try:
        return str(ipaddress.ip_address(typed))
    except ValueError:
        raise InvalidArgumentError(f"host {typed!r} is no host name or IP address", field="host") from None


@command("certs list --dir pki")
@DIRECTORY
@REVOKED_FILE
def list_certificates(session: Session, directory: Path, revoked_file: Path | None) -> None:
    """List the certificates in a directory, also of a host that joined: their holders, how long they are valid.

    On the first host of services, also the newest of each host that joined.
    """
    now, records = datetime.now(UTC), list[dict[str, object]]()
    with _using(directory):
        revoked, authority = _deny_list(revoked_file), directory / "ca.crt"
        former = x509.load_pem_x509_certificates(authority.read_bytes())[1:] if authority.exists() else []
        own = [one for one in directory.iterdir() if one.suffix == ".crt" or one.name in JOINED]
        for file in sorted([*own, *(one for one in _of_hosts(directory) if one.exists())]):
            for certificate in x509.load_pem_x509_certificates(file.read_bytes()):
                subject, ends = pki.subject_of(certificate), certificate.not_valid_after_utc
                state = "ENDS SOON" if ends_soon(certificate, now) else "VALID"
                if any(pki.is_issued_by(certificate, one) for one in former):
                    state = "OLD AUTHORITY"
                if revoked.has(issued.shown(certificate)):
                    state = "REVOKED"
                records.append(
                    {
                        "name": file.stem,
                        "state": "EXPIRED" if ends <= now else state,
                        "expires": ends,
                        "serial": f"{certificate.serial_number:x}",
                        "identity": subject.uri,
                        "hosts": list(subject.hosts),
                    }
                )
    session.output.write_records("certificates", records, _COLUMNS, spare=("identity", "serial"))
    session.output.note_none(records, f"no certificates in {directory}")


@command("certs renew --dir pki")
@names(required=False)
@DIRECTORY
@DAYS
@REVOKED_FILE
def renew(
    session: Session, name: tuple[str, ...], directory: Path, days: int, revoked_file: Path | None
) -> None:
    """Renew certificates; without a name, all in the directory. Each keeps its holder and gets a new key.

    Programs reload replaced files by themselves.
    """
    if "ca" in name:
        raise InvalidArgumentError("an authority is replaced: gpuscalectl certs rotate-ca", field="name")
    renewed = name or _names_in(directory)
    _renew(directory, renewed, days, revoked_file)
    _show(session, directory, *renewed)


def renew_due(directory: Path, revoked_file: Path) -> None:
    """Renew certificates with less than a third of their life left, and report failures."""
    try:
        with _using(directory):
            files = {one: directory / f"{one}.crt" for one in _names_in(directory)}
            due = [one for one, file in files.items() if certificate_renewal.is_due(file)]
        _renew(directory, due, SERVICE_DAYS, revoked_file)
        if due:
            note(f"renewed the certificates {', '.join(due)}")
    except FailedPreconditionError as error:
        note(f"certificates are not renewed: {error}")


def _names_in(directory: Path) -> list[str]:
    found = sorted(file.stem for file in directory.glob("*.crt") if file.with_suffix(".key").exists())
    return [one for one in found if one != "ca"]


def _renew(directory: Path, renewed: Sequence[str], days: int, revoked_file: Path | None) -> None:
    with _using(directory):
        authority, revoked = pki.read_pair(directory, "ca"), _deny_list(revoked_file)
        for one in renewed:
            subject = pki.subject_of(pki.read_pair(directory, one).certificate)
            begins = revoked.names.get(subject.uri.rpartition("/")[2])
            pki.issue(authority, subject, days, begins=begins).write(directory, one)


@command("certs rotate-ca --dir pki")
@DIRECTORY
@option("--finish", is_flag=True, help="Trust only the new authority.")
def rotate_ca(session: Session, directory: Path, finish: bool) -> None:
    """Create a new authority; ca.crt trusts both until --finish.

    Distribute ca.crt, renew and distribute every certificate, then run it with --finish and distribute ca.crt again.
    """
    with _using(directory):
        trusted = x509.load_pem_x509_certificates((directory / "ca.crt").read_bytes())
        if finish:
            if len(trusted) == 1:
                raise ValueError("ca.crt has one authority: nothing is being rotated")
            for file in sorted({*directory.glob("*.crt")} - {directory / "ca.crt"}):
                if _is_old(file, trusted[0]):
                    raise ValueError(f"{file.name} was issued by the old authority: run certs renew first")
            if late := [file.stem for file in _of_hosts(directory) if _is_old(file, trusted[0])]:
                raise ValueError(
                    f"{', '.join(late)} joined and may have a certificate of the old authority: replace ca.crt there, in"
                    " /var/lib/gpuscale/host, and it is renewed within a minute; of hosts that are gone: gpuscalectl forget node"
                )
            pki.write_certificates(directory / "ca.crt", trusted[0])
        elif len(trusted) > 1:
            raise ValueError("ca.crt has two authorities already: run certs rotate-ca --finish first")
        else:
            pki.make_authority(f"gpuscale {datetime.now(UTC):%Y-%m-%d}").write(directory, "ca", *trusted)
    _show(session, directory, "ca")
    if finish:
        note("next: give ca.crt to servers and callers once more; until then they trust the old authority")
    else:
        note(f"next: give ca.crt to servers and callers; then: gpuscalectl certs renew --dir {directory}")
        note(f"last, once all have theirs: gpuscalectl certs rotate-ca --finish --dir {directory}")


@command("certs revoke gpu-host-07 --revoked-file revoked.toml")
@one_name()
@option("--revoked-file", type=FILE, required=True, envvar="GPUSCALE_REVOKED_FILE", help=_REVOKED_HELP)
@option("--serial", metavar="HEX", help="Revoke only the certificate with this serial number.")
def revoke(session: Session, name: str, revoked_file: Path, serial: str | None) -> None:
    """Revoke all certificates issued to a caller until now: servers reject its calls within a second.

    Open streams end within a minute. Certificates issued later are valid.
    """
    now = datetime.now(UTC).replace(microsecond=0)
    with _using(revoked_file):
        document, before = tomlkit.document(), _deny_list(revoked_file)
        if revoked_file.exists():
            document = tomlkit.parse(revoked_file.read_text(encoding="utf-8"))
        key = name
        if serial is None:
            # So that what was issued anew after it was revoked can be revoked again at once.
            now = max(now, before.names.get(name, now - timedelta(seconds=1)) + timedelta(seconds=1))
        else:
            key = f"{issued.read_serial(serial):x}"
        table = document.setdefault("names" if serial is None else "serials", tomlkit.table())
        table[key] = now
        secrets.write_private(revoked_file, tomlkit.dumps(document).encode(), public=True)
    session.output.write_records("revoked", [{"name": name}])
    if serial is None:
        note(f"a deny list does not tell whether {name} has a certificate: check the name")


def ends_soon(certificate: x509.Certificate, now: datetime) -> bool:
    """Whether it expires within 14 days; a short-lived one, with less than a third of its life left."""
    ends = certificate.not_valid_after_utc
    return ends - now < min(timedelta(days=14), (ends - certificate.not_valid_before_utc) / 3)


def _of_hosts(directory: Path) -> list[Path]:
    """Where the fleet that signs by this authority keeps the newest certificate of each host that joined.

    It may not exist: of a host that an older fleet let in.
    """
    settings = directory.parent / "gpuscale.toml"
    text = settings.read_text(encoding="utf-8") if settings.exists() else ""
    fleet: dict[str, object] = tomllib.loads(text).get("fleet", {})
    joined = Path(str(fleet.get("data_dir", "")), "joined")
    if fleet.get("authority_dir") != str(directory.absolute()) or not joined.exists():
        return []
    return [
        joined.with_name("issued") / f"{line.rpartition('/')[2]}.crt" for line in joined.read_text().split()
    ]


def _is_old(file: Path, newest: x509.Certificate) -> bool:
    """Whether a certificate is of the old authority and has not expired; one that is not known may be."""
    found = x509.load_pem_x509_certificate(file.read_bytes()) if file.exists() else None
    return found is None or (
        found.not_valid_after_utc > datetime.now(UTC) and not pki.is_issued_by(found, newest)
    )


def _deny_list(file: Path | None) -> issued.DenyList:
    return issued.DenyList() if file is None or not file.exists() else issued.read_deny_list(file)


def _show(session: Session, directory: Path, *shown_names: str) -> None:
    records = [
        {"name": name, "certificate": str(directory / f"{name}.crt"), "key": str(directory / f"{name}.key")}
        for name in shown_names
    ]
    session.output.write_records("certificates", records, ("name", "certificate", "key"))


@contextmanager
def _using(place: Path) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else followed.cause(error)
        name = error.filename if isinstance(error, OSError) and error.filename else place
        raise FailedPreconditionError(
            f"{name}: {said or type(error).__name__}", reason="CERTIFICATES"
        ) from error
