"""`gpuscalectl reserve`, `renew` and `release`: GPUs under a lease."""

from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.commands.asking import Asking
from gpuscale.cli.commands.granting import grant
from gpuscale.cli.commands.requesting import Requesting, Ttl
from gpuscale.cli.console.output import write_lines
from gpuscale.cli.console.session import note, session_of
from gpuscale.cli.console.several import show_each
from gpuscale.cli.grammar.options import SomeNames
from gpuscale.cli.grammar.typed import takes
from gpuscale.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Reservation
    from gpuscale.client import Client

Fence = Annotated[int | None, typer.Option(min=1, help="Only this grant; looked up when not given.")]


@takes("asking", Asking)
@takes("requesting", Requesting)
def reserve(context: typer.Context, asking: Asking, requesting: Requesting) -> None:
    """Reserve GPUs, all or none; each member's are of one node."""
    from gpuscale.cli.views.allocator import RESERVATIONS, RESERVED_GPUS

    session = session_of(context)
    request = requesting.message(asking)
    with session.connect() as client:
        reservation = grant(client, request).reservation
    session.output.write_one(reservation, RESERVATIONS)
    if session.output.human:
        write_lines([""])
        session.output.write_list(reservation.gpus, RESERVED_GPUS)
        short = reservation.name.partition("/")[2]
        for node in sorted({gpu.node for gpu in reservation.gpus}):
            uuids = ",".join(gpu.uuid for gpu in reservation.gpus if gpu.node == node)
            note(f"use on {node} with:  CUDA_VISIBLE_DEVICES={uuids}")
        note(f"keep them with:  gpuscalectl renew {short}")
        note(f"give back with:  gpuscalectl release {short}")


def renew(context: typer.Context, name: SomeNames, ttl: Ttl = None, fence: Fence = None) -> None:
    """Start the leases of reservations anew, from now."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.views.allocator import RESERVATIONS
    from gpuscale.common.wire import to_duration

    def start(client: "Client", full: str) -> "Reservation":
        request = api.RenewReservationRequest(
            name=full,
            fence=fence or _find(client, full).fence,
            ttl=None if ttl is None else to_duration(ttl),
        )
        return client.allocator.RenewReservation(request).reservation

    show_each(session_of(context), RESERVATIONS, _full(name, fence), start, _find)


def release(context: typer.Context, name: SomeNames, fence: Fence = None) -> None:
    """Give reservations back. Releasing twice is harmless."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.views.allocator import RESERVATIONS

    def give_back(client: "Client", full: str) -> "Reservation":
        request = api.ReleaseReservationRequest(name=full, fence=fence or _find(client, full).fence)
        return client.allocator.ReleaseReservation(request).reservation

    show_each(session_of(context), RESERVATIONS, _full(name, fence), give_back, _find)


def _full(typed: list[str], fence: int | None) -> list[str]:
    """Full names of the reservations that were named.

    Raises:
        InvalidArgumentError: one is none, or one fence is to be that of several.
    """
    from gpuscale.cli.console.resources import full_name, without_noun
    from gpuscale.common.names import RESERVATION

    _, rest = without_noun(typed, "reservations")
    if fence is not None and len(rest) > 1:
        raise InvalidArgumentError("--fence is for one reservation: each has its own")
    return [full_name(RESERVATION, one) for one in rest]


def _find(client: "Client", name: str) -> "Reservation":
    from gpuscale.api.allocator import v1 as api

    return client.allocator.GetReservation(api.GetReservationRequest(name=name)).reservation
