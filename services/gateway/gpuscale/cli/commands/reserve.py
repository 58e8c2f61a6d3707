"""`gpuscalectl reserve`, `renew` and `release`: GPUs under a lease."""

from typing import TYPE_CHECKING

from gpuscale.api.allocator import v1 as api
from gpuscale.cli.commands.asking import TTL_HELP, Asking, Requesting
from gpuscale.cli.console.bulk import show_each
from gpuscale.cli.console.command import command, names
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import Progress, note, write_lines
from gpuscale.cli.grammar.nouns import full_name, without_noun
from gpuscale.cli.grammar.parameters import DURATION, POSITIVE, format_duration, option, takes
from gpuscale.cli.views import allocator as views
from gpuscale.common import wire
from gpuscale.common.errors import InvalidArgumentError, UnavailableError
from gpuscale.common.names import RESERVATION, node_of

if TYPE_CHECKING:
    from gpuscale.client import Client

FENCE = option(
    "--fence", type=POSITIVE, metavar="N", help="Only the grant with this fence; looked up by default."
)
ANSWER_SECONDS = 10.0
"""How late an answer may be once the wait is over."""


@command("reserve --gpus 2 --min-memory 8GiB --ttl 5m --wait 10m")
@takes("asking", Asking)
@takes("requesting", Requesting)
def reserve(session: Session, asking: Asking, requesting: Requesting) -> None:
    """Reserve GPUs, all or none; those of a member are on one node."""
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


@command("renew r3fa7kq2vnb4d --ttl 1h")
@names("reservations")
@option("--ttl", type=DURATION, help=TTL_HELP)
@FENCE
def renew(session: Session, name: tuple[str, ...], ttl: float | None, fence: int | None) -> None:
    """Restart the leases of reservations, from now."""

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
    """Give reservations back. Releasing one twice is harmless."""

    def give_back(client: "Client", full: str) -> "api.Reservation":
        request = api.ReleaseReservationRequest(name=full, fence=fence or _find(client, full).fence)
        return client.allocator.ReleaseReservation(request).reservation

    show_each(session, views.RESERVATIONS, _full(name, fence), give_back, _find)


def _full(typed: tuple[str, ...], fence: int | None) -> list[str]:
    """Complete names of reservations; only one where there is a fence."""
    _, rest = without_noun(typed, "reservations")
    if fence is not None and len(rest) > 1:
        raise InvalidArgumentError("--fence takes one reservation: each has its own")
    return [full_name(RESERVATION, one) for one in rest]


def _find(client: "Client", name: str) -> "api.Reservation":
    return client.allocator.GetReservation(api.GetReservationRequest(name=name)).reservation


def grant(client: "Client", request: "api.ReserveRequest") -> "api.ReserveResponse":
    """The reservation and its lease token; progress in the queue is shown on standard error.

    Raises:
        GpuscaleError: it was refused, the wait ended first, or what the request id was granted has ended.
    """
    from gpuscale.client.lease import expect_held

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
            left = wire.optional_seconds(place, "estimated_wait")
            estimate = "" if left is None else f" (served in {format_duration(left)} if no lease is renewed)"
            progress.tell(f"{before}: {place.message}", estimate, wire.seconds(place.waited))
    finally:
        progress.end()
        stream.cancel()
    raise UnavailableError("the allocator ended the wait without an answer", reason="STREAM_ENDED")
