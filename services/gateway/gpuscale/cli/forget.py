"""`gpuscalectl forget adapter`: give up an adapter that will never come back."""

import sys

import typer

from gpuscale.cli.change import Yes
from gpuscale.cli.options import Name
from gpuscale.cli.output import Format, write_lines
from gpuscale.cli.session import note, session_of
from gpuscale.cli.terminal import ask
from gpuscale.common.errors import InvalidArgumentError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

DANGER = "what still runs on its host then shares GPUs with whatever is given them next"


@app.command("adapter")
def forget_adapter(context: typer.Context, name: Name, yes: Yes = False) -> None:
    """Give up an adapter whose host is gone: its replicas end as FAILED, and their GPUs are given back.

    Only where nothing runs on its host any more: nobody can stop what does, and it then shares GPUs with others.
    """
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.resources import full_name
    from gpuscale.common import names

    full = full_name(names.ADAPTER, name)
    _confirm(full, yes=yes)
    with session_of(context).connect() as client:
        lost = client.adapters.ForgetAdapter(api.ForgetAdapterRequest(name=full)).replicas
    output = session_of(context).output
    if output.human:
        write_lines([f"{full} is forgotten; replicas that ended with it: {', '.join(lost) or 'none'}"])
    elif output.format is Format.NAME:
        write_lines([full])
    else:
        output.write_data({"name": full, "replicas": list(lost)})


def _confirm(name: str, *, yes: bool) -> None:
    """Ask, and say what is at stake; ends the program where it is not meant."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgumentError(
            f"{name} is not forgotten ({DANGER}): pass --yes where nobody can be asked"
        )
    if not ask(f"Forget {name}? If its host lives, {DANGER}."):
        note("nothing forgotten")
        raise typer.Exit(1)
