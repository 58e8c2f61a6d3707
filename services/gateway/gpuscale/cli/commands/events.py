"""`gpuscalectl events`: decisions, reservations, replicas and health events as one list, oldest first.

Times are of the servers' wall clocks.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import click

from gpuscale.cli.commands.get import OF_GPU
from gpuscale.cli.console import cells, lookup
from gpuscale.cli.console.command import NOBODY, Session, command
from gpuscale.cli.console.lookup import Streams
from gpuscale.cli.console.output import ABSENT, Chosen
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.nouns import canonical
from gpuscale.cli.grammar.parameters import AROUND, When, option, repeated, takes
from gpuscale.common import wire
from gpuscale.common.errors import PermissionDeniedError, UnavailableError, UnimplementedError
from gpuscale.common.names import node_of
from gpuscale.common.sizes import counted

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

    from gpuscale.api.allocator.v1 import Reservation
    from gpuscale.client import Client

EVERY = 2.0
"""Seconds between polls of --watch."""
_COLUMNS = ("time", "kind", "name", "what")


class EventLine(NamedTuple):
    """An event of a resource; `title` is that of a reservation's job."""

    time: datetime
    kind: str
    name: str
    what: str
    title: str = ""

    def concerns(self, about: str) -> bool:
        """Whether it is about this resource, by full or short name or title, or about a child of it."""
        ids = "/".join(self.name.split("/")[1::2])
        if self.kind == "reservation" and about in {self.title, f"jobs/{self.title}", f"jobs/{ids}"}:
            return True
        return any(f"{one}/".startswith(f"{about}/") for one in (self.name, ids))


@command("events --since 1h --about endpoints/jobs --watch")
@takes("when", When)
@repeated(
    "--kind", type=click.Choice(["decision", "reservation", "replica", "health"]), help="Only this kind."
)
@option("--about", default="", metavar="NAME", help="Only this resource, by name or title, and its children.")
@OF_GPU
@option("--watch", "-w", is_flag=True, help="Keep running, and write new events.")
def events(session: Session, when: When, kind: tuple[str, ...], about: str, gpu: str, watch: bool) -> None:
    """List events of endpoints, replicas, reservations, nodes and GPUs, oldest first.

    By default of the last hour; --at shows 5 minutes before and after that time. With --gpu there are no decisions.
    """
    output = session.output
    watched = output.watch(EVERY) if watch else None
    if watched:
        output = replace(output, chosen=Chosen(watched=watched))
    time = when.range(timedelta(hours=1), AROUND)
    kinds = [one for one in kind or _READERS if not gpu or one != "decision"]
    seen: set[EventLine] = set()
    down: set[str] = set()
    first, short = True, output.format is Format.TABLE
    with session.connect() as client:
        if watched:
            watched.streams = Streams(client)
        asked = lookup.About(lookup.gpu_uuid(client, gpu) if gpu else "", time, output.chosen)
        while True:
            found = [
                one
                for one in in_order(found_events(client, kinds, asked, down, first=first))
                if time.meets(one.time, one.time) and (not about or one.concerns(canonical(about)))
            ]
            fresh = [one for one in found if one not in seen]
            seen.update(fresh)
            if fresh or not watch:
                shown = (one._replace(name=cells.short(one.name)) if short else one for one in fresh)
                records: list[dict[str, object]] = [dict(zip(_COLUMNS, one, strict=False)) for one in shown]
                output.write_records("events", records, _COLUMNS, ["kind"])
            if not (watched and watched.streams):
                break
            sys.stdout.flush()
            watched.streams.pause(EVERY, away=bool(down))
            first = False
    output.note_none(found, f"none about {about}" if about else "none")


def in_order(found: Iterable[EventLine]) -> list[EventLine]:
    """Each event once, by time; those of one resource at the same moment stay in their turn."""
    return sorted(dict.fromkeys(found), key=lambda one: one[:3])


def found_events(
    client: "Client", kinds: Iterable[str], about: "lookup.About", down: set[str], *, first: bool
) -> Iterator[EventLine]:
    """All events of these kinds. A service that is down is reported once.

    If no server answers, the first call fails; later ones assume a restart.
    """
    for kind in dict.fromkeys(kinds):
        try:
            yield from list(_READERS[kind](client, about))
            down.discard(kind)
        except (UnavailableError, UnimplementedError, PermissionDeniedError) as error:
            if error.reason in NOBODY and first:
                raise
            if kind not in down:
                note(f"{kind} events are unknown: {error.message}")
            down.add(kind)


def _event(time: "Timestamp", kind: str, name: str, *what: str) -> EventLine:
    return EventLine(
        wire.to_datetime(time), kind, name, ": ".join(one for one in what if one and one != ABSENT)
    )


def _decisions(client: "Client", about: "lookup.About") -> Iterator[EventLine]:
    for one in lookup.decisions(client, limit=None, about=about):
        counts = f"{one.before} -> {one.wanted} wanted, {one.granted} granted"
        yield _event(
            one.create_time, "decision", one.name, counts, cells.word(one, "limited_by"), one.summary
        )


def _reservations(client: "Client", about: "lookup.About") -> Iterator[EventLine]:
    for one in lookup.reservations(client, about=about):
        for time, *what in _of_reservation(one):
            yield _event(time, "reservation", one.name, *what)._replace(title=one.job.title)


def _of_reservation(one: "Reservation") -> "Iterator[tuple[Timestamp, str, str]]":
    """When something happened to a reservation, what, and where or why."""
    earlier = one.job.earlier
    number = len(one.gpus) or one.asked_gpu_count
    count = counted(number, "GPU") if number else "GPUs"
    nodes = ", ".join(dict.fromkeys([cells.short(ran.node) for ran in earlier[:1]] or map(node_of, one.gpus)))
    kept = one.job.attempt <= len(earlier) + 1  # the first attempt
    gpus = f"{count} of {nodes}" if nodes and kept else ""
    if (since := cells.granted(one)) != "create_time" or not nodes:
        yield one.create_time, f"asked for by {one.holder}", ""
    if since != "create_time" or nodes:
        yield getattr(one, since), f"granted to {one.holder}", gpus
    for number, ran in enumerate([*earlier, *one.job.members]):
        node = cells.short(ran.node)
        if number and earlier and ran.HasField("start_time"):
            yield ran.start_time, f"granted again to {one.holder}", f"{count} of {node}"
        if ran.HasField("signal_time"):
            yield ran.signal_time, "its job was asked to save its work", node
        if number < len(earlier):
            yield ran.end_time, f"its job left {node}", ran.end_reason
    if one.HasField("end_time"):
        yield one.end_time, cells.word(one, "state").lower(), _how_ended(one)


def _how_ended(one: "Reservation") -> str:
    """Why a reservation ended, and how its job did, as `get job` shows it."""
    from gpuscale.client.jobs import why_ended
    from gpuscale.client.states import often

    if not one.HasField("job"):
        return one.end_reason
    code = f"exit code {one.job.exit_code}" if one.job.HasField("exit_code") else ""
    code += f" ({meant})" if (meant := often(one.job.exit_code)) else ""
    why = why_ended(one)
    of_members = (ran.end_reason for ran in one.job.members if not why or why not in ran.end_reason)
    told = (f"its job {cells.word(one.job, 'state')}", code, why, *dict.fromkeys(of_members))
    return ": ".join(filter(None, told))


def _replicas(client: "Client", about: "lookup.About") -> Iterator[EventLine]:
    for one in lookup.replicas(client, about=about):
        yield _event(one.create_time, "replica", one.name, "decided on")
        if one.HasField("end_time"):
            code = f"exit code {one.exit_code}" if one.HasField("exit_code") else ""
            yield _event(
                one.end_time, "replica", one.name, cells.word(one, "state").lower(), code, one.reason
            )


def _health(client: "Client", about: "lookup.About") -> Iterator[EventLine]:
    for one in lookup.health(client, about=about):
        name = one.gpu or f"nodes/{one.node.rpartition('/')[2]}"  # fleets of version 0.x send the bare id
        yield _event(one.start_time, "health", name, cells.word(one, "severity").lower(), one.message)
        if one.HasField("resolved_time"):
            yield _event(one.resolved_time, "health", name, "over", one.message)


_READERS: "Mapping[str, Callable[[Client, lookup.About], Iterator[EventLine]]]" = {
    "decision": _decisions,
    "reservation": _reservations,
    "replica": _replicas,
    "health": _health,
}
