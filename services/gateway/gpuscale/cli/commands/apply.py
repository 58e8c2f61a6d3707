"""`gpuscalectl apply` and `diff`: queue watchers and endpoints as files say, and what that would change."""

import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.commands.change import Yes, confirm
from gpuscale.cli.console.output import Format, dump_yaml, to_dict, write_lines
from gpuscale.cli.console.session import Session, note, session_of
from gpuscale.cli.grammar.exit_codes import ExitCode
from gpuscale.common.errors import GpuscaleError, InvalidArgumentError

if TYPE_CHECKING:
    from gpuscale.cli.manifests.documents import Declared, Resource
    from gpuscale.cli.manifests.planning import Step
    from gpuscale.client import Client

SUFFIXES = frozenset({".yaml", ".yml", ".json"})
DIFFERS = 1
"""Exit code of `diff` where something differs; more where it cannot be told, as of `diff` itself."""


class DryRun(StrEnum):
    """Who says what would be done."""

    CLIENT = "client"
    SERVER = "server"


Files = Annotated[
    list[str],
    typer.Option(
        "--file", "-f", metavar="FILE", help="A YAML file, a folder of them, or - for standard input."
    ),
]
Prune = Annotated[
    bool, typer.Option("--prune", help="Delete watchers and endpoints that the files do not name.")
]


def apply(
    context: typer.Context,
    file: Files,
    prune: Prune = False,
    dry_run: Annotated[
        DryRun | None,
        typer.Option(
            help="Change nothing: only read the files (client), or let the server check too (server)."
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """Create or change queue watchers and endpoints until they are as the files say."""
    from gpuscale.cli.manifests import planning

    wanted = _read_all(file)
    session = session_of(context)
    if dry_run is DryRun.CLIENT:
        if session.output.human:
            write_lines([f"{one.resource.name} fits the contract (dry run)" for one in wanted])
        _write(session, [one.resource for one in wanted])
        return
    with session.connect() as client:
        steps = planning.plan(client, wanted, prune=prune)
        _tell_plan(session, steps)
        for line in planning.unserved(client, steps):
            note(f"warning: {line}")
        doomed = [step.name for step in steps if step.action is planning.Action.DELETE]
        if doomed and dry_run is None:
            confirm(", ".join(doomed), yes=yes)
        _write(session, _taken(session, client, steps, dry_run=dry_run is not None))


def _taken(session: Session, client: "Client", steps: "Sequence[Step]", *, dry_run: bool) -> "list[Resource]":
    """Take the steps; each is said at once, so that what was done is known when a later one fails."""
    from gpuscale.cli.manifests import planning

    done: list[Resource] = []
    for step in steps:
        after, action = (step.after or step.before, step.action) if dry_run else planning.take(client, step)
        done += [] if after is None else [after]
        said = f"{step.name} {action}{' (dry run)' if dry_run else ''}"
        (write_lines if session.output.human else _notes)([said])
    return done


def _write(session: Session, done: "Sequence[Resource]") -> None:
    """Write the resources, for a program; a person has read what became of each."""
    from gpuscale.api.autoscaler import v1 as api

    output = session.output
    if output.human:
        return
    if output.format is Format.NAME:
        write_lines([resource.name for resource in done])
        return
    data: dict[str, list[dict[str, object]]] = {"queueWatchers": [], "endpoints": []}
    for resource in done:
        data["endpoints" if isinstance(resource, api.Endpoint) else "queueWatchers"].append(to_dict(resource))
    output.write_data(data)


_SIGNS = {"created": "+", "configured": "~", "deleted": "-"}


def _tell_plan(session: Session, steps: "Sequence[Step]") -> None:
    """Say what is about to be done, to a person."""
    from gpuscale.cli.manifests import planning

    changing = [step for step in steps if step.action is not planning.Action.KEEP]
    if not session.output.human or not changing:
        return
    counts = {action: sum(step.action is action for step in steps) for action in planning.Action}
    note("plan: " + ", ".join(f"{count} {action}" for action, count in counts.items() if count))
    for step in changing:
        note(f"  {_SIGNS[step.action]} {step.name}")
        if step.action is planning.Action.CONFIGURE:
            for line in planning.changes(step.before, step.after):
                note(f"      {line}")


def diff(context: typer.Context, file: Files, prune: Prune = False) -> None:
    """Say what apply would change; nothing is changed. Exit code 0 where nothing would, 1 where something would."""
    from gpuscale.cli.console.faults import report
    from gpuscale.cli.manifests import planning

    session = session_of(context)
    try:
        wanted = _read_all(file)
        with session.connect() as client:
            steps = planning.plan(client, wanted, prune=prune)
    except GpuscaleError as error:
        # 1 says that something differs.
        raise typer.Exit(max(report(error), ExitCode.USAGE)) from error
    differing = [(step, lines) for step in steps if (lines := _diff_lines(step))]
    if session.output.human:
        write_lines([line for _, lines in differing for line in lines])
    else:
        records = [
            {"name": step.name, "action": str(step.action), "diff": lines} for step, lines in differing
        ]
        session.output.write_data({"changes": records})
    if differing:
        raise typer.Exit(DIFFERS)


def _diff_lines(step: "Step") -> list[str]:
    import difflib

    from gpuscale.cli.manifests import planning

    one, other = (_yaml(planning.manifest(each)) for each in (step.before, step.after))
    lines = difflib.unified_diff(one, other, f"live/{step.name}", f"file/{step.name}", lineterm="")
    return list(lines)


def _yaml(data: object) -> list[str]:
    import io

    text = io.StringIO()
    if data:
        dump_yaml(data, text)
    return text.getvalue().splitlines()


def _read_all(files: Sequence[str]) -> "list[Declared]":
    """All files are read, and held against the contract, before anybody is asked to change anything."""
    from gpuscale.cli.manifests.documents import declared
    from gpuscale.cli.manifests.planning import check

    wanted = [one for name in files for text, source in read(name) for one in declared(text, source)]
    if not wanted:
        raise InvalidArgumentError(
            f"{', '.join(files)}: no queue watcher or endpoint in it; nothing was changed"
        )
    check(wanted)
    return wanted


def _notes(lines: list[str]) -> None:
    for line in lines:
        note(line)


def read(name: str) -> Iterator[tuple[str, str]]:
    """(text, what to call it) of a file, of standard input (`-`), or of each YAML file of a folder.

    Raises:
        InvalidArgumentError: a file cannot be read, or a folder has none.
    """
    if name == "-":
        yield sys.stdin.read(), "<stdin>"
        return
    path = Path(name)
    paths = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES) if path.is_dir() else [path]
    if not paths:
        raise InvalidArgumentError(f"{path}: no YAML file in this folder")
    for each in paths:
        try:
            yield each.read_text(encoding="utf-8"), str(each)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise InvalidArgumentError(f"{each}: {reason}") from error
