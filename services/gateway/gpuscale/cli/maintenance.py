"""`gpuscalectl cordon`, `uncordon` and `drain`: nodes and GPUs out of use, and back."""

from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.options import duration
from gpuscale.cli.output import Format, write_lines
from gpuscale.cli.session import session_of

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Cordon

Spot = Annotated[str, typer.Argument(metavar="NODE[/UUID]", show_default=False)]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why, for others to read.")]


def cordon(context: typer.Context, name: Spot, reason: Reason = "") -> None:
    """Let nothing new onto a node or GPU; what is there stays."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.resources import spot_name

    request = api.CordonNodeRequest(name=spot_name(name), reason=reason)
    with session_of(context).connect() as client:
        found = client.nodes.CordonNode(request).cordon
    _write(context, found, f"{found.name} cordoned")


def uncordon(context: typer.Context, name: Spot) -> None:
    """Lift a cordon, and with it a drain."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.resources import spot_name

    full = spot_name(name)
    with session_of(context).connect() as client:
        client.nodes.UncordonNode(api.UncordonNodeRequest(name=full))
    output = session_of(context).output
    if output.human:
        write_lines([f"{full} uncordoned"])
    elif output.format is Format.NAME:
        write_lines([full])
    else:
        output.write_data({"name": full})


def drain(
    context: typer.Context,
    name: Spot,
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
    """Cordon a node or GPU, tell the holders of what is there to leave, and end at the deadline what is left."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.resources import spot_name
    from gpuscale.cli.views.cells import short
    from gpuscale.common.wire import to_duration

    request = api.DrainNodeRequest(
        name=spot_name(name), reason=reason, grace=None if grace is None else to_duration(grace)
    )
    with session_of(context).connect() as client:
        found = client.nodes.DrainNode(request)
    leaving = ", ".join(f"{short(one.name)} of {one.holder}" for one in found.reservations)
    _write(context, found.cordon, f"{found.cordon.name} drains; to leave: {leaving or 'nobody'}")


def _write(context: typer.Context, cordon: "Cordon", words: str) -> None:
    from gpuscale.cli.views.capacity import CORDONS

    output = session_of(context).output
    if output.human:
        write_lines([words])
    else:
        output.write_one(cordon, CORDONS)
