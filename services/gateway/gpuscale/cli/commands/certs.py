"""`gpuscalectl certs init|issue`: an authority of one's own and certificates of it, as files in one directory."""

from pathlib import Path
from typing import Annotated

import typer

from gpuscale.cli.commands.tokens import RoleName
from gpuscale.cli.console.session import note, session_of
from gpuscale.cli.grammar.options import Name
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

DAYS = 397
"""How long a certificate is good for where nothing else is said."""
_COLUMNS = (("NAME", "name"), ("CERTIFICATE", "certificate"), ("KEY", "key"))

Days = Annotated[int, typer.Option(min=1, max=3650, help="How long the certificate is good for.")]
Directory = Annotated[
    Path, typer.Option("--dir", metavar="DIR", help="Where the files are.", show_default=False)
]


@app.command()
def init(
    context: typer.Context,
    directory: Directory,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name or IP address of the server; may be repeated. Without any: those of the certificate"
            " that is there, or localhost and 127.0.0.1.",
        ),
    ] = None,
    days: Days = DAYS,
) -> None:
    """Make an authority, unless the directory has one, and a certificate for a server.

    Run it again to renew the server's certificate: a server that runs takes it up by itself.
    """
    from gpuscale.cli.commands.certificates import hosts_of, make_authority, make_server, read_pair

    hosts = host or ["localhost", "127.0.0.1"]
    try:
        if not host and (directory / "server.crt").exists():
            hosts = hosts_of(read_pair(directory, "server").certificate)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (directory / "ca.key").exists():
            make_authority("gpuscale").write(directory, "ca")
            note(f"made an authority; keep {directory / 'ca.key'} where nobody else can read it")
        make_server(read_pair(directory, "ca"), hosts, days).write(directory, "server")
    except (OSError, ValueError) as error:
        raise _unusable(directory, error) from error
    note(f"the server is called by: {', '.join(hosts)}")
    note(f"a server: --tls-cert-file {directory / 'server.crt'} --tls-key-file {directory / 'server.key'}")
    note(f"a caller: --ca-file {directory / 'ca.crt'}")
    _show(context, directory, "ca", "server")


@app.command()
def issue(
    context: typer.Context,
    name: Name,
    directory: Directory,
    role: Annotated[RoleName, typer.Option(help="What its bearer may do.")] = RoleName.VIEWER,
    trust_domain: Annotated[str, typer.Option(metavar="NAME", help="Of the SPIFFE id.")] = "gpuscale.local",
    days: Days = DAYS,
) -> None:
    """Make a certificate that names a caller and its role, for servers with --tls-client-ca-file."""
    from gpuscale.cli.commands.certificates import make_client, read_pair
    from gpuscale.common.names import is_id

    if not is_id(name) or name in {"ca", "server"}:
        raise InvalidArgumentError(f"{name!r} is no name of a caller", field="name")
    uri = f"spiffe://{trust_domain}/gpuscale/{role}/{name}"
    try:
        make_client(read_pair(directory, "ca"), uri, name, days).write(directory, name)
    except (OSError, ValueError) as error:
        raise _unusable(directory, error) from error
    note(f"{name} calls as {role}, with --cert-file and --key-file: {uri}")
    _show(context, directory, name)


def _show(context: typer.Context, directory: Path, *names: str) -> None:
    records = [
        {"name": name, "certificate": str(directory / f"{name}.crt"), "key": str(directory / f"{name}.key")}
        for name in names
    ]
    session_of(context).output.write_records("certificates", records, _COLUMNS)


def _unusable(directory: Path, error: OSError | ValueError) -> FailedPreconditionError:
    text = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
    name = error.filename if isinstance(error, OSError) and error.filename else directory
    return FailedPreconditionError(f"{name}: {text}", reason="CERTIFICATES")
