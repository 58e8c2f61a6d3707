"""`gpuscalectl certs init|issue`: your own certificate authority, and certificates for servers and callers, as files."""

from pathlib import Path

import click

from gpuscale.cli.commands.tokens import ROLE
from gpuscale.cli.console.command import FILE, command, one_name
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.parameters import option, repeated
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError

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
    from gpuscale.cli.commands.certificates import hosts_of, make_authority, make_server, read_pair

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
    from gpuscale.cli.commands.certificates import make_client, read_pair
    from gpuscale.common.names import is_id

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
