"""`gpuscalectl reserve`, `renew` and `release`: GPUs under a lease."""

from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.asking import Asking
from gpuscale.cli.granting import grant
from gpuscale.cli.options import Name
from gpuscale.cli.output import write_lines
from gpuscale.cli.requesting import Requesting, Ttl
from gpuscale.cli.session import Session, note, session_of
from gpuscale.cli.typed import takes

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Reservation
    from gpuscale.client import Client

Fence = Annotated[int | None, typer.Option(min=1, help="Only this grant; looked up when not given.")]


@takes("asking", Asking)
@takes("requesting", Requesting)
def reserve(context: typer.Context, asking: Asking, requesting: Requesting) -> None:
    """Reserve GPUs, all or none; each member's are of one node."""
    session = session_of(context)
    request = requesting.message(asking)
    with session.connect() as client:
        reservation = grant(client, request)
    _write(session, reservation, gpus=True)
    if session.output.human:
        uuids = ",".join(gpu.uuid for gpu in reservation.gpus)
        short = reservation.name.partition("/")[2]
        note(f"use them with:   CUDA_VISIBLE_DEVICES={uuids}")
        note(f"keep them with:  gpuscalectl renew {short}")
        note(f"give back with:  gpuscalectl release {short}")


def renew(context: typer.Context, name: Name, ttl: Ttl = None, fence: Fence = None) -> None:
    """Start the lease of a reservation anew, from now."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.common.wire import to_duration

    session = session_of(context)
    with session.connect() as client:
        full, fence = _grant(client, name, fence)
        request = api.RenewReservationRequest(
            name=full, fence=fence, ttl=None if ttl is None else to_duration(ttl)
        )
        reservation = client.allocator.RenewReservation(request).reservation
    _write(session, reservation)


def release(context: typer.Context, name: Name, fence: Fence = None) -> None:
    """Give a reservation back. Releasing twice is harmless."""
    from gpuscale.api.allocator import v1 as api

    session = session_of(context)
    with session.connect() as client:
        full, fence = _grant(client, name, fence)
        request = api.ReleaseReservationRequest(name=full, fence=fence)
        reservation = client.allocator.ReleaseReservation(request).reservation
    _write(session, reservation)


def _grant(client: "Client", typed: str, fence: int | None) -> tuple[str, int]:
    """Full name and fence of the reservation that was named."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.resources import full_name
    from gpuscale.common.names import RESERVATION

    name = full_name(RESERVATION, typed)
    if fence is None:
        fence = client.allocator.GetReservation(api.GetReservationRequest(name=name)).reservation.fence
    return name, fence


def _write(session: Session, reservation: "Reservation", *, gpus: bool = False) -> None:
    from gpuscale.cli.views.allocator import RESERVATIONS, RESERVED_GPUS

    session.output.write_one(reservation, RESERVATIONS)
    if gpus and session.output.human:
        write_lines([""])
        session.output.write_list(reservation.gpus, RESERVED_GPUS)
