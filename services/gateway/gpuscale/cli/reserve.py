"""`gpuscalectl reserve`, `renew` and `release`: GPUs under a lease."""

import getpass
import platform
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.options import Name, duration, size
from gpuscale.cli.output import write_lines
from gpuscale.cli.session import Session, note, session_of

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Reservation
    from gpuscale.client import Client

Fence = Annotated[int | None, typer.Option(min=1, help="Only this grant; looked up when not given.")]


Ttl = Annotated[
    float | None,
    typer.Option(parser=duration, metavar="DURATION", help="How long the lease lasts, such as 60s or 5m."),
]


def reserve(
    context: typer.Context,
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs, all on one node.", show_default=False)],
    min_memory: Annotated[
        int | None,
        typer.Option(
            parser=size,
            metavar="SIZE",
            help="Least free memory of each, such as 8GiB; the server's default is 8000 MiB.",
        ),
    ] = None,
    max_utilization: Annotated[
        float | None,
        typer.Option(
            min=0, max=100, help="Each must be used less than this, in percent; the server's default is 50."
        ),
    ] = None,
    allow_unknown_utilization: Annotated[
        bool, typer.Option("--allow-unknown-utilization", help="Admit GPUs whose utilization cannot be read.")
    ] = False,
    ttl: Ttl = None,
    holder: Annotated[str, typer.Option(help="Who will hold them; USER@HOST when not given.")] = "",
    node: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only on this node; may be repeated.")
    ] = None,
    request_id: Annotated[
        str | None,
        typer.Option(metavar="UUID", help="Makes the command repeatable: same id, same reservation."),
    ] = None,
) -> None:
    """Reserve GPUs of one node, all or none."""
    from gpuscale.cli.resources import full_name
    from gpuscale.client import ReserveOptions
    from gpuscale.common.names import NODE

    options = ReserveOptions(
        min_memory_bytes=min_memory,
        max_utilization_percent=max_utilization,
        allow_unknown_utilization=allow_unknown_utilization,
        ttl=ttl,
        nodes=[full_name(NODE, name) for name in node or ()],
        request_id=request_id,
    )
    session = session_of(context)
    with session.connect() as client:
        reservation = client.reserve(gpus, holder or f"{getpass.getuser()}@{platform.node()}", **options)
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
