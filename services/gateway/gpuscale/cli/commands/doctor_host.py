"""The checks of `gpuscalectl doctor` on this host: the settings file, and everything it refers to.

Findings name files, addresses and settings, but never the content of files, nor the user or password of a URL.
"""

import asyncio
import errno
import os
import pwd
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, cast

import psutil
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from google.protobuf.message import Message
from pydantic import BaseModel, SecretStr

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.cli.commands.certs import JOINED, ends_soon
from gpuscale.cli.commands.units import USER, flags
from gpuscale.common import errors
from gpuscale.common.config.settings import DatabaseSettings, ListenerSettings, UpstreamSettings
from gpuscale.common.config.sources import Settings, load_table, read_config
from gpuscale.common.rpc.channel import split_addresses
from gpuscale.common.rpc.server import parse_listen
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.security.auth import CALLER_KEY
from gpuscale.common.security.certificate_authority import is_issued_by, subject_of
from gpuscale.common.security.followed import cause

State = Literal["OK", "WARN", "FAIL"]
LEAST_FREE = 10**9
"""Free bytes below which a state's disk counts as full."""
LEAST_SHARE = 0.1
LEAST_FILES = 1024
"""Limit of descriptors below which a service may run out."""
SECONDS = 3.0
"""Seconds to connect."""
_PORTS = {"amqp": 5672, "amqps": 5671, "http": 80, "https": 443, "postgresql": 5432, "postgres": 5432}
_FLEET = ("/gpuscale.api.monitor.v1.FleetService/ListNodes", monitor_api.ListNodesRequest(page_size=1))
_QUESTIONS: Mapping[str, tuple[str, Message]] = {
    "fleet_address": _FLEET,
    "gateway_address": _FLEET,
    "allocator_address": (
        "/gpuscale.api.allocator.v1.AllocatorService/ListReservations",
        allocator_api.ListReservationsRequest(page_size=1),
    ),
    "autoscaler_address": (
        "/gpuscale.api.autoscaler.v1.EndpointService/ListEndpoints",
        autoscaler_api.ListEndpointsRequest(page_size=1),
    ),
}
"""The call that shows that an upstream answers and accepts the token, by the setting with its address."""
_ASK_DRIVER = (
    "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount(), n.nvmlSystemGetDriverVersion())"
)
_EVERYWHERE: Mapping[str, str] = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""Wildcard hosts, with an address to connect to."""
_AS_GATEWAY = ((CALLER_KEY, "viewer/doctor"),)
"""A gateway's certificate is only for calls on behalf of others."""
_RENEW = "gpuscalectl certs renew, or certs init and certs issue in its directory"
_ROTATE = "create or rotate the token on the server: gpuscalectl token rotate"
_READMIT = "gpuscalectl leave, and join with a new token; of a certificate by certs issue: certs renew NAME"
_REJOIN = (
    "it is renewed while the fleet answers; else join again, with a token of join-token create --node NODE"
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A finding of a check."""

    check: str  # what was checked, such as `certificate`
    subject: str  # its subject, such as `allocator tls_cert_file`
    state: State  # OK; WARN for a future problem; FAIL for a problem
    found: str  # what is so
    advice: str = ""  # what to do; empty if OK

    def record(self) -> Mapping[str, object]:
        """As data."""
        return asdict(self)


def _fail(check: str, subject: str, found: str, advice: str) -> Diagnosis:
    return Diagnosis(check, subject, "FAIL", found, advice)


def programs() -> dict[str, type[Settings]]:
    """The settings classes of the installed programs, by section."""
    found: dict[str, type[Settings]] = {}
    for group in ("gpuscale.programs", "gpuscale.engines"):
        for point in entry_points(group=group):
            try:
                kind: type[Settings] = point.load()
            except ImportError:
                continue
            found[kind.section] = kind
    return found


def read_settings(config: Path) -> Iterator[Settings | Diagnosis]:
    """The settings of each program with a table in the file, or their error; of `up` alone where it runs the others."""
    tables, known = read_config(config), programs()
    if "up" in tables:
        from gpuscale.up.settings import UpSettings

        known = {"up": UpSettings}
    for section, kind in sorted(known.items()):
        if section in tables:
            try:
                typed = flags(f"gpuscale-{section.replace('_', '-')}", config).items()
                yield load_table(kind, tables, {key: it for key, it in typed if key in kind.model_fields})
            except errors.GpuscaleError as error:
                yield _fail("settings", section, error.message, f"correct {config}: docs/settings.md")


def examine(config: Path) -> Iterator[Diagnosis]:
    """Check everything in a settings file; files that this user may not read give one warning per program."""
    denied, hidden = os.strerror(errno.EACCES), set[str]()
    for one in _examine(config):
        if denied not in one.found or pwd.getpwuid(os.geteuid()).pw_name in {"root", USER}:
            yield one
        elif (program := one.subject.partition(" ")[0]) not in hidden:
            hidden.add(program)
            yield Diagnosis("files", program, "WARN", "this user may not read it", "run it as root")


def _examine(config: Path) -> Iterator[Diagnosis]:
    try:
        found = list(read_settings(config))
    except errors.GpuscaleError as error:
        yield _fail("settings", str(config), error.message, "correct the file: docs/settings.md")
        return
    if not found:
        why, advice = "no table of a program that is installed here", "pip install the program's extra"
        yield Diagnosis("settings", str(config), "WARN", why, advice)
    for one in found:
        if isinstance(one, Diagnosis):
            yield one
            continue
        yield Diagnosis("settings", one.section, "OK", str(config))
        if isinstance(one, ListenerSettings):
            yield from listening(one)
            yield from certificate(one, "tls_cert_file", "tls_key_file", called(one))
        if isinstance(one, UpstreamSettings):
            yield from certificate(one, "cert_file", "key_file", ())
            yield from asyncio.run(upstreams(one))
        yield from authority_files(one)
        yield from secret_files(one)
        yield from disk(one)
        yield from database(one)
        for subject, url in secrets_in(one, one.section):
            is_database = isinstance(one, DatabaseSettings) and url is one.database
            if isinstance(url, SecretUrl) and not is_database:
                yield reaches(subject, url)
        if getattr(one, "source", "") == "nvml":
            yield driver()
    yield from limits()


def _files(settings: Settings, *fields: str) -> Iterator[tuple[str, str, Path]]:
    """Fields that hold a path: the field, its label and the path."""
    for field in fields:
        path: Path | None = getattr(settings, field, None)
        if path is not None:
            yield field, f"{settings.section} {field}", path


def called(settings: ListenerSettings) -> tuple[str, ...]:
    """The host names by which others call a program."""
    told = (str(getattr(settings, field, "")) for field in ("advertise_address", "listen"))
    hosts = (one.rpartition(":")[0].strip("[]") for one in told)
    return tuple(host for host in hosts if host and host not in _EVERYWHERE)


def listening(settings: ListenerSettings) -> Iterator[Diagnosis]:
    """Check that something answers at a program's own address."""
    for field in ("listen", "metrics_listen", "health_listen"):
        text = str(getattr(settings, field, ""))
        if not text:
            continue
        subject = f"{settings.section} {field}"
        try:
            address = parse_listen(text, field)
        except errors.GpuscaleError as error:
            yield _fail("port", subject, error.message, "write HOST:PORT")
            continue
        if address.port == 0:
            continue
        host = _EVERYWHERE.get(address.host, address.host)
        try:
            socket.create_connection((host, address.port), SECONDS).close()
        except OSError as error:
            unit = f"gpuscale-{settings.section.replace('_', '-')}"
            advice = f"systemctl status {unit}; journalctl -u {unit} -n 20"
            yield _fail("port", subject, f"nothing answers at {address}: {error.strerror or error}", advice)
        else:
            yield Diagnosis("port", subject, "OK", str(address))


def certificate(
    settings: Settings, field: str, key_field: str, hosts: tuple[str, ...]
) -> Iterator[Diagnosis]:
    """Check the validity, key, chain and names of a certificate."""
    path: Path | None = getattr(settings, field, None)
    key: Path | None = getattr(settings, key_field, None)
    if path is None or key is None:
        return
    subject = f"{settings.section} {field}"
    wrong = partial(_fail, "certificate", subject)
    try:
        chain = x509.load_pem_x509_certificates(path.read_bytes())
        ours = chain[0].public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        of_key = load_pem_private_key(key.read_bytes(), None).public_key()
        fits = of_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) == ours
        authority = getattr(settings, "ca_file", None)
        trusted = [] if authority is None else x509.load_pem_x509_certificates(authority.read_bytes())
    except (OSError, ValueError) as error:
        yield _unusable(subject, error, "files")
        return
    yield _life(subject, chain[0], _REJOIN if path.name in JOINED else _RENEW)
    if not fits:
        yield wrong(f"{key_field} is another certificate's", _RENEW)
    if trusted and not any(is_issued_by(chain[-1], one) for one in trusted):
        yield wrong(f"{authority} did not issue it", "use files of one --dir of gpuscalectl certs")
    named = subject_of(chain[0]).hosts
    if missing := [host for host in hosts if host not in named]:
        found = f"is for {', '.join(named) or 'no host'}, not for {', '.join(missing)}"
        yield wrong(found, f"gpuscalectl certs init --host {' --host '.join(missing)} ...")


def _unusable(subject: str, error: OSError | ValueError, what: str) -> Diagnosis:
    advice = f"install -m 0640 -g gpuscale the {what}"
    return _fail("certificate", subject, f"cannot be used: {cause(error)}", advice)


def _life(subject: str, certificate: x509.Certificate, advice: str = _RENEW) -> Diagnosis:
    now, ends = datetime.now(UTC), certificate.not_valid_after_utc
    day = ends.date().isoformat()
    if certificate.not_valid_before_utc > now:
        return _fail("certificate", subject, "is not valid yet", "set the clock of this host")
    if ends <= now:
        return _fail("certificate", subject, f"ended on {day}", advice)
    if ends_soon(certificate, now):
        return Diagnosis("certificate", subject, "WARN", f"ends on {day}", advice)
    return Diagnosis("certificate", subject, "OK", f"until {day}")


def authority_files(settings: Settings) -> Iterator[Diagnosis]:
    """Check the validity of the authorities that a program trusts."""
    for _, subject, path in _files(settings, "ca_file", "tls_client_ca_file", "notify_ca_file"):
        try:
            found = x509.load_pem_x509_certificates(path.read_bytes())
        except (OSError, ValueError) as error:
            yield _unusable(subject, error, "file")
        else:
            yield _life(subject, min(found, key=lambda one: one.not_valid_after_utc))


def secret_files(settings: Settings) -> Iterator[Diagnosis]:
    """Check that files of tokens and passwords exist, and that no one else can read them."""
    for field, subject, path in _files(
        settings, "token_file", "tokens_file", "tls_key_file", "key_file", "database_file"
    ):
        try:
            mode = path.stat().st_mode
        except OSError as error:
            yield _fail("secret", subject, cause(error), "create it, or correct the path")
            continue
        if mode & 0o004 and field != "tokens_file":  # it holds only hashes
            yield _fail("secret", subject, f"every user may read {path}", f"chmod o-r {path}")


def disk(settings: Settings) -> Iterator[Diagnosis]:
    """Check the free space for a program's state."""
    for _, subject, path in _files(settings, "data_dir", "state_dir"):
        try:
            usage = shutil.disk_usage(path)
        except OSError as error:
            yield _fail("disk", subject, cause(error), "start the service once, or make the directory")
            continue
        left = f"{usage.free / 1e9:.1f} GB left at {path}"
        scarce: State = "WARN" if usage.free < usage.total * LEAST_SHARE else "OK"
        state: State = "FAIL" if usage.free < LEAST_FREE else scarce
        advice = "" if state == "OK" else "make room; nothing is lost meanwhile"
        yield Diagnosis("disk", subject, state, left, advice)


def database(settings: Settings) -> Iterator[Diagnosis]:
    """Check that a program's database can be read."""
    subject = f"{settings.section} database"
    if not isinstance(settings, DatabaseSettings) or settings.database is None:
        folder: Path | None = getattr(settings, "data_dir", None)
        try:
            files = sorted(folder.glob("*.db")) if folder is not None else []
        except OSError as error:
            yield _fail("database", subject, f"{folder}: {error.strerror}", "the folder's owner and mode")
            return
        for file in files:
            try:
                with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=SECONDS)) as store:
                    store.execute("PRAGMA schema_version").fetchone()
            except sqlite3.Error as error:
                yield _fail("database", subject, f"{file}: {error}", "docs/operations.md#restore")
            else:
                yield Diagnosis("database", subject, "OK", str(file))
        return
    try:
        settings.require_driver()
        from gpuscale.common.store.postgres import probe

        probe(settings.database)
    except errors.GpuscaleError as error:
        yield _fail(
            "database", subject, error.message, "the server's log; its user, password and pg_hba.conf"
        )
    else:
        yield Diagnosis("database", subject, "OK", str(settings.database))


def secrets_in(value: object, name: str) -> Iterator[tuple[str, SecretUrl | SecretStr]]:
    """Every secret and URL with a password in the settings, with its path."""
    if isinstance(value, SecretUrl | SecretStr):
        yield name, value
    elif isinstance(value, BaseModel):
        for field in type(value).model_fields:
            yield from secrets_in(getattr(value, field), f"{name} {field}")
    elif isinstance(value, Mapping):
        for key, one in cast("Mapping[str, object]", value).items():
            yield from secrets_in(one, f"{name}.{key}")


def reaches(subject: str, url: SecretUrl) -> Diagnosis:
    """Check that something answers at a URL."""
    port = url.port or _PORTS.get(url.scheme, 0)
    try:
        socket.create_connection((url.host, port), SECONDS).close()
    except OSError as error:
        found = f"nothing answers at {url.host}:{port}: {error.strerror or error}"
        return _fail("broker", subject, found, "start it, or correct its URL; a firewall may be between")
    return Diagnosis("broker", subject, "OK", f"{url.host}:{port}")


async def upstreams(settings: UpstreamSettings) -> list[Diagnosis]:
    """Check that a program's upstreams answer, with its certificate and token."""
    found: list[Diagnosis] = []
    caller = _AS_GATEWAY if settings.section == "gateway" and settings.cert_file else ()
    passes_on = settings.section == "gateway" or getattr(settings, "sign_in", False)
    for field, (method, request) in _QUESTIONS.items():
        named = getattr(settings, field, "")
        for address in split_addresses(named) if named else ():
            subject = f"{settings.section} {field}"
            try:
                async with settings.open_channel(address) as channel:
                    with rpc_errors():
                        untyped: Any = channel  # gRPC's types know no calls of bytes
                        call = untyped.unary_unary(method)
                        await call(request.SerializeToString(), timeout=SECONDS, metadata=caller)
            except errors.PermissionDeniedError:
                pass  # authenticated, but with another role
            except errors.DeadlineExceededError:
                silent = f"{address} does not answer within {SECONDS:.0f} s"
                found.append(_fail("service", subject, silent, "docs/operations.md#nothing-answers"))
                continue
            except errors.UnavailableError as error:
                why = await asyncio.to_thread(settings.why_unavailable, address, error)
                if why.reason != "NOT_LEADER":
                    found.append(_fail("service", subject, why.message, "docs/operations.md#nothing-answers"))
                    continue
            except errors.GpuscaleError as error:
                advice = _READMIT if error.reason == "CERTIFICATE_REVOKED" else _ROTATE
                if error.reason == "TLS_FILES":  # which their own checks tell
                    continue
                callers_alone = passes_on and error.reason == "TOKEN_MISSING"  # it has no token but theirs
                if not callers_alone:
                    found.append(_fail("service", subject, f"{address}: {error.message}", advice))
                    continue
            found.append(Diagnosis("service", subject, "OK", f"{address} answers"))
    return found


def driver() -> Diagnosis:
    """Check the driver, in a separate process in case it hangs."""
    command = [sys.executable, "-c", _ASK_DRIVER]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    except subprocess.TimeoutExpired:
        return _fail("driver", "agent", "the driver does not answer", "nvidia-smi; reset the GPU or reboot")
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        return _fail("driver", "agent", why, "docs/monitoring.md#troubleshooting")
    count, _, version = done.stdout.strip().partition(" ")
    state: State = "OK" if count != "0" else "WARN"
    found, advice = f"driver {version} shows {count} GPUs", "" if state == "OK" else "nvidia-smi -L"
    return Diagnosis("driver", "agent", state, found, advice)


def limits() -> Iterator[Diagnosis]:
    """Check the descriptors of running programs, as far as this user may see them."""
    for process in psutil.process_iter():
        try:
            words = [Path(word).name for word in process.cmdline()[:2]]
            named = [word for word in words if word.startswith("gpuscale-")]
            if not named:
                continue
            used, (soft, _) = process.num_fds(), process.rlimit(psutil.RLIMIT_NOFILE)
        except (psutil.Error, OSError):
            continue
        scarce = soft < LEAST_FILES or used > 0.8 * soft
        advice = "LimitNOFILE= in the unit; ss -tnp shows who holds connections" if scarce else ""
        subject, found = f"{named[0]} {process.pid}", f"{used} of {soft} file descriptors"
        yield Diagnosis("limits", subject, "WARN" if scarce else "OK", found, advice)
