"""Reservations: who holds what, for how long, how much is used, the output of jobs; and bookings: a calendar of the week."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from pathlib import Path
from zoneinfo import ZoneInfo

from google.protobuf.timestamp_pb2 import Timestamp
from nicegui import ui
from nicegui.events import GenericEventArguments

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.client import AsyncClient, GpuscaleError, NotFoundError, pages_async
from gpuscale.client.orders import kept_output
from gpuscale.client.states import advice, ended_by, scored
from gpuscale.common.secrets import write_private
from gpuscale.common.sizes import counted
from gpuscale.common.wire import to_datetime
from gpuscale.dashboard import frame, humanize, rows
from gpuscale.dashboard.frame import ACT, DashboardSite, ListTable, PageAddress, Tiles, heading, live, page
from gpuscale.dashboard.rows import Columns, ResourceTable, Row
from gpuscale.dashboard.visitors import CALENDAR, VisitorActions

REFRESH = 5.0
"""Seconds between queries of the queue."""


def reservations_page(site: DashboardSite) -> None:
    """Build the page."""
    with page(site, "Reservations"):
        tiles = Tiles("holding", "waiting", "GPUs reserved", "GPUs reserved and idle")
        actions = site.actions()
        may = actions is not None and actions.may("allocator.v1.AllocatorService/ReleaseReservation")
        columns = {**rows.RESERVATIONS.columns, "notes": "notes", **({ACT: "act"} if may else {})}
        wanted = PageAddress().text("filter", "filter: holder, title, tenant, place")
        table = ListTable(columns, key="name", links=("name",), empty="no reservations, or none match")
        if actions is not None:

            async def release(name: str, _: str) -> None:
                for one in site.facts.reservations:
                    if one.name == f"reservations/{name}":
                        await actions.release(one)

            table.add_acts(release)

    def draw() -> None:
        gpus, now = site.gpus(), datetime.now(UTC)
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        known = (places.get(one.name, one) if rows.waits(one) else one for one in site.facts.reservations)
        shown = [rows.reservation_row(one, by_uuid, now) for one in sorted(known, key=rows.waits_longest)]
        text = str(wanted.value or "")
        own = {name.partition("/")[2] for name, one in places.items() if one.fence}  # as only they are told
        matching = [row for row in shown if rows.matches(row, text)]
        titled = [{**row, "notes": f"{row['title']}: {row['notes']}".strip(": ")} for row in matching]
        table.show([{**row, ACT: ["release"] * (row["name"] in own)} for row in titled])
        tiles.show(**rows.reservation_figures(site.facts.reservations, gpus))

    places: dict[str, allocator_api.Reservation] = {}

    async def queue() -> None:
        """Query places in the queue, whose changes a watch does not report, and what the visitor may release."""
        with suppress(GpuscaleError):  # the header shows the problem
            found = await site.ask(actions, waiting_or_own)
            places.clear()
            places.update({one.name: one for one in found})
            draw()

    live(site.facts, draw)
    ui.timer(REFRESH, queue)
    wanted.on_value_change(draw)


async def waiting_or_own(client: AsyncClient) -> list[allocator_api.Reservation]:
    """What waits in the queue, and what the caller may change."""
    request = allocator_api.ListReservationsRequest(filter="state = WAITING OR fence > 0", page_size=1000)
    answers = pages_async(client.allocator.ListReservations, request)
    return [one async for answer in answers for one in answer.reservations]


MEMBERS = ResourceTable[allocator_api.JobMember](
    member=("member", lambda one: one.member),
    node=("node", lambda one: one.node.removeprefix("nodes/")),
    pid=("process", lambda one: one.pid or humanize.UNKNOWN),
    start=("started", lambda one: humanize.clock(one.start_time)),
    end=("ended", lambda one: humanize.clock(one.end_time)),
    code=("exit code", lambda one: one.exit_code if one.HasField("exit_code") else humanize.UNKNOWN),
    reason=("why", ended_by),
)
_PART = 65_536
LOOK_AGAIN = 5.0
"""Seconds between queries of a reservation."""


def reservation_page(site: DashboardSite, reservation: str) -> None:
    """Build the page of a reservation: why it waits, what it holds, for which score, and uses, and the end of its job's output."""
    name = f"reservations/{reservation}"
    with page(site, f"Reservation {reservation}"):
        head = ui.label(reservation).classes("text-h6")
        why = ui.label().classes("gs-lines")
        tiles = Tiles("state", "holder", "tenant", "GPUs", "used", "time left")
        columns = {name: word for name, word in rows.GPUS.columns.items() if name != "held"}
        columns |= {"score": "score", "why": "chosen for"}
        gpus = ListTable(columns, key="uuid", links=("gpu",), empty="it holds no GPU")
        with ui.column().classes("full-width") as ran:
            heading("Job")
            command = ui.label().classes("gs-lines")
            members = ListTable(MEMBERS.columns, key="member", empty="not started yet")
            whole = ui.link("view or save the full output", f"/{name}/output", new_tab=True)
            wrote = ui.label().classes("gs-log").props("tabindex=0 role=log aria-label=output")
    actions = site.actions()
    for unknown in (whole, ran):
        unknown.set_visibility(False)

    async def look() -> None:
        with frame.reading("the reservation", why):
            one = await site.ask(actions, partial(_asked, name))
            row = rows.reservation_row(one, {gpu.uuid: gpu for gpu in site.gpus()}, datetime.now(UTC))
            head.text = f"{reservation} {one.job.title}".rstrip()
            why.text = "\n".join(filter(None, (str(row["notes"]), advice(one), one.job.queue_order)))
            words = ("state", "holder", "tenant", "used")
            told = {word: str(row[word]) or humanize.UNKNOWN for word in words}
            tiles.show(**told, GPUs=str(row["gpus"]), time_left=str(row["left"]))
            held = {gpu.uuid: {"score": f"{gpu.score.total:.3f}", "why": scored(gpu)} for gpu in one.gpus}
            known = [gpu for gpu in site.gpu_rows() if gpu["uuid"] in held]
            gpus.show([{**gpu, **held[str(gpu["uuid"])]} for gpu in known])
            ran.set_visibility(one.HasField("job"))
            state = humanize.word(one.job, "state")
            command.text = f"{one.job.command}\n{state}; full output: gpuscalectl logs {reservation}"
            members.show(MEMBERS.rows((*one.job.earlier, *one.job.members)))
            ends = [line for member in one.job.members for line in member.last_lines]
            wrote.text = "\n".join(ends)
            wrote.set_visibility(bool(ends))
            whole.set_visibility(actions is not None and actions.at_home and bool(await _kept(one)))

    ui.timer(LOOK_AGAIN, look)


async def _asked(name: str, client: AsyncClient) -> allocator_api.Reservation:
    return (await client.allocator.GetReservation(allocator_api.GetReservationRequest(name=name))).reservation


async def _kept(one: allocator_api.Reservation) -> list[Path]:
    members = sorted({gpu.member for gpu in one.gpus})
    name = one.name.removeprefix("reservations/")
    return await asyncio.to_thread(kept_output, name, members, one.job.attempt)


async def all_output(actions: VisitorActions, reservation: str) -> Iterator[bytes]:
    """The full output of a job, from the files of the visitor, who is the user of this process. Raises GpuscaleError: there is none."""
    one = await actions.ask(partial(_asked, f"reservations/{reservation}"))
    files = await _kept(one) if actions.at_home else []
    if not files:
        raise NotFoundError(
            f"no output is kept on this host; read it from its hosts: gpuscalectl logs {reservation}"
        )

    def parts() -> Iterator[bytes]:
        for file in files:
            with file.open("rb") as opened:
                while part := opened.read(_PART):
                    yield part

    return parts()


DAYS = 7
BOOKINGS = ResourceTable[allocator_api.Booking](
    name=("booking", lambda one: one.name.removeprefix("bookings/")),
    owner=("owner", lambda one: one.owner),
    state=("state", lambda one: humanize.word(one, "state")),
    start=("from", lambda one: humanize.clock(one.start_time)),
    end=("to", lambda one: humanize.clock(one.end_time)),
    gpus=("GPUs", lambda one: len(one.gpus)),
    title=("title", lambda one: one.title),
    note=("note", lambda one: one.note),
)


def bookings_page(site: DashboardSite) -> None:
    """Build the page."""
    with page(site, "Bookings"):
        if secret := site.calendar():
            address = f"{ui.context.client.request.base_url}{CALENDAR[1:]}{secret}.ics"
            with ui.row().classes("items-baseline"):
                ui.label("subscribe in a calendar program (the address is secret):")
                ui.link("calendar", address)
        week = ui.column().classes("full-width gap-0")
        empty = "no bookings: gpuscalectl reserve --at TIME --for TIME"
        table = ListTable(BOOKINGS.columns, key="name", empty=empty)

    def booked() -> list[allocator_api.Booking]:
        return sorted(site.facts.bookings, key=lambda one: one.start_time.ToNanoseconds())

    def show_week(zone: GenericEventArguments) -> None:
        """Build the calendar, with days in the browser's time zone."""
        today = datetime.now(zone_of(f"{zone.args}")).replace(hour=0, minute=0, second=0, microsecond=0)
        with week:
            calendar = ListTable(headings(today), key="node", empty="nothing is booked this week")
            calendar.element.props("wrap-cells").style("white-space: pre-line")
            live(site.facts, lambda: calendar.show(calendar_rows(booked(), today)))

    live(site.facts, lambda: table.show(BOOKINGS.rows(booked())))
    # The browser says it when it can: an answer that is waited for fails where it is slow.
    week.on("vnodeMounted", show_week, js_handler="() => emit(ZONE)")


def zone_of(name: str) -> tzinfo:
    """The browser's time zone; UTC if this host does not know it."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError):
        return UTC


def week_from(today: datetime) -> dict[str, datetime]:
    """Seven days from today, by the id of their column."""
    return {f"day{ahead}": today + timedelta(days=ahead) for ahead in range(DAYS)}


def headings(today: datetime) -> Columns:
    """The columns of the calendar: nodes, and seven days from today."""
    return {"node": "node", **{name: f"{day:%a %d}" for name, day in week_from(today).items()}}


def calendar_rows(bookings: Sequence[allocator_api.Booking], today: datetime) -> list[Row]:
    """A row per node with bookings: hours, GPUs and owner of each, by day."""
    cells: dict[str, dict[str, list[str]]] = {}
    for one in bookings:
        start, end = (to_datetime(time).astimezone(today.tzinfo) for time in (one.start_time, one.end_time))
        counts = Counter(gpu.split("/")[1] for gpu in one.gpus)
        for name, day in week_from(today).items():
            begin, over = max(start, day), min(end, day + timedelta(days=1))
            if begin < over:
                until = "24:00" if over.date() > day.date() else f"{over:%H:%M}"
                for node, count in counts.items():
                    lines = cells.setdefault(node, {}).setdefault(name, [])
                    lines.append(f"{begin:%H:%M}-{until} {count} GPU{'s' * (count > 1)} {one.owner}")
    return [
        {"node": node, **{name: "\n".join(lines.get(name, ())) for name in week_from(today)}}
        for node, lines in sorted(cells.items())
    ]


_LINE = 73
"""Bytes of a line before it is folded: 75 with the space that begins the next one, less one."""
_ESCAPED = str.maketrans({"\\": "\\\\", ";": "\\;", ",": "\\,", "\n": "\\n", "\r": None})
_VOID = allocator_api.Booking.STATE_CANCELLED, allocator_api.Booking.STATE_EXPIRED


def calendar_secret(file: Path) -> str:
    """The secret in the calendar's address, in a file that only this user can read; created if missing. Raises OSError.

    Calendar programs cannot sign in, so anyone with the address can read the feed; it shows only what every visitor of the
    dashboard sees. Subscriptions survive a restart; deleting the file revokes the address.
    """
    with suppress(FileNotFoundError):
        if known := file.read_text().strip():
            return known
    made = secrets.token_urlsafe(24)
    write_private(file, f"{made}\n".encode())
    return made


def ical(bookings: Iterable[allocator_api.Booking]) -> bytes:
    """The bookings as an iCalendar feed (RFC 5545). Cancelled and released bookings appear as CANCELLED, so that calendar programs remove them."""
    lines = [
        "BEGIN:VCALENDAR",
        "VERSION:2.0",
        "PRODID:-//gpuscale//bookings//EN",
        "X-WR-CALNAME:GPU bookings",
    ]
    lines += ["REFRESH-INTERVAL;VALUE=DURATION:PT15M", "X-PUBLISHED-TTL:PT15M"]
    for one in bookings:
        nodes = ", ".join(dict.fromkeys(gpu.split("/")[1] for gpu in one.gpus))
        said = (f"{humanize.word(one, 'state')}, booked by {one.owner}", *one.gpus, one.note)
        about = f"{counted(len(one.gpus), 'GPU')}, {one.owner}" + (f": {one.title}" if one.title else "")
        lines += [
            "BEGIN:VEVENT",
            f"UID:{one.name.removeprefix('bookings/')}-{one.create_time.seconds}@gpuscale",
            f"DTSTAMP:{_moment(one.create_time)}",
            f"DTSTART:{_moment(one.start_time)}",
            f"DTEND:{_moment(one.end_time)}",
            f"SUMMARY:{_escaped(about)}",
            f"LOCATION:{_escaped(nodes)}",
            f"DESCRIPTION:{_escaped(chr(10).join(filter(None, said)))}",
            f"STATUS:{'CANCELLED' if one.state in _VOID else 'CONFIRMED'}",
            "END:VEVENT",
        ]
    return b"".join(_folded(line) for line in [*lines, "END:VCALENDAR"])


def _moment(at: Timestamp) -> str:
    return f"{to_datetime(at):%Y%m%dT%H%M%SZ}"


def _escaped(text: str) -> str:
    return "".join(one for one in text.translate(_ESCAPED) if one >= " ")


def _folded(line: str) -> bytes:
    """A line folded at 75 bytes, between characters."""
    parts, size = [""], 0
    for one in line:
        size += (length := len(one.encode()))
        if size > _LINE:
            parts.append("")
            size = length
        parts[-1] += one
    return "\r\n ".join(parts).encode() + b"\r\n"
