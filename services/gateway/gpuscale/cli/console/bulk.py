"""Does the same to several resources. If a check of one fails, nothing changes.

After the checks, a failure of one does not stop the others, and the first failure is the exit code. As data, one name gives an
object, several names a list.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gpuscale.cli.console.command import NOBODY, Session
from gpuscale.cli.console.errors import ExitCode, leave, report
from gpuscale.cli.console.terminal import ask, note, write_lines
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.nouns import full_name
from gpuscale.common.errors import CancelledCallError, GpuscaleError, InvalidArgumentError

if TYPE_CHECKING:
    from gpuscale.cli.console.output import Output
    from gpuscale.client import Client

R = TypeVar("R")


class Done(NamedTuple):
    """What was done to a resource, as a line for a person and as data."""

    name: str
    line: str
    data: Mapping[str, object]


Check = Callable[["Client", str], object]
"""Raises why a resource cannot be changed, such as that it does not exist."""


def confirm(action: str, what: str, *, yes: bool, danger: str = "") -> None:
    """Ask for confirmation of an action, such as `Delete`, unless `yes`; exit if it is refused.

    Raises InvalidArgumentError: standard input is not a terminal.
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
"""Attributes of the client that differ from the key of lists."""


def delete_each(
    session: Session,
    key: str,
    pattern: str,
    typed: Sequence[str],
    request: type[Any],
    *,
    yes: bool,
    line: str = "deleted",
    **fields: object,
) -> None:
    """Delete resources, as typed, after confirmation unless `yes`. Raises the same as `say_each`.

    `request` is such as DeleteEndpointRequest, with `fields` besides the name; its Get method checks that a resource exists.
    `line` is what to say of each, `key` that of lists of data.
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

    names = [full_name(pattern, one) for one in typed]
    confirm("Delete", ", ".join(names), yes=yes)
    say_each(session, key, names, act, check)


def say_each(
    session: Session,
    key: str,
    names: Sequence[str],
    act: "Callable[[Client, str], Done]",
    check: "Check | None" = None,
    *,
    each: "Callable[..., Iterable[list[Done]]]" = map,
) -> None:
    """Do something to each resource, and say what was done, even after a failure; lists of data have the key `key`.

    `each` is such as the `map` of a pool, to do it to several at a time.

    Raises:
        GpuscaleError: it failed, for the only name or since nothing answers.
        click.exceptions.Exit: it failed for one of several names.
    """
    done: list[Done] = []
    failures: list[ExitCode] = []
    fatal: list[GpuscaleError] = []  # raised once nothing is under way any more

    def attempt(what: "Callable[[Client, str], R]", client: "Client", name: str) -> "list[R]":
        try:
            return [] if fatal else [what(client, name)]
        except GpuscaleError as error:
            # The other names would fail in the same way; and Ctrl-C closes the client.
            if len(names) == 1 or error.reason in NOBODY or isinstance(error, CancelledCallError):
                fatal.append(error)
            else:
                failures.append(report(error, name))
            return []

    try:
        with session.connect() as client:
            if check is not None and len(names) > 1:
                for name in names:
                    attempt(check, client, name)
                if failures and not fatal:
                    note("nothing was changed")
                    leave(failures[0])
            for of_one in each(partial(attempt, act, client), names):
                done += of_one
            if fatal:
                raise fatal[0]
    except GpuscaleError as error:
        if not failures:
            raise
        report(error)
    finally:
        _write(session.output, done, key if len(names) > 1 else "")
    if failures:
        leave(failures[0])


def _write(output: "Output", done: Sequence[Done], key: str) -> None:
    """Write what was done, if anything; as data as a list of this key, or only the first without one."""
    if not done:
        return
    if output.human:
        write_lines([one.line for one in done])
    elif output.format is Format.NAME:
        write_lines([one.name for one in done])
    else:
        output.write_data({key: [one.data for one in done]} if key else done[0].data)
