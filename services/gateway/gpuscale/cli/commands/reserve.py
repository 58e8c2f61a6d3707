"""`gpuscalectl reserve`, `renew` and `release`: GPUs under a lease, and bookings for later."""

from datetime import datetime
from typing import TYPE_CHECKING
from uuid import uuid4

import click

from gpuscale.api.allocator import v1 as api
from gpuscale.cli.commands.asking import TTL_HELP, Asking, Requesting
from gpuscale.cli.console.bulk import delete_each, show_each
from gpuscale.cli.console.command import command, names
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import Progress, note, write_lines
from gpuscale.cli.grammar.nouns import full_name, without_noun
from gpuscale.cli.grammar.parameters import COMING, DURATION, POSITIVE, YES, local_text, option, takes
from gpuscale.cli.views import allocator as views
from gpuscale.common import wire
from gpuscale.common.errors import InvalidArgumentError, UnavailableError
from gpuscale.common.names import BOOKING, RESERVATION, node_of

if TYPE_CHECKING:
    from gpuscale.client import Client

FENCE = option(
    "--fence", type=POSITIVE, metavar="N", help="Only the grant with this fence; looked up by default."
)
ANSWER_SECONDS = 10.0
"""Most seconds for the answer after the wait."""


@command("reserve --gpus 2 --min-memory 8GiB --ttl 5m --wait 10m")
@takes("asking", Asking)
@takes("requesting", Requesting)
@option(
    "--at",
    "start",
    type=COMING,
    help="Book them from this time on: 14:00, 'Mon 14:00', tomorrow, 2h (from now) or 2026-03-01T14:00+01:00.",
)
@option("--for", "length", type=DURATION, help="With --at, for how long.")
@option("--name", "booking_id", default="", metavar="NAME", help="With --at, the name of the booking.")
@option("--title", default="", metavar="TEXT", help="With --at, what it is for.")
def reserve(
    session: Session,
    asking: Asking,
    requesting: Requesting,
    start: datetime | None,
    length: float | None,
    booking_id: str,
    title: str,
) -> None:
    """Reserve GPUs, all or none; those of a member are on one node.

    With --at they are booked for the time of --for, and not granted to anyone who would still hold them then. Use a booking
    with --booking; GPUs not used within 15 minutes are released.
    """
    if (start is None) != (length is None) or (start is None and (booking_id or title)):
        raise click.UsageError("--at and --for belong together, and --name and --title to them")
    if start is not None and length is not None:
        _book(session, asking, requesting, api.Booking(title=title), booking_id, start, length)
        return
    with session.connect() as client:
        reservation = grant(client, requesting.message(asking, client)).reservation
    session.output.write_one(reservation, views.RESERVATIONS)
    if session.output.human:
        write_lines([""])
        session.output.write_list(reservation.gpus, views.RESERVED_GPUS)
        short = reservation.name.partition("/")[2]
        for node in sorted({node_of(gpu) for gpu in reservation.gpus}):
            uuids = ",".join(gpu.uuid for gpu in reservation.gpus if node_of(gpu) == node)
            note(f"to use them on {node}:  CUDA_VISIBLE_DEVICES={uuids}")
        note(f"to keep them:  gpuscalectl renew {short}")
        note(f"to give them back:  gpuscalectl release {short}")


def _book(
    session: Session,
    asking: Asking,
    requesting: Requesting,
    booking: "api.Booking",
    booking_id: str,
    start: datetime,
    length: float,
) -> None:
    booking.start_time.CopyFrom(wire.to_timestamp(start))
    booking.duration.CopyFrom(wire.to_duration(length))
    booking.tenant = requesting.tenant
    with session.connect() as client:
        booking.ask.CopyFrom(asking.message(client))
        request = api.CreateBookingRequest(
            booking=booking, booking_id=booking_id, request_id=requesting.request_id or str(uuid4())
        )
        made = client.bookings.CreateBooking(request).booking
    session.output.write_one(made, views.BOOKINGS)
    if session.output.human:
        short = made.name.partition("/")[2]
        note(f"to use them from {local_text(start)} on:  gpuscalectl run --booking {short} -- COMMAND")
        note(f"to give them back:  gpuscalectl delete booking {short}")


@command("delete booking demo")
@names("bookings")
@YES
def delete_booking(session: Session, name: tuple[str, ...], yes: bool) -> None:
    """Cancel bookings; work running in them may continue until their end."""
    wanted = [full_name(BOOKING, one) for one in name]
    delete_each(session, "bookings", wanted, api.CancelBookingRequest, yes=yes, line="cancelled")


@command("renew r3fa7kq2vnb4d --ttl 1h")
@names("reservations")
@option("--ttl", type=DURATION, help=TTL_HELP)
@FENCE
def renew(session: Session, name: tuple[str, ...], ttl: float | None, fence: int | None) -> None:
    """Renew the leases of reservations, counted from now."""

    def restart(client: "Client", full: str) -> "api.Reservation":
        request = api.RenewReservationRequest(
            name=full,
            fence=fence or _find(client, full).fence,
            ttl=None if ttl is None else wire.to_duration(ttl),
        )
        return client.allocator.RenewReservation(request).reservation

    show_each(session, views.RESERVATIONS, _full(name, fence), restart, _find)


@command("release r3fa7kq2vnb4d r9xw5tbe7zca2")
@names("reservations")
@FENCE
def release(session: Session, name: tuple[str, ...], fence: int | None) -> None:
    """Release reservations. Releasing one twice is harmless."""

    def give_back(client: "Client", full: str) -> "api.Reservation":
        request = api.ReleaseReservationRequest(name=full, fence=fence or _find(client, full).fence)
        return client.allocator.ReleaseReservation(request).reservation

    show_each(session, views.RESERVATIONS, _full(name, fence), give_back, _find)


def _full(typed: tuple[str, ...], fence: int | None) -> list[str]:
    """Full names of reservations; only one is allowed with a fence."""
    _, rest = without_noun(typed, "reservations")
    if fence is not None and len(rest) > 1:
        raise InvalidArgumentError("--fence takes one reservation: each has its own")
    return [full_name(RESERVATION, one) for one in rest]


def _find(client: "Client", name: str) -> "api.Reservation":
    return client.allocator.GetReservation(api.GetReservationRequest(name=name)).reservation


def grant(client: "Client", request: "api.ReserveRequest") -> "api.ReserveResponse":
    """Reserve, and return the reservation and its lease token; shows progress in the queue on standard error.

    Raises:
        GpuscaleError: it was refused, the wait timed out, or the grant of the request id has ended.
    """
    from gpuscale.client.lease import expect_held
    from gpuscale.client.states import estimate

    if not request.HasField("wait"):
        granted = client.allocator.Reserve(request)
        expect_held(granted.reservation)
        return granted
    progress = Progress()
    stream = client.allocator.ReserveAndWatch(
        api.ReserveAndWatchRequest(reserve=request), timeout=wire.seconds(request.wait) + ANSWER_SECONDS
    )
    try:
        for message in stream:
            if message.HasField("reservation"):
                expect_held(message.reservation)
                return api.ReserveResponse(reservation=message.reservation, lease_token=message.lease_token)
            place = message.waiting
            before = f"{place.position} before it" if place.position else "next in the queue"
            about = estimate(place)
            progress.tell(
                f"{before}: {place.message}" + (f" [{place.order}]" if place.order else ""),
                f" (served in {about})" if about else "",
                wire.seconds(place.waited),
            )
    finally:
        progress.end()
        stream.cancel()
    raise UnavailableError("the allocator ended the wait without an answer", reason="STREAM_ENDED")
