"""`gpuscalectl reserve`, `renew` and `release`: GPUs under a lease, and bookings for later."""

from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

import click

from gpuscale import client as library
from gpuscale.api.allocator import v1 as api
from gpuscale.cli.console import cells, lookup
from gpuscale.cli.console.bulk import Done, delete_each, say_each
from gpuscale.cli.console.command import Session, command, names, names_of
from gpuscale.cli.console.output import to_dict
from gpuscale.cli.console.terminal import Progress, note, write_lines
from gpuscale.cli.grammar.nouns import full_name, without_noun
from gpuscale.cli.grammar.parameters import (
    COMING,
    DURATION,
    GPU_NAME,
    LABEL,
    PERCENT,
    POSITIVE,
    SHARE,
    SIZE,
    TIME_LIMIT,
    WATTS,
    YES,
    local_text,
    once,
    option,
    shared,
    takes,
)
from gpuscale.cli.views import allocator as views
from gpuscale.common import wire
from gpuscale.common.errors import InvalidArgumentError, UnavailableError
from gpuscale.common.names import BOOKING, NODE, node_of

if TYPE_CHECKING:
    from gpuscale.client import AskOptions, Client

WHOLE = 1000
"""A whole GPU or core, in thousandths."""
POLICIES = ("spread", "pack", "bestfit", "firstfit", "fgd")
STRATEGIES = ("pack", "strict-pack", "spread", "strict-spread")
Names = tuple[str, ...]
Labels = tuple[tuple[str, str], ...]
NODE_NAMES = names_of("nodes")
TTL_HELP = "How long the lease lasts, such as 60s or 5m."


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Which GPUs to reserve, as typed."""

    min_memory: int | None = shared(
        type=SIZE, help="Least free memory, such as 8GiB; the server's default is 8000 MiB."
    )
    max_utilization: float | None = shared(
        type=PERCENT, help="Utilization must be lower, in percent; the server's default is 50."
    )
    model: Names = shared(many=True, metavar="TEXT", help="Only GPUs of this model, such as A100.")
    gpus: int | None = shared(type=POSITIVE, metavar="N", help="How many GPUs, all on one node.")
    allow_unknown_utilization: bool | None = shared(
        "--allow-unknown-utilization/--refuse-unknown-utilization",
        default=None,
        help="Whether to take GPUs whose utilization cannot be read; by default only with --mig-profile.",
    )
    share: int | None = shared(type=SHARE, help="Share of each GPU, such as 0.5.")
    gpu_memory: int | None = shared(type=SIZE, help="Memory of each GPU to set aside for a share.")
    mig_profile: str = shared(
        default="", metavar="NAME", help="MIG instances of this profile, such as 1g.10gb."
    )
    cpus: float = shared(
        type=click.FloatRange(0, 10_000),
        default=0.0,
        metavar="N",
        help="CPU cores of the node for each member.",
    )
    host_memory: int = shared(type=SIZE, default=0, help="Main memory of the node for each member.")
    node: Names = shared(many=True, metavar="NAME", help="Only on this node.", shell_complete=NODE_NAMES)
    exclude_node: Names = shared(
        many=True, metavar="NAME", help="Not on this node.", shell_complete=NODE_NAMES
    )
    gpu: Names = shared(many=True, type=GPU_NAME, help="Only this GPU: NODE/INDEX, NODE/UUID or UUID.")
    exclude_gpu: Names = shared(many=True, type=GPU_NAME, help="Not this GPU.")
    node_label: Labels = shared(many=True, type=LABEL, help="Only on nodes with this label.")
    apart_from: Labels = shared(many=True, type=LABEL, help="Not beside reservations with this label.")
    nvlink: bool = shared(is_flag=True, help="Prefer GPUs with the most NVLink between them.")
    balanced: bool = shared(is_flag=True, help="Prefer GPUs with about equal free memory.")
    power_limit: float | None = shared(
        type=WATTS, help="What each GPU may draw at most, such as 300W, where gpuscale-power runs."
    )
    members: int | None = shared(
        type=POSITIVE, metavar="N", help="Reserve this many times --gpus, all or none."
    )
    strategy: str | None = shared(type=click.Choice(STRATEGIES), help="How members are placed on nodes.")
    policy: str | None = shared(type=click.Choice(POLICIES), help="How GPUs are picked.")

    def __post_init__(self) -> None:
        if self.nvlink and self.balanced:
            raise click.UsageError("--nvlink and --balanced exclude each other")

    def message(self, client: "Client") -> "api.Ask":
        """The `Ask` message."""
        return library.ask(self.count(), self.options(client))

    def count(self) -> int:
        """Number of GPUs. Raises click.UsageError: no number was typed."""
        if self.gpus is None:
            raise click.UsageError("Missing option '--gpus'.")
        return self.gpus

    def options(self, client: "Client") -> "AskOptions":
        """The client's options, apart from the number of GPUs; queries the fleet for GPUs without a full name."""

        def gpus(typed: Names) -> list[str]:
            return lookup.spots(lambda: lookup.nodes(client), typed, "gpus") if typed else []

        return library.AskOptions(
            min_memory=self.min_memory,
            max_utilization_percent=self.max_utilization,
            allow_unknown_utilization=self.allow_unknown_utilization,
            gpu_milli=self.share,
            gpu_memory=self.gpu_memory,
            models=self.model,
            mig_profile=self.mig_profile,
            cpu_milli=round(self.cpus * WHOLE),
            host_memory=self.host_memory,
            nodes=[full_name(NODE, name) for name in self.node],
            excluded_nodes=[full_name(NODE, name) for name in self.exclude_node],
            only_gpus=gpus(self.gpu),
            excluded_gpus=gpus(self.exclude_gpu),
            node_labels=once(self.node_label),
            apart_from=once(self.apart_from),
            gpu_set="nvlink" if self.nvlink else "memory_balanced" if self.balanced else "",
            power_limit_watts=self.power_limit,
            member_count=self.members,
            gang_strategy=self.strategy.replace("-", "_") if self.strategy else "",
            policy=self.policy or "",
        )


@dataclass(frozen=True, kw_only=True)
class Requesting:
    """For whom to reserve GPUs, and how, as typed."""

    ttl: float | None = shared(type=DURATION, help=TTL_HELP)
    wait: float | None = shared(
        type=DURATION,
        help="How long to wait in the queue for free GPUs; up to 7d for run, otherwise not at all, by default.",
    )
    holder: str = shared(default="", metavar="NAME", help="Who holds them; USER@HOST by default.")
    label: Labels = shared(many=True, type=LABEL, help="A label of your own.")
    tenant: str = shared(default="", metavar="NAME", help="Tenant whose quota it counts against.")
    owner: str = shared(
        default="", metavar="NAME", help="Owner of the reservation, for admins; you by default."
    )
    priority: int = shared(type=int, default=0, metavar="N", help="Higher priorities are served first.")
    preemptible: bool = shared(is_flag=True, help="A request of higher priority may end it.")
    preempt: bool = shared(is_flag=True, help="It may end preemptible reservations of lower priority.")
    request_id: str | None = shared(
        metavar="UUID", help="Makes the command idempotent: same id, same reservation."
    )
    time_limit: float | None = shared(
        type=TIME_LIMIT, help="End it after this time, so it may use GPUs that are booked for later."
    )
    booking: str = shared(
        default="",
        metavar="NAME",
        help="Only on the GPUs of this booking.",
        shell_complete=names_of("bookings"),
    )

    def message(self, asking: Asking, client: "Client") -> "api.ReserveRequest":
        """The request for these GPUs."""
        from gpuscale.client.asks import default_holder

        options = library.ReserveOptions(
            **asking.options(client),
            ttl=self.ttl,
            wait=self.wait or None,
            anywhere=True,
            labels=once(self.label),
            tenant=self.tenant,
            owner=self.owner,
            priority=self.priority,
            preemptible=self.preemptible,
            may_preempt=self.preempt,
            request_id=self.request_id,
            time_limit=self.time_limit,
            booking=self.booking and full_name(BOOKING, self.booking),
        )
        count = asking.gpus
        if count is None and self.booking and not asking.members:
            count = len(lookup.bookings(client, [self.booking])[0].gpus)
        return library.reserve_request(count or asking.count(), self.holder or default_holder(), options)


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
@option("--title", default="", help="With --at, what it is for.")
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
    if start is None and (length is not None or booking_id or title):
        raise click.UsageError("--for, --name and --title are of a booking: pass --at too")
    if start is not None and length is None:
        raise click.UsageError("a booking needs its length: pass --for too, such as --for 2h")
    if start is not None and length is not None:
        typed = [f"--{name.replace('_', '-')}" for name, value in vars(requesting).items() if value]
        if beside := [one for one in typed if one not in {"--tenant", "--request-id"}]:
            raise click.UsageError(f"a booking has no {' and '.join(beside)}: leave them out")
        with session.connect() as client:
            booking = api.Booking(
                title=title,
                start_time=wire.to_timestamp(start),
                duration=wire.to_duration(length),
                tenant=requesting.tenant,
                ask=asking.message(client),
            )
            request = api.CreateBookingRequest(
                booking=booking, booking_id=booking_id, request_id=requesting.request_id or str(uuid4())
            )
            made = client.bookings.CreateBooking(request).booking
        session.output.write_one(made, views.BOOKINGS)
        if session.output.human:
            short = made.name.partition("/")[2]
            note(f"to use them from {local_text(start)} on:  gpuscalectl run --booking {short} -- COMMAND")
            note(f"to give them back:  gpuscalectl delete booking {short}")
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


@command("delete booking demo")
@names("bookings")
@YES
def delete_booking(session: Session, name: tuple[str, ...], yes: bool) -> None:
    """Cancel bookings; work running in them may continue until their end."""
    delete_each(session, "bookings", BOOKING, name, api.CancelBookingRequest, yes=yes, line="cancelled")


@command("renew r3fa7kq2vnb4d --ttl 1h")
@names("reservations")
@option("--ttl", type=DURATION, help=TTL_HELP)
@FENCE
def renew(session: Session, name: tuple[str, ...], ttl: float | None, fence: int | None) -> None:
    """Renew the leases of reservations, counted from now."""

    def restart(client: "Client", full: str) -> Done:
        request = api.RenewReservationRequest(
            name=full,
            fence=fence or _find(client, full).fence,
            ttl=None if ttl is None else wire.to_duration(ttl),
        )
        found = client.allocator.RenewReservation(request).reservation
        return Done(full, f"{full} renewed for {cells.duration(found, 'remaining')}", to_dict(found))

    say_each(session, "reservations", _full(session, name, fence), restart, _find)


@command("release r3fa7kq2vnb4d r9xw5tbe7zca2")
@names("reservations")
@FENCE
def release(session: Session, name: tuple[str, ...], fence: int | None) -> None:
    """Release reservations. Releasing one twice is harmless."""

    def give_back(client: "Client", full: str) -> Done:
        request = api.ReleaseReservationRequest(name=full, fence=fence or _find(client, full).fence)
        found = client.allocator.ReleaseReservation(request).reservation
        return Done(full, f"{full} released", to_dict(found))

    say_each(session, "reservations", _full(session, name, fence), give_back, _find)


def _full(session: Session, typed: tuple[str, ...], fence: int | None) -> list[str]:
    """Full names of reservations; only one is allowed with a fence."""
    _, rest = without_noun(typed, "reservations")
    if fence is not None and len(rest) > 1:
        raise InvalidArgumentError("--fence takes one reservation: each has its own")
    with session.connect() as client:
        return [lookup.reservation_name(client, one) for one in rest]


def _find(client: "Client", name: str) -> "api.Reservation":
    return client.allocator.GetReservation(api.GetReservationRequest(name=name)).reservation


def grant(client: "Client", request: "api.ReserveRequest") -> "api.ReserveResponse":
    """Reserve, and return the reservation and its lease token; shows progress in the queue on standard error.

    Raises GpuscaleError: it was refused, the wait timed out, or the grant of the request id has ended.
    """
    from gpuscale.client.lease import expect_held
    from gpuscale.client.states import standing

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
            progress.tell(
                f"{standing(place.position)}: {place.message}" + (f" [{place.order}]" if place.order else ""),
                partial(_served_in, place),
                wire.seconds(place.waited),
            )
    finally:
        progress.end()
        stream.cancel()
    raise UnavailableError("the allocator ended the wait without an answer", reason="STREAM_ENDED")


def _served_in(place: "api.QueuePlace", gone: float) -> str:
    from gpuscale.client.states import estimate

    about = estimate(place, gone)
    return f" (served in {about})" if about else ""
