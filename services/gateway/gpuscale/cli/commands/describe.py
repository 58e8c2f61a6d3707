"""`gpuscalectl describe`: all fields of a resource, and its events of the last hour."""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import click
from google.protobuf.message import Message

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.cli.commands import events, explain
from gpuscale.cli.commands.get import holders_known
from gpuscale.cli.commands.watching import GetGroup
from gpuscale.cli.console import lookup
from gpuscale.cli.console.command import Command, Session, command, entries_above, names_of_typed
from gpuscale.cli.console.terminal import write_lines
from gpuscale.cli.grammar.nouns import with_noun
from gpuscale.cli.grammar.parameters import format_duration, format_size, local_text
from gpuscale.cli.grammar.selecting import near
from gpuscale.cli.views import monitor
from gpuscale.common import wire
from gpuscale.common.errors import InvalidArgumentError

SINCE = timedelta(hours=1)
EXPLAINED: Mapping[str, Command] = {
    "endpoints": explain.explain_endpoint,
    "reservations": explain.explain_reservation,
    "decisions": explain.explain_decision,
    "policies": explain.explain_policy,
}
_EVENTS: Mapping[str, Sequence[str]] = {
    "nodes": ["health"],
    "gpus": ["health", "reservation", "replica"],
    "reservations": ["reservation"],
    "jobs": ["reservation"],
    "endpoints": ["decision", "replica"],
    "replicas": ["replica"],
}
"""The kinds of events of each kind of resource."""
_MILLION = 1e6
_MANY = 12
"""Most plain fields of a message to write on one line."""
_FIGURES = re.compile(
    "index|min|max|mean|(sample|rejected)_count|total|weight|(min|desired|ready)_replicas|priority"
)
"""Fields that tell something where they are 0, which elsewhere often means that they were not set."""


@command("describe node host-1")
@click.argument(
    "words",
    nargs=-1,
    required=True,
    metavar="KIND NAME...",
    shell_complete=names_of_typed("words", lookup.READERS),
)
def describe(session: Session, words: tuple[str, ...]) -> None:
    """Show all fields of resources, explain their state, and list their events of the last hour. Takes KIND/NAME too."""
    context = click.get_current_context()
    kinds = entries_above(context, "get")
    noun, *names = with_noun(words, kinds)
    if noun not in lookup.READERS:
        raise InvalidArgumentError(f"unknown kind {noun!r}{near(noun, lookup.READERS)}")
    with session.connect() as client:
        context.obj = session
        if not session.output.human:
            shown = GetGroup("get", kinds).get_command(context, noun)
            context.invoke(shown, name=tuple(names)) if shown else None
            return
        for index, item in enumerate(lookup.READERS[noun](client, names)):
            write_lines([""] * bool(index))
            if noun in EXPLAINED:
                context.invoke(EXPLAINED[noun], name=item.name)
                write_lines([""])
            gpus = list(item.snapshot.gpus) if isinstance(item, monitor_api.Node) else []
            if isinstance(item, monitor_api.Node):
                del item.snapshot.gpus[:]
            write_lines([] if noun == "decisions" else list(described(item)))
            if gpus:
                write_lines(["", *session.output.table(gpus, monitor.gpus(holders_known(client)))])
            uuid = item.uuid if isinstance(item, types_api.Gpu) else ""
            about = lookup.About(uuid, wire.TimeRange(datetime.now(UTC) - SINCE))
            found = events.found_events(client, _EVENTS.get(noun, ()), about, set(), first=False)
            happened = [
                f"  {local_text(one.time)}  {one.name}: {one.what}"
                for one in events.in_order(found)
                if uuid or one.concerns(str(getattr(item, "name", "")))
            ]
            write_lines(["", "events of the last hour:", *happened] if happened else [])


def described(message: Message, indent: str = "") -> Iterator[str]:
    """The fields that are set, and figures of 0, by JSON name, with sizes, durations and times in readable form."""
    for field, value in _known(message):
        label, of = f"{indent}{field.json_name}:", field.message_type
        if of is not None and of.GetOptions().map_entry:
            yield f"{label} {', '.join(f'{key}={value[key]}' for key in sorted(value))}"
        elif of is None or of.full_name.startswith("google.protobuf."):
            shown = [_value(field, one) for one in (value if field.is_repeated else [value])]
            yield f"{label} {', '.join(shown)}"
        elif len(fields := value.ListFields() if not field.is_repeated else []) > _MANY and all(
            one.message_type is None or one.message_type.full_name.startswith("google.protobuf.")
            for one, _ in fields
        ):
            yield f"{label} " + ", ".join(line.replace(": ", "=", 1) for line in described(value))
        else:
            yield label
            for one in value if field.is_repeated else [value]:
                first = f"{indent}- " if field.is_repeated else ""
                for line in described(one, f"{indent}  "):
                    yield first + line[len(first) :] if first else line
                    first = ""


def _known(message: Message) -> Iterator[tuple[Any, Any]]:
    listed = {field.number for field, _ in message.ListFields()}
    for field in message.DESCRIPTOR.fields:
        figure = _FIGURES.fullmatch(field.name) and not (field.has_presence or field.is_repeated)
        if field.number in listed or figure:
            yield field, getattr(message, field.name)


def _value(field: Any, value: Any) -> str:
    kind = field.message_type.name if field.message_type is not None else ""
    if kind == "Duration":
        return format_duration(wire.seconds(value))
    if kind == "Timestamp":
        return local_text(wire.to_datetime(value))
    if field.enum_type is not None:
        prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        known = field.enum_type.values_by_number.get(value)
        return known.name.removeprefix(prefix) if known else str(value)
    if field.name.endswith(("bytes", "bytes_per_second")):
        return format_size(round(value)) + ("/s" if field.name.endswith("second") else "")
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < _MILLION else f"{value:.0f}"
    return str(value).lower() if isinstance(value, bool) else str(value)
