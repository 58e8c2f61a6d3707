"""`gpuscalectl explain reservation` and `explain placement`: why these GPUs, and why none."""

from typing import TYPE_CHECKING

import typer

from gpuscale.cli.commands.asking import Asking
from gpuscale.cli.console.output import to_dict, write_lines
from gpuscale.cli.console.session import session_of
from gpuscale.cli.grammar.options import Name
from gpuscale.cli.grammar.typed import takes

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import ExplainPlacementResponse, NodeOutlook, Reservation


def explain_reservation(context: typer.Context, name: Name) -> None:
    """Why a reservation got the GPUs it has: the score of each, in parts; and why it ended, or is about to."""
    from gpuscale.cli.console import resources
    from gpuscale.cli.views.allocator import RESERVATIONS, RESERVED_GPUS

    session = session_of(context)
    with session.connect() as client:
        [reservation] = resources.reservations(client, [name])
    output = session.output
    output.write_one(reservation, RESERVATIONS)
    if output.human:
        write_lines(["", *output.table(reservation.gpus, RESERVED_GPUS), *_fate(reservation)])


def _fate(reservation: "Reservation") -> list[str]:
    from gpuscale.cli.grammar.quantities import format_duration
    from gpuscale.common.wire import to_datetime

    lost = [gpu.uuid for gpu in reservation.gpus if gpu.lost]
    lines = [f"vanished: {', '.join(lost)}"] if lost else []
    if reservation.HasField("revoke_time") and reservation.HasField("expire_time"):
        # Both by the server's clock, of which this host knows how much is left of the lease.
        sooner = to_datetime(reservation.expire_time) - to_datetime(reservation.revoke_time)
        left = reservation.remaining.ToTimedelta() - sooner
        lines.append(f"taken away in {format_duration(left.total_seconds())}: {reservation.end_reason}")
    elif reservation.end_reason:
        lines.append(f"ended: {reservation.end_reason}")
    return ["", *lines] if lines else []


@takes("asking", Asking)
def explain_placement(context: typer.Context, asking: Asking) -> None:
    """What a request would find: what each constraint removes, the nearest nodes, and what would help."""
    from gpuscale.api.allocator import v1 as api

    session = session_of(context)
    with session.connect() as client:
        found = client.capacity.ExplainPlacement(api.ExplainPlacementRequest(ask=asking.message()))
    if session.output.human:
        write_lines(_placement_lines(found))
    else:
        session.output.write_data(to_dict(found))


def _placement_lines(found: "ExplainPlacementResponse") -> list[str]:
    lines = [found.message]
    if found.remedies:
        lines += ["", "What would help:", *(f"  {remedy}" for remedy in found.remedies)]
    effects = [one for one in found.constraints if one.removed_alone_count]
    if effects:
        width = max(len(one.constraint) for one in effects)
        lines += ["", "What each constraint removes, after those before it, and alone:"]
        lines += [
            f"  {one.constraint:<{width}}   {one.removed_in_order_count:>5}   {one.removed_alone_count:>5}"
            for one in effects
        ]
    if found.nodes:
        lines += ["", f"Nodes, nearest first ({len(found.nodes)} of {found.node_count}):"]
        lines += [line for node in found.nodes for line in _node_lines(node)]
    return lines


def _node_lines(node: "NodeOutlook") -> list[str]:
    obstacle = f", {node.obstacle}: {node.message}" if node.obstacle else ""
    lines = [f"  {node.name}: {node.fitting_count} of {len(node.gpus)} GPUs fit{obstacle}"]
    for gpu in node.gpus:
        why = f"{gpu.obstacle}: {gpu.message}" if gpu.obstacle else f"score {gpu.score.total:.3f}"
        lines.append(f"    {gpu.uuid or gpu.name.rpartition('/')[2]}   {why}")
    return lines
