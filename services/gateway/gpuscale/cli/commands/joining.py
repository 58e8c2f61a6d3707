"""`gpuscalectl join` and `leave`: a host gets a certificate, settings and units for its programs, and gives them up."""

import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click
from cryptography import x509

from gpuscale.api.monitor import v1 as api
from gpuscale.cli.commands.hosts import (
    GATEWAY_PORT,
    NOT_YET,
    PLACE,
    PORTS,
    POSTGRESQL,
    Database,
    counts,
    directories,
    is_written,
    read_secret,
    run_programs,
    say,
    settings_of_services,
    settings_text,
    trusted,
    trusting,
    write_url,
)
from gpuscale.cli.commands.units import (
    STATE,
    as_units_user,
    hand_over,
    make_runtime_directory,
    make_users,
    start_units,
    stop_units,
    systemctl,
)
from gpuscale.cli.commands.units import plan as plan_of_units
from gpuscale.cli.console.command import FILE, Session, command, one_name
from gpuscale.cli.console.errors import writing
from gpuscale.cli.console.terminal import TYPED, note
from gpuscale.cli.grammar.parameters import option, repeated
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.names import node_name, to_id
from gpuscale.common.rpc import certificate_renewal, channel
from gpuscale.common.secrets import write_private
from gpuscale.common.security import certificate_authority as issuing

PROGRAMS = ("gpuscale-agent", "gpuscale-adapter")
PROGRAMS_OF_SERVICES = ("gpuscale-allocator", "gpuscale-autoscaler", "gpuscale-gateway")
"""Services of a joining host: the fleet runs only on the first."""


@command("join gpus.example:7070 --token-file - --ca-hash sha256:5f9d…")
@one_name(metavar="ADDRESS")
@option(
    "--token",
    metavar="TEXT",
    help="The join token. Other users of the host can see it, so it should be good for one use.",
)
@option("--token-file", type=FILE, help="File with the join token; - for standard input.")
@option(
    "--ca-hash",
    required=True,
    metavar="DIGEST",
    help="Digest of the authority, printed by join-token create.",
)
@option("--node", metavar="NAME", help="Name of this host; by default its hostname.")
@option(
    "--role",
    type=click.Choice(("gpu-host", "standby", "gateway")),
    default="gpu-host",
    help="What to run here: agent and adapter; or standby services of the first host; or a gateway.",
)
@repeated(
    "--host", metavar="NAME", help="Name by which others reach a standby or gateway; --node by default."
)
@POSTGRESQL
@PLACE
@repeated(
    "--at",
    metavar="SERVICE=ADDRESS",
    help="Address of the fleet, allocator or autoscaler; by default ports 7072-7074 of ADDRESS.",
)
@option("--plan", is_flag=True, help="Show the files without writing them.")
@option("--run", is_flag=True, help="Run agent and adapter, until Ctrl-C or SIGTERM.")
def join(
    session: Session,
    name: str,
    token: str | None,
    token_file: Path | None,
    ca_hash: str,
    node: str | None,
    role: str,
    host: tuple[str, ...],
    postgresql: str | None,
    directory: Path | None,
    at: tuple[str, ...],
    plan: bool,
    run: bool,
) -> None:
    """Get a certificate for this host, write settings and units of its agent and adapter, and start them with systemd.

    Checks the digest of the authority before it sends the token. The agent renews the certificate by itself. A joined host
    needs no further token.
    """
    node = node or to_id(socket.gethostname())
    folder, state = directories(directory and directory.absolute())
    database = Database(None if role == "gpu-host" else postgresql)
    if role == "gpu-host":
        one = _gpu_host(session, node, name, at, folder, state)
    else:
        one = _services_host(session, role, node, name, host or (node,), folder, state, database)
    under_systemd = not run and bool(systemctl())
    written = is_written(one.file, one.text)
    if under_systemd and not plan:
        make_users(one.programs)
    if plan or not _has_joined(one, ca_hash, written):
        with tempfile.TemporaryDirectory() as passing:
            authority = trusted(session, name, ca_hash, Path(passing))
            if plan:
                note(f"the authority at {name} has this digest; {node} would get {one.pair}")
                units = plan_of_units(one.programs, one.file, state) if under_systemd else ""
                sys.stdout.write(f"# {one.file}\n{one.text}{units}")
                return
            if (token is None) == (token_file is None):
                raise InvalidArgumentError("pass either --token or --token-file", field="token")
            secret = read_secret(token_file, reason="TOKEN_FILE") if token is None else token
            url = database.new(folder)
            _get_certificate(session, name, authority, one, secret)
    else:
        url = database.new(folder)
    with writing(reason="HOST_FILES"):
        if not written:
            folder.mkdir(mode=0o700 if one.of_services else 0o755, parents=True, exist_ok=True)
            write_private(one.file, one.text.encode(), public=not one.of_services)
            if one.of_services:  # they are theirs alone
                hand_over(folder, one.file)
        write_url(folder, url)
    if under_systemd:
        say(session, start_units(one.programs, one.file, state, one.ready))
    elif run:
        if state == STATE and not one.of_services:
            make_runtime_directory(channel.AGENT_SOCKET.parent)
        run_programs(session, one.programs, one.file, one.ready)
    else:
        files = (one.file, one.authority, one.pair)
        session.output.write_records("files", [{"file": str(file)} for file in files])
        note(
            f"{node} has joined; to start it, repeat the command with --run, or: systemctl enable --now {' '.join(one.programs)}",
            TYPED,
        )


@dataclass(frozen=True, kw_only=True)
class JoiningHost:
    """A host that joins: its programs, their settings, and its certificate with its key.

    `files` are all that it gets from the fleet, the pair first; `hosts` are the names by which others reach a host of services.
    `ready` says once all is well.
    """

    role: str
    node: str
    programs: Sequence[str]
    file: Path
    text: str
    state: Path
    files: Sequence[Path]
    ready: Callable[[], str | None]
    hosts: Sequence[str] = ()

    @property
    def of_services(self) -> bool:
        """Whether it is a standby or a gateway."""
        return self.role != "gpu-host"

    @property
    def pair(self) -> Path:
        """Its certificate with its key."""
        return self.files[0]

    @property
    def authority(self) -> Path:
        """The authorities, beside the pair on both kinds of hosts."""
        return self.pair.with_name("ca.crt")


def _gpu_host(
    session: Session, node: str, address: str, at: Sequence[str], folder: Path, state: Path
) -> JoiningHost:
    hosts = [one.rpartition(":")[0] for one in channel.split_addresses(address)]
    services = {name: ",".join(f"{host}:{port}" for host in hosts) for name, port in PORTS.items()}
    services["fleet"] = f"{hosts[0]}:{PORTS['fleet']}"
    for one in at:
        name, equals, where = one.partition("=")
        if name not in services or not equals:
            raise InvalidArgumentError(
                f"--at: {one!r} must be one of {', '.join(services)}, = and its address"
            )
        services[name] = ",".join(channel.split_addresses(where))
    pair, authority = state / "host/host.pem", state / "host/ca.crt"
    work_socket = channel.AGENT_SOCKET if state == STATE else state / "agent.sock"
    common = {"ca_file": str(authority), "cert_file": str(pair), "key_file": str(pair)}
    upstreams = {"fleet_address": services["fleet"], "allocator_address": services["allocator"]}
    kept: dict[str, str | bool] = {"state_dir": str(state / "agent"), "renew_certificate": True}
    adapter = {"autoscaler_address": services["autoscaler"], "data_dir": str(state / "adapter")}
    text = settings_text(
        {
            "agent": {"node": node, **upstreams, **common, **kept, "work_socket": str(work_socket)},
            "adapter": {"node": node, **adapter, **common, "agent_address": f"unix:{work_socket}"},
        }
    )
    own = replace(trusting(session, services["fleet"], authority), cert_file=pair, key_file=pair)
    return JoiningHost(
        role="gpu-host",
        node=node,
        programs=PROGRAMS,
        file=folder / "gpuscale.toml",
        text=text,
        state=state,
        files=(pair, authority),
        ready=partial(_online, own, node),
    )


def _services_host(
    session: Session,
    role: str,
    node: str,
    address: str,
    hosts: Sequence[str],
    folder: Path,
    state: Path,
    database: Database,
) -> JoiningHost:
    """A standby, or a host with a gateway alone: its settings are those of the first host with its own addresses."""
    if (role == "standby") != (database.url is not None):
        raise InvalidArgumentError(
            "--postgresql names the PostgreSQL of the first host, for --role standby alone"
        )
    known = [one.rpartition(":")[0] for one in channel.split_addresses(address)]
    own = next((nth for nth, one in enumerate(known) if one in hosts), len(known))
    if role == "standby" and own == len(known):
        raise InvalidArgumentError(
            f"{address} names no host {hosts[0]}: init --standby on the first host, and --host here, name it",
            field="host",
        )
    place = state / "host"  # of files from the fleet, which the programs update
    made = settings_of_services(folder, state, database.place(folder), known, min(own, len(known) - 1), place)
    programs = PROGRAMS_OF_SERVICES[-1:] if role == "gateway" else PROGRAMS_OF_SERVICES
    names = [name.removeprefix("gpuscale-") for name in programs]
    files = [place / name for name in certificate_renewal.SERVICES_FILES]
    gateway = replace(trusting(session, f"127.0.0.1:{GATEWAY_PORT}", files[2]), dial_timeout=2.0)
    return JoiningHost(
        role=role,
        node=node,
        programs=programs,
        file=folder / "gpuscale.toml",
        text=settings_text({name: made[name] for name in names}),
        state=state,
        files=files,
        ready=partial(_serves, gateway, f"{node} serves as {role}"),
        hosts=hosts,
    )


def _has_joined(host: JoiningHost, ca_hash: str, written: bool) -> bool:
    """Whether a host has a valid certificate, and its settings or all that an earlier `join` with this authority got."""
    with as_units_user():
        if not counts(host.pair):
            if host.pair.exists():
                kind = f"--kind {host.role} " if host.of_services else ""
                note(
                    f"the certificate of {host.node} has expired; for another, pass a token of: join-token create {kind}--node {host.node}"
                )
            return False
        if written or not all(file.exists() for file in host.files):
            return written
        authorities = x509.load_pem_x509_certificates(host.authority.read_bytes())
        subject = issuing.subject_of(x509.load_pem_x509_certificate(host.pair.read_bytes()))
    return (
        subject.name == (host.hosts[0] if host.of_services else host.node)
        and {*host.hosts} <= {*subject.hosts}
        and ca_hash in map(issuing.digest_of, authorities)
    )


def _online(session: Session, node: str) -> str | None:
    try:
        with session.connect(quickly=2.0) as client:
            found = client.fleet.GetNode(api.GetNodeRequest(name=node_name(node))).node
    except NOT_YET as error:
        if error.reason == "CERTIFICATE_REVOKED":  # which no wait mends
            raise
        return None
    return f"{node} is ONLINE" if found.state == api.NodeState.NODE_STATE_ONLINE else None


def _serves(session: Session, line: str) -> str | None:
    try:
        with session.connect(quickly=2.0) as client:
            client.joining.GetAuthority(api.GetAuthorityRequest())
    except NOT_YET:
        return None
    return line


def _get_certificate(session: Session, address: str, authority: Path, host: JoiningHost, token: str) -> None:
    where = address if host.of_services else channel.split_addresses(address)[0]
    key, csr = issuing.make_request()
    with writing(reason="HOST_FILES"):
        host.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        hand_over(host.state, own=True)
        with as_units_user():
            for made in (host.state / "host", host.pair.parent):
                made.mkdir(mode=0o700, exist_ok=True)
        with trusting(session, where, authority).connect() as client:
            request = api.JoinRequest(token=token, node=host.node, csr=csr, hosts=host.hosts)
            answer = client.joining.Join(request)
        if host.of_services and not answer.tokens:
            raise FailedPreconditionError(
                "the join token is for a GPU host: join-token create --kind", reason="JOIN_TOKEN_KIND"
            )
        with as_units_user():
            if host.of_services:
                certificate_renewal.write_services_files(host.state / "host", answer, key)
            else:
                certificate_renewal.write_host_files(
                    host.pair, host.authority, key, answer.certificate_pem, answer.authority_pem
                )


@command("leave")
@PLACE
def leave(session: Session, directory: Path | None) -> None:
    """Stop and remove what join set up on this host: its units and its certificate. Stop --run first.

    The settings are kept in gpuscale.toml.left.

    To remove the host for good: `gpuscalectl forget node NAME` and `gpuscalectl certs revoke NAME`.
    """
    settings, state = directories(directory)
    of_gpus = (state / "host" / "host.pem").exists()
    programs = PROGRAMS if of_gpus else PROGRAMS_OF_SERVICES
    own = [
        state / "host" / name
        for name in (("ca.crt", "host.pem") if of_gpus else certificate_renewal.SERVICES_FILES)
    ]
    with as_units_user():
        kept = [file for file in own if file.exists()]
    if not kept:
        raise FailedPreconditionError(
            f"this host has not joined: no certificate is in {state / 'host'}", reason="NOT_JOINED"
        )
    units = stop_units(programs)
    with writing(reason="HOST_FILES", what="remove"):
        if (settings / "gpuscale.toml").exists():  # its owner may have edited it
            (settings / "gpuscale.toml").replace(settings / "gpuscale.toml.left")
        with as_units_user():
            for file in kept:  # last, since it tells what has joined
                file.unlink()
    session.output.write_records("removed", [{"file": str(file)} for file in (*kept, *units)])
