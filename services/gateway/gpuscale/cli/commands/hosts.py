"""`gpuscalectl init`, `join` and `leave`: set up hosts, and run their programs without systemd."""

import hashlib
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import tomlkit
from cryptography import x509

from gpuscale.api.monitor import v1 as api
from gpuscale.cli.commands.certs import SERVICE_DAYS
from gpuscale.cli.commands.processes import start
from gpuscale.cli.commands.units import (
    USER,
    demoted,
    hand_over,
    make_users,
    start_units,
    systemctl,
    units_user,
)
from gpuscale.cli.commands.units import plan as plan_of_units
from gpuscale.cli.console.command import FILE, Session, command, config_home
from gpuscale.cli.console.errors import writing
from gpuscale.cli.console.terminal import TYPED, folded, note
from gpuscale.cli.grammar.parameters import option, repeated
from gpuscale.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from gpuscale.common.names import to_id
from gpuscale.common.rpc import channel
from gpuscale.common.runtime.lifecycle import stop_signals
from gpuscale.common.secrets import SecretUrl, write_private
from gpuscale.common.security import certificate_authority as issuing
from gpuscale.common.security import certificates

GATEWAY_PORT = 7070
PORTS = {"fleet": 7072, "allocator": 7073, "autoscaler": 7074}
"""Default ports of a host's services."""
STOP_SECONDS = 12.0
LOOK_SECONDS = 0.5
"""Seconds between checks of the programs, and so until a restart."""
NOT_YET = (UnavailableError, DeadlineExceededError, UnauthenticatedError, NotFoundError)
"""What programs that are starting, on a busy host too, answer."""
PLACE = option(
    "--dir",
    "directory",
    type=FILE,
    help="Directory of all files; by default that of the units, or ~/.config/gpuscale without root.",
)
POSTGRESQL = option(
    "--postgresql",
    metavar="URL",
    help="The PostgreSQL that standbys share; - reads the URL from standard input, which other users of the host cannot see."
    " Without it, state is kept in files.",
)
_URL_ON_STDIN = "-"
_URL_FILE = "database.url"
OWNERS = frozenset({"work_socket", "agent_address"})
"""Settings that an owner may have changed, or that files of earlier versions lack."""

Table = Mapping[str, str | bool]


@dataclass(frozen=True)
class Database:
    """The URL as typed; None if state is kept in files."""

    url: str | None

    def __post_init__(self) -> None:
        if self.url not in {None, _URL_ON_STDIN}:
            _check_url(self.url or "")

    def place(self, folder: Path) -> Path | None:
        """The file with the URL, which the settings refer to; those of earlier releases may name one of their owner's."""
        if self.url is None:
            return None
        with suppress(OSError, ValueError, KeyError, TypeError):  # no settings yet
            settings = tomllib.loads((folder / "gpuscale.toml").read_text("utf-8"))
            return Path(settings["allocator"]["database_file"])
        return folder / _URL_FILE

    def new(self, folder: Path) -> str:
        """The URL if its file lacks it, else nothing, as where standard input is empty on a repeat.

        Raises:
            InvalidArgumentError: services could not use it.
            FailedPreconditionError: its file is the owner's (SETTINGS_EXIST).
        """
        place, kept = self.place(folder), ""
        if place is None or self.url is None:
            return ""
        with suppress(OSError, ValueError):
            kept = place.read_text("ascii").strip()
        url = sys.stdin.readline().strip() if self.url == _URL_ON_STDIN else self.url
        if kept and url in {"", kept}:
            return ""
        _check_url(url)
        if place != folder / _URL_FILE:
            message = f"gpuscale.toml names {place}, which has another URL: change it there"
            raise FailedPreconditionError(message, reason="SETTINGS_EXIST")
        return url

    @property
    def option(self) -> str:
        """The same option for another host, without the password."""
        parts = urlsplit(self.url or "")
        return f"--postgresql {'URL' if parts.password or 'password' in parts.query else self.url}"


def write_url(folder: Path, url: str) -> None:
    """Write a new URL to its file, for services alone. Raises OSError: it cannot be written."""
    if url:
        write_private(folder / _URL_FILE, url.encode())
        hand_over(folder / _URL_FILE)


def _check_url(url: str) -> None:
    problem = "must be a URL such as postgresql://gpuscale@db.internal/gpuscale"
    if url.partition("://")[0].lower() in {"postgresql", "postgres"}:
        try:
            SecretUrl(url)
        except ValueError as error:
            problem = str(error)
        else:
            return
    raise InvalidArgumentError(f"--postgresql {problem}", field="postgresql")


def directories(given: Path | None) -> tuple[Path, Path]:
    """The directories of settings and state: of --dir, or by default those of the units for root."""
    if given is not None:
        return given, given / "state"
    if os.geteuid() == 0:
        return Path("/etc/gpuscale"), Path("/var/lib/gpuscale")
    home = config_home() / "gpuscale"
    return home, home / "state"


def settings_text(tables: Mapping[str, Table]) -> str:
    """The text of a settings file."""
    return f"# Written by gpuscalectl; docs/settings.md has every key.\n\n{tomlkit.dumps(tables)}"


def is_written(file: Path, text: str) -> bool:
    """Whether a settings file already has these settings, besides its owner's; a conflict is an error."""
    if not file.exists():
        return False
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FailedPreconditionError(f"{file} is not TOML: {error}", reason="SETTINGS_EXIST") from error
    for name, wanted in tomllib.loads(text).items():
        own, asked = found.get(name), {key: wanted[key] for key in wanted.keys() - OWNERS}
        if not isinstance(own, dict) or own | asked != own:
            message = f"{file} exists, with other settings in [{name}]: move it away, or choose another --dir"
            raise FailedPreconditionError(message, reason="SETTINGS_EXIST")
    return True


def run_programs(
    session: Session,
    programs: Sequence[str],
    settings: Path,
    ready: Callable[[], str | None],
    hourly: Callable[[], None] = lambda: None,
) -> None:
    """Run programs until SIGTERM, SIGINT or SIGHUP, and restart those that end; prints the text of `ready` once all answer."""
    stop, told, next_hour = threading.Event(), False, time.monotonic()
    before = {one: signal.signal(one, lambda _, __: stop.set()) for one in stop_signals()}
    running: dict[str, subprocess.Popen[bytes]] = {}
    if os.geteuid() == 0 and units_user() is None:
        note(f"no user {USER}: programs and workers run as root")
    try:
        while not stop.is_set():
            for name in programs:
                if name in running:
                    if running[name].poll() is None:
                        continue
                    note(f"{name} ended with {running[name].returncode}; restarting it")
                script = Path(sys.executable).with_name(name)
                prefix, told_too = demoted(name)
                words = [str(script), "--config", str(settings), *told_too]
                process = start(words, prefix=prefix, dies_with_us=True)
                if isinstance(process, int):
                    raise FailedPreconditionError(f"{script} cannot be run", reason="NOT_INSTALLED")
                running[name] = process
            if time.monotonic() >= next_hour:
                next_hour += 3600.0
                hourly()
            stop.wait(LOOK_SECONDS)
            if not told and (line := ready()) is not None:
                told = True
                say(session, line)
    finally:
        for process in running.values():
            process.terminate()
        psutil.wait_procs(
            [psutil.Process(one.pid) for one in running.values() if one.poll() is None], STOP_SECONDS
        )
        for number, handler in before.items():
            signal.signal(number, handler)


@command("init --host gpus.example")
@repeated(
    "--host",
    metavar="NAME",
    help="Name or address by which other hosts reach this one, the best first; by default its names.",
)
@POSTGRESQL
@repeated(
    "--standby",
    metavar="NAME",
    help="Name by which others reach a host that will join with --role standby; needs PostgreSQL.",
)
@PLACE
@option("--plan", is_flag=True, help="Show the settings without writing them.")
@option("--run", is_flag=True, help="Run the services, until Ctrl-C or SIGTERM.")
def init(
    session: Session,
    host: tuple[str, ...],
    standby: tuple[str, ...],
    postgresql: str | None,
    directory: Path | None,
    plan: bool,
    run: bool,
) -> None:
    """Set up the services on this host: authority, certificates, admin token, settings, units. Then hosts can join.

    With systemd, it starts the units. Once the services answer, it prints the command for the next host.
    """
    hosts = tuple(dict.fromkeys(host or (socket.getfqdn(), socket.gethostname())))
    folder, state = directories(directory and directory.absolute())
    names = [f"gpuscale-{name}" for name in (*PORTS, "gateway")]
    database = Database(postgresql)
    if standby and postgresql is None:
        raise InvalidArgumentError("--standby needs --postgresql: both hosts use one PostgreSQL")
    shared = (hosts[0], *standby) if standby else ()
    text = settings_text(settings_of_services(folder, state, database.place(folder), shared))
    file = folder / "gpuscale.toml"
    under_systemd = not run and bool(systemctl())
    if plan:
        sys.stdout.write(f"# {file}\n{text}{plan_of_units(names, file, state) if under_systemd else ''}")
        return
    url = database.new(folder)
    if under_systemd:
        make_users(names)
    with writing(reason="HOST_FILES"):
        if is_written(file, text):
            pki = folder / "pki"
            subject = issuing.subject_of(issuing.read_pair(pki, "server").certificate)
            named = tuple(dict.fromkeys((*hosts, *subject.hosts)))
            if len(named) > len(subject.hosts):
                authority, subject = issuing.read_pair(pki, "ca"), replace(subject, hosts=named)
                issuing.issue(authority, subject, SERVICE_DAYS).write(pki, "server")
        else:
            _write(folder, state, hosts)
            write_private(file, text.encode())
            hand_over(file)
        write_url(folder, url)
    address = ",".join(f"{one}:{GATEWAY_PORT}" for one in (hosts[0], *standby))
    local = f"127.0.0.1:{GATEWAY_PORT}"
    who = f"--ca-file {folder / 'pki' / 'ca.crt'} --token-file {folder / 'admin.token'}"
    note(f"for admins: gpuscalectl --address {address} {who}", TYPED)
    if not run and not under_systemd:
        note(
            f"to start it, repeat the command with --run, or: systemctl enable --now {' '.join(names)}", TYPED
        )
        note(f"for the next host: gpuscalectl --address {address} {who} join-token create", TYPED)
        written = [file, *sorted((folder / "pki").iterdir()), folder / "tokens.toml", folder / "admin.token"]
        session.output.write_records("files", [{"file": str(one)} for one in written])
        return
    known = trusting(session, local, folder / "pki" / "ca.crt")
    admin = replace(known, token_file=folder / "admin.token", without_token=False)

    def line() -> str | None:
        try:
            with admin.connect(quickly=2.0) as client:
                asked = [(api.CreateJoinTokenRequest(), "")]
                for one in standby:
                    of_standby = api.CreateJoinTokenRequest(
                        node=to_id(one), kind=api.HostKind.HOST_KIND_STANDBY
                    )
                    more = f" --role standby --node {of_standby.node} --host {one} {database.option}"
                    asked.append((of_standby, more))
                made = [(client.joining.CreateJoinToken(request), more) for request, more in asked]
        except NOT_YET:
            return None
        return "\n".join(
            f"gpuscalectl join {address} --token {one.token} --ca-hash {one.authority_digest}{more}"
            for one, more in made
        )

    if under_systemd:
        say(session, start_units(names, file, state, line))
    else:
        from gpuscale.cli.commands.certs import renew_due

        run_programs(session, names, file, line, partial(renew_due, folder / "pki", folder / "revoked.toml"))


def say(session: Session, line: str) -> None:
    """What to do next, once all is well."""
    text = folded(line, sys.stdout, TYPED) if session.output.human else json.dumps({"ready": line})
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _write(folder: Path, state: Path, hosts: tuple[str, ...]) -> None:
    """Create the authority, certificates and tokens that do not exist."""
    pki = folder / "pki"
    for made in (folder, pki, state):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        hand_over(made, own=made == state)
    if not (pki / "ca.crt").exists():  # which is written after its key
        issuing.make_authority("gpuscale").write(pki, "ca")
    authority = issuing.read_pair(pki, "ca")
    identity = "spiffe://gpuscale.local/gpuscale"
    for name, subject in {
        "server": issuing.CertificateSubject(
            hosts[0], tuple(dict.fromkeys((*hosts, "localhost", "127.0.0.1")))
        ),
        "services": issuing.CertificateSubject("services", uri=f"{identity}/operator/services"),
        "gate": issuing.CertificateSubject("gate", uri=f"{identity}/gateway/gate"),
    }.items():
        issuing.issue(authority, subject, SERVICE_DAYS).write(pki, name)
    if not (folder / "tokens.toml").exists():
        secret = secrets.token_urlsafe(32)
        digest = hashlib.sha256(secret.encode()).hexdigest()
        tokens = f'[tokens.admin]\nrole = "admin"\nsha256 = "{digest}"\n\n[certificates.services]\ntenants = ["*"]\n'
        tokens += f"\n[logins]\nca_file = {json.dumps('pki/ca.crt')}\n"
        write_private(folder / "admin.token", f"{secret}\n".encode())
        write_private(folder / "tokens.toml", tokens.encode())
    (folder / "revoked.toml").touch(mode=0o644)
    keys = [pki / f"{name}.key" for name in ("ca", "server", "services", "gate")]
    hand_over(*keys, folder / "tokens.toml", folder / "revoked.toml")


def settings_of_services(
    folder: Path,
    state: Path,
    database_file: Path | None,
    hosts: Sequence[str] = (),
    own: int = 0,
    fleet_files: Path | None = None,
) -> dict[str, dict[str, str]]:
    """The settings of the services, which authenticate each other and hosts by certificates, and people by tokens at the gateway.

    If several hosts run services, `own` is the index of this one in `hosts`. The fleet runs on the first; the others keep the files
    they get from it in `fleet_files`.
    """
    kept_in = fleet_files or folder
    pki = kept_in / "pki"

    def pair(name: str, prefix: str = "") -> dict[str, str]:
        ends = ("crt", "key") if fleet_files is None else ("pem", "pem")
        return {
            f"{prefix}{kind}_file": str(pki / f"{name}.{end}")
            for kind, end in zip(("cert", "key"), ends, strict=True)
        }

    def calling(name: str) -> dict[str, str]:
        return {"ca_file": str(pki / "ca.crt"), **pair(name)}

    serving = pair("server", "tls_") | {"tokens_file": str(kept_in / "tokens.toml")}
    mutual = {"tls_client_ca_file": str(pki / "ca.crt"), "revoked_file": str(kept_in / "revoked.toml")}
    caller = "services" if fleet_files is None else "server"
    database = {} if database_file is None else {"database_file": str(database_file.absolute())}
    listening = {name: {"listen": f"0.0.0.0:{port}"} for name, port in PORTS.items()}
    kept = {
        name: {"data_dir": str(state / name), "audit_file": str(state / f"{name}-audit.jsonl")}
        for name in PORTS
    }
    found = {
        "fleet": {**listening["fleet"], **kept["fleet"], **serving, **mutual, "authority_dir": str(pki)},
        **{
            name: {**listening[name], **kept[name], **serving, **mutual, **calling(caller), **database}
            for name in ("allocator", "autoscaler")
        },
        "gateway": {
            "listen": f"0.0.0.0:{GATEWAY_PORT}",
            **serving,
            **calling("gate"),
            "audit_file": str(state / "audit.jsonl"),
        },
    }
    if fleet_files is not None:
        found["gateway"]["fleet_files_dir"] = str(fleet_files)
    if hosts:
        led = {
            f"{name}_address": ",".join(f"{one}:{PORTS[name]}" for one in hosts)
            for name in ("allocator", "autoscaler")
        }
        fleet = {"fleet_address": f"{hosts[0]}:{PORTS['fleet']}"}
        found["gateway"] |= {**fleet, **led}
        found["allocator"] |= fleet
        found["autoscaler"] |= {**fleet, "allocator_address": led["allocator_address"]}
        for name in ("allocator", "autoscaler"):
            found[name]["advertise_address"] = f"{hosts[own]}:{PORTS[name]}"
    return found


def counts(pair: Path) -> bool:
    """Whether a certificate exists and has not expired."""
    try:
        return certificates.read_certificate(pair.read_bytes()).ends > time.time()
    except (OSError, ValueError):
        return False


def trusting(session: Session, address: str, authority: Path | None) -> Session:
    """A session with a server of which only the authority is known."""
    return replace(
        session,
        address=address,
        ca_file=authority,
        token_file=None,
        without_token=True,
        cert_file=None,
        key_file=None,
        context=None,
    )


def trusted(session: Session, address: str, digest: str, folder: Path) -> Path:
    """A file with the authority of that digest.

    The server's certificate is trusted only to ask for its authorities. An impostor cannot forge one with that digest, and a
    server without a certificate from the authority is refused afterwards.
    """
    from cryptography.hazmat.primitives.serialization import Encoding

    file, problem = folder / "authority.pem", OSError()
    for each in channel.split_addresses(address):
        host, _, port = each.rpartition(":")
        try:
            shown = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=session.dial_timeout)
        except OSError as error:
            problem = error
            continue
        file.write_text(shown, encoding="ascii")
        if counts(file):
            break
        problem = OSError("its certificate has expired and must be renewed there")
    else:
        message = f"no TLS server to trust answers at {address}: {problem.strerror or problem}"
        raise UnavailableError(message, reason="NO_ANSWER") from problem
    with trusting(session, each, file).connect() as client:
        pem = client.joining.GetAuthority(api.GetAuthorityRequest()).authority_pem
    for one in x509.load_pem_x509_certificates(pem.encode()):
        if issuing.digest_of(one) == digest:
            file.write_bytes(one.public_bytes(Encoding.PEM))
            return file
    raise FailedPreconditionError(
        f"the authority at {address} does not match --ca-hash: this is another server, or the command is out of date",
        reason="CA_HASH",
    )


def read_secret(file: Path | None, *, reason: str) -> str:
    """The secret in a file; on the first line of standard input without one, or for `-`."""
    try:
        text = sys.stdin.readline() if file is None or str(file) == "-" else file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", "it is no text in ASCII")
        raise FailedPreconditionError(f"cannot read {file}: {said}", reason=reason) from error
    return text.strip()
