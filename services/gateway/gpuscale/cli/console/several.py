"""Doing the same to several things: all are found first, and where one is not, nothing is done to any.

What then fails for one holds up no other, and the first failure is the exit code.

One name gives the object itself as data, several give a list of those that were done.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import typer

from gpuscale.cli.console.faults import report
from gpuscale.cli.console.output import Format, write_lines
from gpuscale.cli.console.session import NOBODY, Session, note
from gpuscale.cli.grammar.exit_codes import ExitCode
from gpuscale.common.errors import GpuscaleError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpuscale.cli.console.cells import View
    from gpuscale.client import Client

    M = TypeVar("M", bound=Message)

T = TypeVar("T")
R = TypeVar("R")


class Done(NamedTuple):
    """What was done to one thing.

    Attributes:
        name: of the thing.
        line: what a person reads.
        data: what a program reads.
    """

    name: str
    line: str
    data: Mapping[str, object]


def named(name: str, what: str) -> Done:
    """What was done to a thing of which nothing is left to show but its name."""
    return Done(name, f"{name} {what}", {"name": name})


Check = Callable[["Client", str], object]
"""Raises what stands against doing something to one thing, such as that there is none of that name."""


def say_each(
    session: Session,
    key: str,
    names: Sequence[str],
    act: "Callable[[Client, str], Done]",
    check: "Check | None" = None,
) -> None:
    """Do something to each, and say so; lists of data stand under `key`.

    Raises:
        GpuscaleError, typer.Exit: as of `_each`.
    """
    output = session.output

    def write(done: list[Done]) -> None:
        if output.human:
            write_lines([one.line for one in done])
        elif output.format is Format.NAME:
            write_lines([one.name for one in done])
        else:
            output.write_data(done[0].data if len(names) == 1 else {key: [one.data for one in done]})

    _each(session, names, act, write, check)


def show_each(
    session: Session,
    view: "View[M]",
    names: Sequence[str],
    act: "Callable[[Client, str], M]",
    check: "Check | None" = None,
) -> None:
    """Do something to each, and write what became of it.

    Raises:
        GpuscaleError, typer.Exit: as of `_each`.
    """

    def write(done: "list[M]") -> None:
        if len(names) == 1:
            session.output.write_one(done[0], view)
        else:
            session.output.write_list(done, view)

    _each(session, names, act, write, check)


def _each(
    session: Session,
    names: Sequence[str],
    act: "Callable[[Client, str], T]",
    write: Callable[[list[T]], None],
    check: "Check | None",
) -> None:
    """Act on each name, and write what was done, whatever failed and however it ends.

    Raises:
        GpuscaleError: it failed for the only one, or nothing answers before anything else failed.
        typer.Exit: it failed for some of several; each is said, with its name.
    """
    done: list[T] = []
    attempt = _Attempts(alone=len(names) == 1)
    try:
        with session.connect() as client:
            if check is not None and not attempt.alone:
                for name in names:
                    attempt(check, client, name)
                if attempt.failures:
                    note("nothing was changed")
                    raise typer.Exit(attempt.failures[0])
            for name in names:
                result = attempt(act, client, name)
                if result is not None:
                    done.append(result)
    except GpuscaleError as error:
        if not attempt.failures:
            raise
        report(error)
    finally:
        if done:
            write(done)
    if attempt.failures:
        raise typer.Exit(attempt.failures[0])


@dataclass
class _Attempts:
    """Attempts for one thing after the other; a failure for one of several is said, and kept."""

    alone: bool
    failures: list[ExitCode] = field(default_factory=list[ExitCode])

    def __call__(self, what: "Callable[[Client, str], R]", client: "Client", name: str) -> "R | None":
        try:
            return what(client, name)
        except GpuscaleError as error:
            # Where nothing answers, each would wait for an answer in vain.
            if self.alone or error.reason in NOBODY:
                raise
            self.failures.append(report(error, name))
            return None
