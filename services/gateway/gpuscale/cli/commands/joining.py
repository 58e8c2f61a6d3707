"""`gpuscalectl join-token` and `gpuscalectl join`: how a host gets its certificate, and the settings of its programs."""

import json
import os
import pwd
import socket
import ssl
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuscale.cli.console.command import FILE, command, one_name
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.parameters import DURATION, option, repeated
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from gpuscale.common.names import is_id, to_id

if TYPE_CHECKING:
    from gpuscale.api.monitor.v1 import JoinToken

PORTS = {"fleet": 7072, "allocator": 7073, "autoscaler": 7074}
"""Where the services of a host listen, unless `join` is told otherwise."""
USER = "gpuscale"
"""The user that the units run programs as."""
_START = "gpuscale-agent --config {0}, gpuscale-adapter --config {0}; or systemctl enable --now gpuscale-agent gpuscale-adapter"
_TOKENS = (
    ("ID", "id"),
    ("ROLE", "role"),
    ("NODE", "node"),
    ("HOSTS", "hosts"),
    ("USES LEFT", "usesLeft"),
    ("EXPIRES", "expires"),
)


@command("join-token create --expires-in 1h")
@option(
    "--node", default="", metavar="NAME", help="The only name that it is good for; any new one without it."
)
@option(
    "--role",
    type=click.Choice(("agent", "operator")),
    default="agent",
    help="What its bearer may do; operator needs --node.",
)
@repeated(
    "--host", metavar="NAME", help="Name or IP address by which others call the host, beside its own name."
)
@option("--uses", type=click.IntRange(1, 1000), default=1, metavar="N", help="How many hosts may use it.")
@option("--expires-in", type=DURATION, default="1h", help="How long it may be used.")
def create(
    session: Session, node: str, role: str, host: tuple[str, ...], uses: int, expires_in: float
) -> None:
    """Create a join token, and print what to type on the host. The token is not shown again."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.api.types.v1 import options_pb2
    from gpuscale.common.wire import to_duration

    request = api.CreateJoinTokenRequest(
        role=options_pb2.Role.Value(f"ROLE_{role.upper()}"),
        node=node,
        hosts=host,
        uses=uses,
        ttl=to_duration(expires_in),
    )
    with session.connect() as client:
        made, address = client.joining.CreateJoinToken(request), client.address
    line = f"gpuscalectl join {address} --token {made.token} --ca-hash {made.authority_digest}"
    if session.output.human:
        note(f"to be typed on the host, {'once' if uses == 1 else f'{uses} times'}; it is not shown again")
        sys.stdout.write(f"{line}\n")
    else:
        session.output.write_data(
            {**_record(made.join_token), "token": made.token, "caHash": made.authority_digest}
        )


@command("join-token list")
def list_tokens(session: Session) -> None:
    """List join tokens that may still be used."""
    from gpuscale.api.monitor import v1 as api

    with session.connect() as client:
        found = client.joining.ListJoinTokens(api.ListJoinTokensRequest()).join_tokens
    session.output.write_records("joinTokens", [_record(one) for one in found], _TOKENS)


@command("join-token delete 3f9a12cd")
@one_name(metavar="ID")
def delete(session: Session, name: str) -> None:
    """Delete a join token, so that nobody can use it any more."""
    from gpuscale.api.monitor import v1 as api

    with session.connect() as client:
        client.joining.DeleteJoinToken(api.DeleteJoinTokenRequest(id=name))
    session.output.write_records("deleted", [{"id": name}], _TOKENS[:1])


def _record(token: "JoinToken") -> dict[str, object]:
    from gpuscale.api.types.v1 import options_pb2

    return {
        "id": token.id,
        "role": options_pb2.Role.Name(token.role).removeprefix("ROLE_").lower(),
        "node": token.node,
        "hosts": list(token.hosts),
        "usesLeft": token.uses_left,
        "expires": datetime.fromtimestamp(token.expire_time.seconds, UTC).isoformat(timespec="seconds"),
    }


@command("join gpus.example:7070 --token-file - --ca-hash sha256:5f9d…")
@one_name(metavar="ADDRESS")
@option(
    "--token",
    metavar="TEXT",
    help="The join token. Other users of the host can see it: it should be for one use.",
)
@option("--token-file", type=FILE, help="File with the join token; - for standard input.")
@option(
    "--ca-hash",
    required=True,
    metavar="DIGEST",
    help="The digest of the authority, as join-token create prints it.",
)
@option("--node", metavar="NAME", help="Name of this host; its hostname without it.")
@option(
    "--dir",
    "directory",
    type=FILE,
    help="Where to write all files; without it where the units look, or ~/.config/gpuscale without root.",
)
@repeated(
    "--at",
    metavar="SERVICE=ADDRESS",
    help="Where the fleet, allocator or autoscaler is, where not at port 7072-7074 of ADDRESS.",
)
@option("--plan", is_flag=True, help="Show what would be written, and write nothing.")
def join(
    session: Session,
    name: str,
    token: str | None,
    token_file: Path | None,
    ca_hash: str,
    node: str | None,
    directory: Path | None,
    at: tuple[str, ...],
    plan: bool,
) -> None:
    """Get a certificate for this host, and write the settings of its agent and adapter.

    The authority is trusted by its digest before the token is sent. The agent has the certificate renewed by itself.
    """
    node = node or to_id(socket.gethostname())
    if not is_id(node):
        raise InvalidArgumentError(f"{node!r} is not a valid name of a node", field="node")
    settings, kept = _directories() if directory is None else (directory, directory)
    files = {"ca": kept / "ca.crt", "pair": kept / "host.pem", "settings": settings / "gpuscale.toml"}
    text = _settings(node, _services(name, at), files["ca"], files["pair"])
    if files["settings"].exists() and files["settings"].read_text(encoding="utf-8") != text:
        message = f"{files['settings']} exists: move it away, or choose another --dir"
        raise FailedPreconditionError(message, reason="SETTINGS_EXIST")
    with tempfile.TemporaryDirectory() as passing:
        authority = _trusted(session, name, ca_hash, Path(passing))
        if plan:
            note(
                f"the authority at {name} has this digest; {node} would get a certificate in {files['pair']}"
            )
            sys.stdout.write(f"# {files['settings']}\n{text}")
            return
        secret = _secret(token, token_file)
        _join(session, name, authority, secret, node, files)
        files["settings"].parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        files["settings"].write_text(text, encoding="utf-8")
    note(f"{node} has joined; to start it: {_START.format(files['settings'])}")
    records = [{"file": str(file)} for file in files.values()]
    session.output.write_records("files", records, (("FILE", "file"),))


def _join(
    session: Session, address: str, authority: Path, token: str, node: str, files: Mapping[str, Path]
) -> None:
    """Get the certificate, and write it."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.common.rpc.renewal import write_host_files
    from gpuscale.common.security.authority import make_request

    key, csr = make_request()
    try:
        files["pair"].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _trusting(session, address, authority).connect() as client:
            answer = client.joining.Join(api.JoinRequest(token=token, node=node, csr=csr))
        write_host_files(files["pair"], files["ca"], key, answer.certificate_pem, answer.authority_pem)
        with suppress(
            KeyError, PermissionError
        ):  # where the units' user is not there, the programs run as somebody else
            user = pwd.getpwnam(USER)
            for owned in (files["pair"].parent, files["pair"], files["ca"]):
                os.chown(owned, user.pw_uid, user.pw_gid)
    except OSError as error:
        message = f"cannot write {error.filename or files['pair']}: {error.strerror}"
        raise FailedPreconditionError(message, reason="HOST_FILES") from error


def _trusting(session: Session, address: str, authority: Path) -> Session:
    """A session with a server of which nothing but its authority is known."""
    return replace(
        session,
        address=address,
        ca_file=authority,
        token_file=None,
        cert_file=None,
        key_file=None,
        context=None,
    )


def _trusted(session: Session, address: str, digest: str, folder: Path) -> Path:
    """A file with the one authority of that digest.

    The certificate that the server shows is trusted for one question: which authorities are there? Whoever answers cannot
    make up one of that digest, and a server that the authority did not sign for gets no further.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    from gpuscale.api.monitor import v1 as api
    from gpuscale.common.rpc.channel import split_addresses
    from gpuscale.common.security.authority import digest_of

    host, _, port = split_addresses(address)[0].rpartition(":")
    file = folder / "authority.pem"
    try:
        shown = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=session.dial_timeout)
    except OSError as error:
        raise UnavailableError(f"no TLS server answers at {address}: {error}", reason="NO_ANSWER") from error
    file.write_text(shown, encoding="ascii")
    with _trusting(session, address, file).connect() as client:
        pem = client.joining.GetAuthority(api.GetAuthorityRequest()).authority_pem
    for one in x509.load_pem_x509_certificates(pem.encode()):
        if digest_of(one) == digest:
            file.write_bytes(one.public_bytes(Encoding.PEM))
            return file
    raise FailedPreconditionError(
        f"the authority at {address} has another digest than --ca-hash: this is another server, or a stale line",
        reason="CA_HASH",
    )


def _secret(token: str | None, file: Path | None) -> str:
    if (token is None) == (file is None):
        raise InvalidArgumentError("pass --token or --token-file, one of both", field="token")
    if token is not None:
        return token
    try:
        text = sys.stdin.readline() if str(file) == "-" else Path(str(file)).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise FailedPreconditionError(f"cannot read {file}: {error}", reason="TOKEN_FILE") from error
    return text.strip()


def _directories() -> tuple[Path, Path]:
    """Where settings are, and where the agent keeps its certificate, which it replaces: the units' directories as root."""
    if os.geteuid() == 0:
        return Path("/etc/gpuscale"), Path("/var/lib/gpuscale/host")
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "gpuscale"
    return home, home


def _services(address: str, at: tuple[str, ...]) -> Mapping[str, str]:
    """Where each service is."""
    from gpuscale.common.rpc.channel import split_addresses

    host = address.rpartition(":")[0]
    found = {name: f"{host}:{port}" for name, port in PORTS.items()}
    for one in at:
        name, equals, where = one.partition("=")
        if name not in found or not equals:
            raise InvalidArgumentError(f"--at: {one!r} must be one of {', '.join(found)}, = and its address")
        found[name] = ",".join(split_addresses(where))
    return found


def _settings(node: str, services: Mapping[str, str], ca_file: Path, pair: Path) -> str:
    """The settings file of a host's programs. JSON writes texts as TOML does."""
    common = {"ca_file": str(ca_file.absolute()), "cert_file": str(pair.absolute())}
    common["key_file"] = common["cert_file"]
    tables: Mapping[str, Mapping[str, str | bool]] = {
        "agent": {
            "node": node,
            "fleet_address": services["fleet"],
            "allocator_address": services["allocator"],
            **common,
            "renew_certificate": True,
        },
        "adapter": {"node": node, "autoscaler_address": services["autoscaler"], **common},
    }
    lines = ["# Written by gpuscalectl join; docs/settings.md has every key."]
    for name, values in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"
