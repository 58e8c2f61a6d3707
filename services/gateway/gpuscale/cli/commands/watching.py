"""What every `get` has in common: `-l`, `--sort-by`, and `--watch`, which reads again and writes what changed.

A Watch stream of the API says when to read again; where there is none, the list is read every few seconds.
"""

import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import click

from gpuscale.cli.console.command import Command, Group, anywhere, typed_anywhere
from gpuscale.cli.console.output import Chosen, Watched
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import note, pause
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.parameters import DURATION, Parsed
from gpuscale.cli.grammar.selecting import parse_selector
from gpuscale.common.errors import GpuscaleError, InvalidArgumentError, UnavailableError

EVERY = 2.0
LEAST = 0.2
"""Seconds between two readings, at least: changes that come together are read together."""

OF_GET = (
    anywhere(
        "--selector",
        "-l",
        type=Parsed("key=value,...", parse_selector),
        help="Only resources with this label or field: state=READY,zone!=a,!cordoned,fence>=3.",
    ),
    anywhere(
        "--sort-by",
        metavar="PATH",
        help="A column or field, such as LEFT or .fence; -LEFT sorts in descending order.",
    ),
    anywhere("--watch", "-w", is_flag=True, help="Keep running, and write each resource that changes."),
    anywhere(
        "--every", type=DURATION, help="How often --watch reads where the API has no stream; 2s by default."
    ),
)


class GetGroup(Group):
    """`get`, whose options may also stand before the noun."""

    options = OF_GET


class GetCommand(Command):
    """A command of `get`: it selects, sorts, and goes on where it is watched."""

    options = OF_GET

    def choose(self, session: Session, context: click.Context) -> Session:
        """The session that writes what the options of `get` choose.

        Raises:
            InvalidArgumentError: the format cannot be written piece by piece.
        """
        typed = typed_anywhere(context)
        watched = Watched(typed.get("every", EVERY)) if typed.get("watch") else None
        if watched and session.output.format is Format.JSON:
            raise InvalidArgumentError(
                "--watch writes one object after the other: use -o jsonl instead of -o json"
            )
        chosen = Chosen(typed.get("selector", ()), typed.get("sort_by", ""), watched)
        return replace(session, output=replace(session.output, chosen=chosen))

    def invoke(self, ctx: click.Context) -> Any:
        """Run it once, or with --watch again and again."""
        first: Any = super().invoke(ctx)
        session: Session = ctx.obj
        watched = session.output.chosen.watched
        if watched is None:
            return first
        away = False  # an outage is reported once, and waited out
        with changes_of(str(ctx.info_name), session) as changed:
            while True:
                sys.stdout.flush()
                if changed is None:
                    pause(watched.every)
                else:
                    changed.wait(watched.every if away else None)
                try:
                    click.Command.invoke(self, ctx)  # with the session that knows what is written
                    away = False
                except UnavailableError as error:
                    if not away:
                        note(f"{error.message}; trying again every {watched.every:g}s")
                    away = True


class Changed:
    """Is set whenever a Watch stream tells of a change."""

    def __init__(self) -> None:
        self._set = threading.Event()

    def wait(self, seconds: float | None) -> None:
        """Return after a change, or after so many seconds where a number is given."""
        time.sleep(LEAST)
        self._set.wait(None if seconds is None else max(0.0, seconds - LEAST))
        self._set.clear()

    def follow(self, method: Any, request: Any) -> None:
        """Follow a stream until the client is closed, over lost connections from where it was left off."""
        from gpuscale.client import watch

        try:
            for message in watch(method, request, resume=True):
                if {field.name for field, _ in message.ListFields()} != {"resume_token"}:  # else a heartbeat
                    self._set.set()
        except GpuscaleError:
            self._set.set()  # the next reading reports what is wrong


@contextmanager
def changes_of(kind: str, session: Session) -> "Generator[Changed | None]":
    """Changes of a kind of resource; None where the server has no stream of them, or it does not begin."""
    from gpuscale.api.allocator import v1 as allocator_api
    from gpuscale.api.autoscaler import v1 as autoscaler_api
    from gpuscale.api.monitor import v1 as monitor_api
    from gpuscale.common.wire import to_duration

    with session.connect() as client:
        nodes = client.fleet.WatchNodes, monitor_api.WatchNodesRequest(min_interval=to_duration(0.5))
        endpoints = client.endpoints.WatchEndpoints, autoscaler_api.WatchEndpointsRequest()
        watchers = client.queue_watchers.WatchQueueWatchers, autoscaler_api.WatchQueueWatchersRequest()
        watches: dict[str, tuple[Any, Any]] = {
            "nodes": nodes,
            "gpus": nodes,
            "health": (client.health.WatchHealth, monitor_api.WatchHealthRequest()),
            "recordings": (client.recordings.WatchRecordings, monitor_api.WatchRecordingsRequest()),
            "reservations": (client.allocator.WatchReservations, allocator_api.WatchReservationsRequest()),
            "cordons": (client.nodes.WatchCordons, allocator_api.WatchCordonsRequest()),
            "quotas": (client.quotas.WatchQuotas, allocator_api.WatchQuotasRequest()),
            "endpoints": endpoints,
            "rules": endpoints,
            "replicas": (client.endpoints.WatchReplicas, autoscaler_api.WatchReplicasRequest()),
            "watchers": watchers,
            "decisions": (client.decisions.WatchDecisions, autoscaler_api.WatchDecisionsRequest()),
            "backtests": (client.backtests.WatchBacktests, autoscaler_api.WatchBacktestsRequest()),
            "adapters": (client.adapters.WatchAdapters, autoscaler_api.WatchAdaptersRequest()),
        }
        try:
            method, request = watches[kind]
            stream = method(request)
            next(iter(stream), None)
            stream.cancel()
        except (KeyError, GpuscaleError):
            yield None
            return
        changed = Changed()
        threading.Thread(target=changed.follow, args=(method, request), name="watch", daemon=True).start()
        yield changed
