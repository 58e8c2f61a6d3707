"""`gpuscalectl events`: what happened, over all services, oldest first, and what happens next."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.console.choosing import Chosen, Watched
from gpuscale.cli.console.output import Format
from gpuscale.cli.console.session import NOBODY, note, session_of
from gpuscale.cli.grammar.options import duration
from gpuscale.common.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    UnavailableError,
    UnimplementedError,
)

if TYPE_CHECKING:
    from gpuscale.cli.views.happening import Event
    from gpuscale.client import Client

EVERY = 2.0
"""Seconds between two looks of --watch."""
_BEGUN = "begun"
"""Stands among what is away once there was an answer."""
_COLUMNS = (("TIME", "time"), ("KIND", "kind"), ("NAME", "name"), ("WHAT", "what"))


class Kind(StrEnum):
    """What something happened to."""

    DECISION = "decision"
    RESERVATION = "reservation"
    REPLICA = "replica"
    HEALTH = "health"


def events(
    context: typer.Context,
    since: Annotated[float, typer.Option(parser=duration, metavar="DURATION", help="How far back.")] = 3600.0,
    kind: Annotated[list[Kind] | None, typer.Option(help="Only this kind; may be repeated.")] = None,
    about: Annotated[
        str, typer.Option(metavar="NAME", help="Only what happened to this, and to what belongs to it.")
    ] = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on with what happens next; Ctrl-C ends it.")
    ] = False,
) -> None:
    """What happened to endpoints, replicas, reservations, nodes and GPUs, oldest first."""
    from gpuscale.cli.views.happening import merged

    session = session_of(context)
    output = session.output
    if watch:
        if output.format is Format.JSON:
            raise InvalidArgumentError("--watch writes one object after the other: use -o jsonl, not -o json")
        output = replace(output, chosen=Chosen(watched=Watched(EVERY)))
    begin = datetime.now(UTC) - timedelta(seconds=since)
    seen: set[Event] = set()
    away: set[str] = set()
    with session.connect() as client:
        while True:
            found = merged(_found(client, kind or list(Kind), begin, away), begin, about)
            fresh = [one for one in found if one not in seen]
            seen.update(fresh)
            if fresh or not watch:
                output.write_records("events", [one.record() for one in fresh], _COLUMNS)
            if not watch:
                break
            sys.stdout.flush()
            pause(EVERY)
            away.add(_BEGUN)
    output.note_none(found)


def pause(seconds: float) -> None:
    """Wait until it is time to look again."""
    time.sleep(seconds)


def _found(client: "Client", kinds: Iterable[Kind], since: datetime, away: set[str]) -> "Iterator[Event]":
    """All events of these kinds; a service that is not there is said, once, and does not hide the others.

    Nobody answering at all is an error at first; later it is what a restart looks like. `away` is what was not there.
    """
    readers = _readers(client, since)
    for kind in dict.fromkeys(kinds):
        try:
            yield from list(readers[kind]())
            away.discard(kind)
        except (UnavailableError, UnimplementedError, PermissionDeniedError) as error:
            if error.reason in NOBODY and _BEGUN not in away:
                raise  # nobody answers at all
            if kind not in away:
                note(f"{kind} events are unknown: {error.message}")
            away.add(kind)


def _readers(client: "Client", since: datetime) -> "dict[Kind, Callable[[], Iterator[Event]]]":
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.api.monitor import v1 as monitor_api
    from gpuscale.cli.console import resources
    from gpuscale.cli.views import happening
    from gpuscale.client import pages
    from gpuscale.common.wire import to_datetime

    def decisions() -> "Iterator[Event]":
        found = pages(client.decisions.ListDecisions, api.ListDecisionsRequest(page_size=1000))
        newest_first = (one for page in found for one in page.decisions)
        return happening.of_decisions(
            takewhile(lambda one: to_datetime(one.last_time) >= since, newest_first)
        )

    def health() -> "Iterator[Event]":
        request = monitor_api.ListHealthEventsRequest(show_resolved=True, page_size=1000)
        listed = pages(client.health.ListHealthEvents, request)
        return happening.of_health(event for page in listed for event in page.health_events)

    return {
        Kind.DECISION: decisions,
        Kind.RESERVATION: lambda: happening.of_reservations(resources.reservations(client, ended=True)),
        Kind.REPLICA: lambda: happening.of_replicas(resources.replicas(client, ended=True)),
        Kind.HEALTH: health,
    }
