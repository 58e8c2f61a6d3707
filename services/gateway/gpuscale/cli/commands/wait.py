"""`gpuscalectl wait`: until things are as they should be, with news of why they are not yet."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuscale.cli.console.output import Format, to_dict, write_lines
from gpuscale.cli.console.progress import Progress
from gpuscale.cli.console.session import session_of
from gpuscale.cli.grammar.field_names import check, near
from gpuscale.cli.grammar.options import duration
from gpuscale.cli.grammar.selecting import Condition, amount, parse_selector
from gpuscale.common.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpuscale.cli.console.cells import Column
    from gpuscale.cli.views.kinds import Kind
    from gpuscale.client import Client

READY, GONE = "ready", "deleted"
PERIOD = 0.5
"""Seconds between two looks."""


def wait(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(metavar="KIND", show_default=False)],
    name: Annotated[list[str], typer.Argument(metavar="NAME...", show_default=False)],
    until: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="CONDITION",
            help="ready, deleted, or a FIELD or column and =, !=, >=, <=, > or < a VALUE: 'ready>=3'.",
        ),
    ] = READY,
    timeout: Annotated[
        float, typer.Option(parser=duration, metavar="DURATION", help="How long to wait; then exit code 6.")
    ] = 300.0,
) -> None:
    """Wait until things are as they should be: endpoints, replicas, nodes, GPUs, watchers, reservations, adapters."""
    from gpuscale.cli.views.kinds import KINDS

    if kind not in KINDS:
        raise InvalidArgumentError(f"{kind!r} cannot be waited for{near(kind, KINDS)}")
    awaited = _Awaited(KINDS[kind], until)
    session = session_of(context)
    progress = Progress()
    with session.connect() as client:
        for one in name:
            _wait(client, awaited, one, timeout, progress)
    output = session.output
    if output.human:
        write_lines([f"{kind}/{one} {until}" for one in name])
    elif output.format is Format.NAME or until == GONE:
        write_lines(name) if output.format is Format.NAME else output.write_data({"deleted": name})
    else:
        output.write_data({kind: awaited.found})


class _Awaited:
    """The condition that is waited for, and the resources that have met it."""

    def __init__(self, kind: "Kind", until: str) -> None:
        self.kind = kind
        self.until = until
        self.found: list[dict[str, object]] = []
        text = kind.ready if until == READY else until
        try:
            self._conditions: tuple[Condition, ...] = (
                () if until == GONE or not text else parse_selector(text)
            )
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--for") from error

    def standing(self, client: "Client", name: str) -> str:
        """Why it has to be waited; empty where that is over.

        Raises:
            NotFoundError: there is nothing of that name, and it is not its end that is waited for.
        """
        from gpuscale.cli.views.kinds import standing

        try:
            [item] = self.kind.read(client, [name])
        except NotFoundError:
            if self.until == GONE:
                return ""
            raise
        if not self._met(item):
            return standing(item)
        self.found.append(to_dict(item))
        return ""

    def _met(self, item: "Message") -> bool:
        from gpuscale.api.autoscaler.v1 import Endpoint
        from gpuscale.cli.views.kinds import is_ready

        if self.until == GONE:
            return False
        if self.until == READY and isinstance(item, Endpoint):
            return is_ready(item)
        data = to_dict(item)
        return all(one.holds(self._values(one, item, data)) for one in self._conditions)

    def _values(self, condition: Condition, item: "Message", data: object) -> list[str]:
        """What an item has where a condition looks: in a field, or else in a column of its table.

        Raises:
            InvalidArgumentError: it has neither, or nothing that could be compared.
        """
        column = None
        try:
            check(condition.path, item.DESCRIPTOR, "--for", (READY, GONE))
        except InvalidArgumentError:
            column = self.kind.column(condition.key)
            if column is None:
                raise
        values = condition.values(data) if column is None else _cell(column, item)
        odd = next((one for one in values if condition.compares and amount(one) is None), None)
        if odd is not None:
            raise InvalidArgumentError(f"--for: {condition.key} is {odd!r}, no number, size or duration")
        return values


def _cell(column: "Column[Any]", item: "Message") -> list[str]:
    from gpuscale.cli.console.cells import ABSENT

    text = column.cell(item)
    return [] if text == ABSENT else [text]


def _wait(client: "Client", awaited: _Awaited, name: str, timeout: float, progress: Progress) -> None:
    try:
        reason = awaited.standing(client, name)
        while reason:
            left = timeout - progress.elapsed
            if left <= 0:
                message = f"{name} is not {awaited.until} after {timeout:g} s: {reason}"
                raise DeadlineExceededError(message, reason="NOT_READY", metadata={"name": name})
            progress.tell(f"{name} for {awaited.until}: {reason}")
            pause(min(PERIOD, left))
            try:
                reason = awaited.standing(client, name)
            except UnavailableError as error:
                reason = error.message  # a service is started anew, and waited for like everything else
    finally:
        progress.end()


def pause(seconds: float) -> None:
    """Let some time pass until the next look."""
    time.sleep(seconds)
