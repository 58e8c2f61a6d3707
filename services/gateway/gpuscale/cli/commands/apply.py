"""`gpuscalectl apply`, `diff` and `edit`: make queue watchers, endpoints and policies match files, and show what that would change."""

import difflib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

import click

from gpuscale.api.allocator.v1 import UsePolicy
from gpuscale.cli.commands.policies import SINCE, show_past
from gpuscale.cli.console import lookup
from gpuscale.cli.console.bulk import confirm
from gpuscale.cli.console.command import Session, command, one_name
from gpuscale.cli.console.errors import ExitCode, leave, report
from gpuscale.cli.console.output import dump_yaml, to_dict
from gpuscale.cli.console.terminal import note, write_lines
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.parameters import YES, option, repeated
from gpuscale.cli.manifests import documents, planning
from gpuscale.client import Client
from gpuscale.common.errors import GpuscaleError, InvalidArgumentError

SUFFIXES = frozenset({".yaml", ".yml", ".json"})
DIFFERS = 1
"""Exit code of `diff` if something differs; failures are higher, like diff(1)."""


FILES = repeated(
    "--file",
    "-f",
    required=True,
    type=click.Path(allow_dash=True),
    help="A YAML file, a folder of them, or - for standard input.",
)
PRUNE = option("--prune", is_flag=True, help="Delete watchers and endpoints that the files do not declare.")


@command("apply -f endpoint.yaml --dry-run server")
@FILES
@PRUNE
@option(
    "--dry-run",
    type=click.Choice(["client", "server", "past"]),
    help="Change nothing: check the files only (client), on the server too (server), or show what use policies would have done"
    " (past).",
)
@SINCE
@YES
def apply(
    session: Session,
    file: tuple[str, ...],
    prune: bool,
    dry_run: str | None,
    since: datetime | None,
    yes: bool,
) -> None:
    """Create or change queue watchers, endpoints, use policies, notification targets and power budgets until they match the files."""
    wanted = _read_all(file)
    if dry_run == "client":
        if session.output.human:
            write_lines([f"{one.resource.name} is valid (dry run)" for one in wanted])
        _write(session, [one.resource for one in wanted])
        return
    with session.connect() as client:
        if dry_run == "past":
            _show_past(session, client, wanted, since)
            return
        steps = planning.plan(client, wanted, prune=prune)
        if session.output.human:
            for line in planning.plan_lines(steps):
                note(line)
        for line in planning.unserved(client, steps):
            note(f"warning: {line}")
        doomed = [step.name for step in steps if step.action is planning.PlanAction.DELETE]
        if doomed and dry_run is None:
            confirm("Delete", ", ".join(doomed), yes=yes)
        done: list[documents.Resource] = []
        for step in steps:  # report each at once, in case a later one fails
            after, action = (
                (step.after or step.before, step.action) if dry_run else planning.take(client, step)
            )
            done += [] if after is None else [after]
            said = f"{step.name} {action}{' (dry run)' if dry_run else ''}"
            if session.output.human:
                write_lines([said])
            else:
                note(said)
        _write(session, done)


def _show_past(
    session: Session, client: Client, wanted: Sequence[documents.DeclaredDocument], since: datetime | None
) -> None:
    for one in wanted:
        if not isinstance(one.resource, UsePolicy):
            raise InvalidArgumentError(f"{one.resource.name}: --dry-run past is for use policies")
        try:
            show_past(session, client, one.resource, since)
        except InvalidArgumentError as error:
            raise documents.placed(error, one.tree, "use_policy.") from error


def _write(session: Session, done: "Sequence[documents.Resource]") -> None:
    """Write the resources as data; lines for people are already written."""
    output = session.output
    if output.human:
        return
    if output.format is Format.NAME:
        write_lines([resource.name for resource in done])
        return
    data: dict[str, list[dict[str, object]]] = {"queueWatchers": [], "endpoints": []}
    for resource in done:
        kind = resource.DESCRIPTOR.name
        data.setdefault(next(key for key, one in documents.LISTS.items() if one == kind), []).append(
            to_dict(resource)
        )
    output.write_data(data)


@command("diff -f endpoint.yaml")
@FILES
@PRUNE
def diff(session: Session, file: tuple[str, ...], prune: bool) -> None:
    """Show what apply would change. Exit code 0 if nothing would, 1 if something would."""
    try:
        wanted = _read_all(file)
        with session.connect() as client:
            steps = planning.plan(client, wanted, prune=prune)
    except GpuscaleError as error:
        leave(max(report(error), ExitCode.USAGE))  # 1 means that something differs
    differing: list[tuple[planning.PlanStep, list[str]]] = []
    for step in steps:
        one, other = _yaml(planning.manifest(step.before)), _yaml(planning.manifest(step.after))
        lines = list(difflib.unified_diff(one, other, f"live/{step.name}", f"file/{step.name}", lineterm=""))
        if lines:
            differing.append((step, lines))
    if session.output.human:
        write_lines([line for _, lines in differing for line in lines])
    else:
        records = [
            {"name": step.name, "action": str(step.action), "diff": lines} for step, lines in differing
        ]
        session.output.write_data({"changes": records})
    if differing:
        leave(DIFFERS)


@command("edit endpoint jobs")
@one_name("endpoints")
def edit_endpoint(session: Session, name: str) -> None:
    """Change the manifest of an endpoint in $VISUAL or $EDITOR; an error opens it again."""
    _edit(session, name, lookup.endpoints)


@command("edit watcher jobs")
@one_name("watchers")
def edit_watcher(session: Session, name: str) -> None:
    """Change the manifest of a queue watcher in $VISUAL or $EDITOR; an error opens it again."""
    _edit(session, name, lookup.watchers)


def _edit(session: Session, name: str, of: "Callable[..., Sequence[documents.Resource]]") -> None:
    """Open a manifest until it applies or is left unchanged; its etag protects other changes."""
    with session.connect() as client:
        [before] = of(client, [name])
        manifest = {**planning.manifest(before), **({"etag": before.etag} if before.etag else {})}
        text, problem = "\n".join(_yaml(manifest)) + "\n", None
        while True:
            said = "".join(f"# {line}\n" for line in problem.message.splitlines()) if problem else ""
            typed = click.edit(f"{said}# Save it to change {before.name}.\n{text}", extension=".yaml")
            edited = "".join(
                line for line in (typed or text).splitlines(keepends=True) if not line.startswith("# ")
            )
            if edited == text:
                if problem:
                    _keep(text)
                    raise problem
                note("nothing was changed")
                return
            text = edited
            try:
                wanted = documents.declared(text, "manifest")
                _expect_only(before.name, wanted)
                planning.check(wanted)
                [step] = planning.plan(client, wanted, prune=False)
                after, action = planning.take(client, step)
            except InvalidArgumentError as error:
                problem = error
                continue
            except GpuscaleError:
                _keep(text)
                raise
            if session.output.human:
                write_lines([f"{after.name} {action}"])
            _write(session, [after])
            return


def _keep(text: str) -> None:
    with tempfile.NamedTemporaryFile("w", prefix="gpuscale-edit-", suffix=".yaml", delete=False) as file:
        file.write(text)
    note(f"what you typed is in {file.name}")


def _expect_only(name: str, wanted: "Sequence[documents.DeclaredDocument]") -> None:
    if [one.resource.name for one in wanted] != [name]:
        raise InvalidArgumentError(f"the manifest must be that of {name} alone")


def _yaml(data: object) -> list[str]:
    text = io.StringIO()
    if data:
        dump_yaml(data, text)
    return text.getvalue().splitlines()


def _read_all(files: Sequence[str]) -> "list[documents.DeclaredDocument]":
    """Read all files and check them against the API's rules, before any change."""
    wanted = [
        one for name in files for text, source in read(name) for one in documents.declared(text, source)
    ]
    if not wanted:
        raise InvalidArgumentError(f"{', '.join(files)}: nothing to apply; nothing was changed")
    planning.check(wanted)
    return wanted


def read(name: str) -> Iterator[tuple[str, str]]:
    """The text and name of a file, of standard input (`-`), or of each YAML file in a folder.

    Raises:
        InvalidArgumentError: a file cannot be read, or a folder has no YAML files.
    """
    if name == "-":
        yield sys.stdin.read(), "<stdin>"
        return
    path = Path(name)
    paths = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES) if path.is_dir() else [path]
    if not paths:
        raise InvalidArgumentError(f"{path}: no YAML files in this folder")
    for each in paths:
        try:
            yield each.read_text(encoding="utf-8"), str(each)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise InvalidArgumentError(f"{each}: {reason}") from error
