"""`gpuscalectl get all`, `version` and `api-resources`: several kinds at once, versions, and the list of kinds."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib import metadata, resources
from typing import TYPE_CHECKING, Any

import click

from gpuscale.cli.commands.watching import GetCommand, GetGroup
from gpuscale.cli.console import lookup
from gpuscale.cli.console.command import NOBODY, CommandEntry, Session, command, entries_above
from gpuscale.cli.console.errors import ExitCode, exit_code, leave, report, unknown
from gpuscale.cli.console.output import Output, heading_of
from gpuscale.cli.console.terminal import note, write_lines
from gpuscale.cli.grammar.jsonpath import Format, is_mapping
from gpuscale.cli.grammar.nouns import NOUNS, with_noun
from gpuscale.cli.grammar.parameters import option
from gpuscale.cli.grammar.selecting import near
from gpuscale.cli.views import contract_docs
from gpuscale.common.errors import UNANSWERED, GpuscaleError, InvalidArgumentError, PermissionDeniedError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpuscale.cli.console.cells import View

NOT_OF_ALL = frozenset({"all", "audit", "certs", "decisions", "metrics", "rules"})
"""Kinds that `get all` leaves out: local files, parts of endpoints, and what only admins see."""


@dataclass(frozen=True)
class _Together(Output):
    """Writes lists of several kinds as one result: titled tables, or one object with all lists."""

    parts: dict[str, object] = field(default_factory=dict[str, object])

    def write_list(self, items: "Sequence[Message]", view: "View[Any]") -> None:
        if not self.human:
            super().write_list(items, view)
            return
        kept, _ = self.chosen.pick(items, view)
        if kept:
            title = f"{heading_of(view.key)}: {len(kept)}"
            write_lines([*([""] if self.parts else []), title, *self.table(kept, view)])
            self.parts[view.key] = None

    def note_none(self, items: Sequence[object], text: str = "none") -> None:
        """Write nothing: no note for one empty list of several."""

    def write_data(self, data: object) -> None:
        """Collect data of formats that are written as a whole; write others at once."""
        if self.format in {Format.JSON, Format.YAML, Format.JSONPATH} and is_mapping(data):
            self.parts.update(data)
        else:
            super().write_data(data)


@command("get nodes,gpus", kind=GetCommand)
@click.argument("kinds", default="", metavar="[KIND,...]")
def get_all(session: Session, kinds: str) -> None:
    """List everything, or several kinds: `get all`, `get nodes,gpus`."""
    context = click.get_current_context()
    group = GetGroup("get", entries_above(context))
    if session.output.chosen.watched:
        raise InvalidArgumentError("--watch follows one kind at a time")
    wanted = [with_noun([one], group.entries)[0] for one in kinds.split(",") if one]
    if odd := [one for one in wanted if one not in group.entries]:
        raise InvalidArgumentError(f"unknown kind {odd[0]!r}{near(odd[0], group.entries)}")
    output = session.output
    if output.format is Format.CSV and len(wanted) != 1:
        raise InvalidArgumentError("-o csv is of one kind: use -o jsonl for several")
    together = _Together(output.format, output.headers, output.form, output.chosen)
    failed, answered, hidden = ExitCode.OK, False, list[PermissionDeniedError]()
    with session.connect() as client:
        context.obj = replace(session, kept=client, output=together)
        for one in wanted or [noun for noun in group.entries if noun not in NOT_OF_ALL]:
            found = group.get_command(context, one)
            try:
                context.invoke(found) if found else None
                answered = True
            except PermissionDeniedError as error:  # all is what one may see
                if wanted or error.reason != "ROLE_TOO_LOW":
                    raise
                hidden.append(error)
            except UNANSWERED as error:  # show the others even if one service is down or hangs
                failed = exit_code(error)
                if error.reason in NOBODY or (failed is ExitCode.OTHER and not answered):
                    raise
                unknown(one, error)
    if hidden and not (answered or failed):
        raise hidden[0]
    if not output.human and together.parts:
        output.write_data(together.parts)
    elif output.human and not (together.parts or failed):
        note("none")
    leave(ExitCode.UNAVAILABLE if failed is ExitCode.TIMEOUT else failed)


def programs(session: Session) -> Iterator[tuple[str, str, str]]:
    """Name, program and version (empty before 0.1) of each program that answers; the error of one that does not comes last."""
    from gpuscale.common.rpc.status import LEADER_KEY, VERSION_KEY, VIA_KEY

    about = lookup.About(silent=session.silent)

    def of(part: str) -> Iterator[tuple[str, str, str]]:
        if part == "agents":
            yield from ((one.name, "agent", one.agent_version) for one in lookup.nodes(client, (), about))
        elif part == "adapters":
            yield from ((one.name, "adapter", one.version) for one in lookup.adapters(client, (), about))
        elif part == "gateways":  # that of a standby host tells of itself
            for one in () if session.apart else session.each():
                found = ""
                with one.connect(quickly=2.0) as of_gateway:
                    for service in ("fleet", "allocator", "autoscaler"):  # any that answers tells it
                        with suppress(GpuscaleError):
                            found = found or lookup.told(of_gateway, service).get(VIA_KEY, "")
                yield str(one.address or client.address), "gateway", found
        else:
            told = lookup.told(client, part, session.silent)
            leads = filter(None, ("process that leads", told.get(LEADER_KEY, "")))
            yield part, ", ".join(leads), told.get(VERSION_KEY, "")

    with session.connect() as client:
        failed: list[GpuscaleError] = []
        for part in ("fleet", "allocator", "autoscaler", "gateways", "agents", "adapters"):
            try:
                yield from of(part)
            except UNANSWERED as error:
                if error.reason in NOBODY:
                    raise
                failed.append(error)
        if failed:
            raise failed[0]


@command("version")
@option("--client", is_flag=True, help="Only of this program, without a call.")
def version(session: Session, client: bool) -> None:
    """Show the versions of this program, its API, and each server, agent and adapter that answers."""
    contract = sha256(resources.files("gpuscale.api").joinpath(contract_docs.FILE).read_bytes()).hexdigest()
    rows = [("gpuscalectl", "client", metadata.version("gpuscale")), ("contract", "v1", contract[:12])]
    failed: GpuscaleError | None = None
    try:
        rows += [] if client else programs(session)
    except GpuscaleError as error:
        failed = error
    records = [
        {"name": name, "program": program, "version": found}
        for name, program, found in rows
        if found or program != "gateway"  # which `up` has none of
    ]
    session.output.write_records("versions", records)
    leave(report(failed) if failed else ExitCode.OK)


@command("api-resources")
def api_resources(session: Session) -> None:
    """List the kinds of resources, their short names and commands; `explain KIND` explains their fields."""
    groups = {
        verb: one.place
        for verb, one in entries_above(click.get_current_context()).items()
        if isinstance(one, CommandEntry) and not isinstance(one.place, str)
    }
    records = [
        {
            "name": noun.plural,
            "short": [noun.short, *filter(None, [noun.other])],
            "message": noun.message,
            "verbs": ["describe", *(verb for verb, of in groups.items() if {*noun} & {*of})],
        }
        for noun in NOUNS
    ]
    columns = ("name", "verbs", "short", "message")
    session.output.write_records("resources", records, columns, spare=["message"])
