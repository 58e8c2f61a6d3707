"""`gpuscalectl cordon`, `uncordon` and `drain`: nodes and GPUs out of use, and back."""

from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.grammar.options import duration
from gpuscale.cli.console.output import to_dict
from gpuscale.cli.console.session import session_of
from gpuscale.cli.several import Done, named, say_each

if TYPE_CHECKING:
    from gpuscale.client import Client

Spots = Annotated[list[str], typer.Argument(metavar="NODE[/UUID]", show_default=False)]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why, for others to read.")]


def cordon(context: typer.Context, name: Spots, reason: Reason = "") -> None:
    """Let nothing new onto nodes or GPUs; what is there stays."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.console.resources import spot_name

    def put(client: "Client", full: str) -> Done:
        found = client.nodes.CordonNode(api.CordonNodeRequest(name=full, reason=reason)).cordon
        return Done(full, f"{found.name} cordoned", to_dict(found))

    say_each(session_of(context), "cordons", list(map(spot_name, name)), put)


def uncordon(context: typer.Context, name: Spots) -> None:
    """Lift cordons, and with them drains."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.console.resources import spot_name

    def lift(client: "Client", full: str) -> Done:
        client.nodes.UncordonNode(api.UncordonNodeRequest(name=full))
        return named(full, "uncordoned")

    say_each(session_of(context), "cordons", list(map(spot_name, name)), lift)


def drain(
    context: typer.Context,
    name: Spots,
    grace: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="How long holders have to leave; 10 minutes when not given.",
        ),
    ] = None,
    reason: Reason = "",
) -> None:
    """Cordon nodes or GPUs, tell the holders of what is there to leave, and end at the deadline what is left."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.console.resources import spot_name
    from gpuscale.cli.console.cells import short
    from gpuscale.common.wire import to_duration

    def empty(client: "Client", full: str) -> Done:
        found = client.nodes.DrainNode(
            api.DrainNodeRequest(
                name=full, reason=reason, grace=None if grace is None else to_duration(grace)
            )
        )
        leaving = ", ".join(f"{short(one.name)} of {one.holder}" for one in found.reservations)
        line = f"{found.cordon.name} drains; to leave: {leaving or 'nobody'}"
        return Done(full, line, to_dict(found.cordon))

    say_each(session_of(context), "cordons", list(map(spot_name, name)), empty)
