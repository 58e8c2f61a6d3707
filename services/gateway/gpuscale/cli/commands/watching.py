"""Options of every `get`: `-l`, `--filter`, `--order-by`, `--sort-by`, and `--watch`, which writes changed resources.

Changes come from the API's watches; lists without one are read every few seconds.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import click

from gpuscale.cli.console.command import Command, Group, Session, anywhere, typed_anywhere
from gpuscale.cli.console.output import Chosen
from gpuscale.cli.console.terminal import TERMINAL, note
from gpuscale.cli.grammar.parameters import DURATION, Parsed
from gpuscale.cli.grammar.selecting import parse_selector
from gpuscale.common.errors import InvalidArgumentError, UnavailableError

EVERY, LEAST_EVERY = 2.0, 0.2
"""Seconds between two looks at a list that the API does not stream: usually, and at least."""

OF_GET = (
    anywhere(
        "--selector",
        "-l",
        "conditions",
        type=Parsed("key=value,...", parse_selector),
        help="Only resources with this label or field: state=READY,zone!=a,!cordoned,fence>=3.",
    ),
    anywhere(
        "--filter",
        metavar="FILTER",
        help="The same in the API's filter syntax: 'state = ACTIVE AND create_time > 2026-03-01T00:00:00Z'.",
    ),
    anywhere("--order-by", metavar="FIELD [desc],...", help="Fields for the server to sort by."),
    anywhere(
        "--sort-by",
        metavar="PATH",
        help="A column or field, such as LEFT or .fence; -LEFT sorts in descending order.",
    ),
    anywhere("--watch", "-w", is_flag=True, help="Keep running, and write each resource that changes."),
    anywhere(
        "--every",
        type=DURATION,
        help="How often --watch reads lists without a watch in the API; 2s by default.",
    ),
)


class GetGroup(Group):
    """`get`, whose options may also precede the noun; `get nodes,gpus` shows several kinds."""

    options = OF_GET
    of_other_tools: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("pod", "pods", "po"), "get replicas (or get jobs)"),
        **dict.fromkeys(("deployment", "deployments", "deploy", "services", "svc"), "get endpoints"),
        **dict.fromkeys(("namespaces", "namespace", "ns", "tenants"), "get quotas"),
        **dict.fromkeys(("events", "event", "ev"), "events"),
        **dict.fromkeys(("users", "holders"), "get reservations"),
        **dict.fromkeys(("contexts", "context"), "config get-contexts"),
        "queue": "get jobs",
    }

    def normal(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """The words after `get`, with `all` before several kinds."""
        found = super().normal(ctx, args)
        return ["all", *found] if found and "," in found[0] else found


class GetCommand(Command):
    """A command of `get`: selects, sorts, and with --watch keeps running."""

    options = OF_GET

    def choose(self, session: Session, context: click.Context) -> Session:
        """The session with the selection of the options of `get`.

        Raises InvalidArgumentError: the format cannot be streamed, or names are combined with a selector.
        """
        typed = typed_anywhere(context)
        watched = (
            session.output.watch(max(LEAST_EVERY, typed.get("every", EVERY))) if typed.get("watch") else None
        )
        choices = {key: typed[key] for key in ("conditions", "filter", "order_by") if typed.get(key)}
        if choices and context.params.get("name"):
            raise InvalidArgumentError("either name resources, or select and order them")
        chosen = Chosen(**choices, sort_by=typed.get("sort_by", ""), watched=watched)
        return replace(session, output=replace(session.output, chosen=chosen))

    def invoke(self, ctx: click.Context) -> Any:
        """Run it once, or repeatedly with --watch."""
        ctx.obj = session = self.begin(ctx)
        watched = session.output.chosen.watched
        if watched is None:
            return click.Command.invoke(self, ctx)
        from gpuscale.cli.console.lookup import Streams

        with session.connect() as client:
            ctx.obj, streams = replace(session, kept=client), Streams(client)
            watched.streams, streams.polled = streams, bool(ctx.params.get("name"))  # which are read by name
            click.Command.invoke(self, ctx)
            away = False  # report an outage once, and wait it out
            while True:
                sys.stdout.flush()
                streams.pause(watched.every, away=away)
                session.silent.clear()
                TERMINAL.noted.clear()
                try:
                    click.Command.invoke(self, ctx)  # with the session that knows what was written
                    away = False
                except UnavailableError as error:
                    if not away:
                        note(f"{error.message}; trying again every {watched.every:g}s")
                    away = True
