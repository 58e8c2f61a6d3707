"""Doing the same to several resources: all are checked first, and if one is missing, nothing changes.

What then fails for one stops no other, and the first failure is the exit code. As data, one name gives the
object itself, several names a list.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gpuscale.cli.console.errors import ExitCode, leave, report
from gpuscale.cli.console.session import NOBODY, Session
from gpuscale.cli.console.terminal import ask, note, write_lines
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.common.errors import GpuscaleError, InvalidArgumentError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpuscale.cli.console.cells import View
    from gpuscale.client import Client

    M = TypeVar("M", bound=Message)

T = TypeVar("T")
R = TypeVar("R")


class Done(NamedTuple):
    """What was done to one resource: its name, a line for a person, and data for a program."""

    name: str
    line: str
    data: Mapping[str, object]


Check = Callable[["Client", str], object]
"""Raises what stands against changing one resource, such as that there is none of that name."""


def confirm(action: str, what: str, *, yes: bool, danger: str = "") -> None:
    """Ask whether something is meant, and end the program where it is not.

    Args:
        action: a verb such as `Delete`.
        what: what it would happen to.
        yes: whether `--yes` has answered already.
        danger: a sentence about what may go wrong.

    Raises:
        InvalidArgumentError: no terminal is there to ask at.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        warning = f" ({danger.rstrip('.')})" if danger else ""
        raise InvalidArgumentError(
            f"cannot ask whether to {action.lower()} {what}{warning}: standard input is not a terminal; pass --yes"
        )
    if not ask(f"{action} {what}?{f' {danger}' if danger else ''}"):
        note("nothing was changed")
        leave(ExitCode.OTHER)


_SERVICES = {"queueWatchers": "queue_watchers", "targets": "notifications", "budgets": "power"}
"""Attributes of the client, of those kinds that have another word in lists of data."""


def delete_each(
    session: Session,
    key: str,
    names: Sequence[str],
    request: type[Any],
    *,
    yes: bool,
    line: str = "deleted",
    **fields: object,
) -> None:
    """Delete each of several resources, once a person agrees.

    Args:
        session: the connection, and how it is told.
        key: of lists of data, after which the service is called too.
        names: of the resources, in full.
        request: of the method, such as DeleteEndpointRequest; the Get method beside it tells whether a resource is there.
        yes: whether `--yes` was typed.
        line: what is said of each.
        fields: of the request, beside the name.

    Raises:
        GpuscaleError, click.exceptions.Exit: as of `say_each`.
    """
    from google.protobuf.message_factory import GetMessageClass

    method, service = request.__name__.removesuffix("Request"), _SERVICES.get(key, key)
    get = f"Get{method.removeprefix('Delete').removeprefix('Cancel')}"
    look = GetMessageClass(request.DESCRIPTOR.file.message_types_by_name[f"{get}Request"])

    def act(client: "Client", name: str) -> Done:
        getattr(getattr(client, service), method)(request(name=name, **fields))
        return Done(name, f"{name} {line}", {"name": name})

    def check(client: "Client", name: str) -> None:
        getattr(getattr(client, service), get)(look(name=name))

    confirm("Delete", ", ".join(names), yes=yes)
    say_each(session, key, names, act, check)


def say_each(
    session: Session,
    key: str,
    names: Sequence[str],
    act: "Callable[[Client, str], Done]",
    check: "Check | None" = None,
) -> None:
    """Do something to each resource, and say so; lists of data have the key `key`.

    Raises:
        GpuscaleError, click.exceptions.Exit: as of `_each`.
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
    """Do something to each resource, and write it as it is afterwards.

    Raises:
        GpuscaleError, click.exceptions.Exit: as of `_each`.
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
    """Act on each name, and write what was done, even after a failure."""
    done: list[T] = []
    attempt = _Attempts(alone=len(names) == 1)
    try:
        with session.connect() as client:
            if check is not None and not attempt.alone:
                for name in names:
                    attempt(check, client, name)
                if attempt.failures:
                    note("nothing was changed")
                    leave(attempt.failures[0])
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
        leave(attempt.failures[0])


@dataclass
class _Attempts:
    """Attempts for one name after the other; a failure for one of several is reported, and kept."""

    alone: bool
    failures: list[ExitCode] = field(default_factory=list[ExitCode])

    def __call__(self, what: "Callable[[Client, str], R]", client: "Client", name: str) -> "R | None":
        try:
            return what(client, name)
        except GpuscaleError as error:
            if self.alone or error.reason in NOBODY:  # each further name would wait in vain
                raise
            self.failures.append(report(error, name))
            return None
