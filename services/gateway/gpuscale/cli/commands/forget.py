"""`gpuscalectl forget adapter`: give up an adapter that will never come back."""

import sys
from typing import TYPE_CHECKING

import typer

from gpuscale.cli.commands.change import Yes
from gpuscale.cli.console.session import note, session_of
from gpuscale.cli.console.several import Done, say_each
from gpuscale.cli.console.terminal import ask
from gpuscale.cli.grammar.options import SomeNames
from gpuscale.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from gpuscale.client import Client

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

DANGER = "what still runs there then shares GPUs with whatever is given them next"


@app.command("adapter")
def forget_adapter(context: typer.Context, name: SomeNames, yes: Yes = False) -> None:
    """Give up adapters whose host is gone: their replicas end as FAILED, and their GPUs are given back.

    Only where nothing runs on the host any more: nobody can stop what does, and it then shares GPUs with others.
    """
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.console.resources import full_name
    from gpuscale.common import names

    def forget(client: "Client", full: str) -> Done:
        lost = client.adapters.ForgetAdapter(api.ForgetAdapterRequest(name=full)).replicas
        line = f"{full} is forgotten; replicas that ended with it: {', '.join(lost) or 'none'}"
        return Done(full, line, {"name": full, "replicas": list(lost)})

    wanted = [full_name(names.ADAPTER, one) for one in name]
    _confirm(", ".join(wanted), yes=yes)
    say_each(session_of(context), "adapters", wanted, forget)


def _confirm(name: str, *, yes: bool) -> None:
    """Ask, and say what is at stake; ends the program where it is not meant."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgumentError(f"nobody can be asked whether to forget {name} ({DANGER}): pass --yes")
    if not ask(f"Forget {name}? If the host lives, {DANGER}."):
        note("nothing forgotten")
        raise typer.Exit(1)
