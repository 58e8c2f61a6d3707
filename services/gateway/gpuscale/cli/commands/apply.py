"""`gpuscalectl apply`, `diff` and `edit`: make queue watchers, endpoints and policies match files, and show what that would change."""

from __future__ import annotations

import difflib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import uuid4

import click

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli import manifests
from gpuscale.cli.console import lookup
from gpuscale.cli.console.bulk import confirm
from gpuscale.cli.console.command import Session, command, one_name
from gpuscale.cli.console.errors import ExitCode, leave, report
from gpuscale.cli.console.output import dump_yaml, to_dict
from gpuscale.cli.console.terminal import note, write_lines
from gpuscale.cli.grammar.jsonpath import Format, is_list, is_mapping
from gpuscale.cli.grammar.parameters import MOMENT, YES, format_duration, local_text, option, repeated
from gpuscale.cli.views import allocator as views
from gpuscale.client import Client
from gpuscale.common import wire
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, InvalidArgumentError, NotFoundError
from gpuscale.common.rpc import validation
from gpuscale.common.sizes import counted

SUFFIXES = frozenset({".yaml", ".yml", ".json"})
DIFFERS = 1
"""Exit code of `diff` if something differs; failures are higher, like diff(1)."""
DRY_RUN_SECONDS = 300.0
"""Time limit of a dry run, which takes seconds for a week of 100 GPUs."""


FILES = repeated(
    "--file",
    "-f",
    required=True,
    type=click.Path(allow_dash=True),
    help="A YAML file, a folder of them, or - for standard input.",
)
SINCE = option("--since", type=MOMENT, help="With --dry-run, how far to go back; 7 days by default.")
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
        steps = plan(client, wanted, prune=prune)
        if session.output.human:
            for line in plan_lines(steps):
                note(line)
        for line in unserved(client, steps):
            note(f"warning: {line}")
        doomed = [step.name for step in steps if step.action is PlanAction.DELETE]
        if doomed and dry_run is None:
            confirm("Delete", ", ".join(doomed), yes=yes)
        done: list[manifests.Resource] = []
        for step in steps:  # report each at once, in case a later one fails
            after, action = (step.after or step.before, step.action) if dry_run else take(client, step)
            done += [] if after is None else [after]
            said = f"{step.name} {action}{' (dry run)' if dry_run else ''}"
            if session.output.human:
                write_lines([said])
            else:
                note(said)
        _write(session, done)


def _show_past(
    session: Session, client: Client, wanted: Sequence[manifests.DeclaredDocument], since: datetime | None
) -> None:
    """Show what each policy would have done since a time, and how much of that time is not recorded."""
    output, start = session.output, wire.optional_timestamp(since)
    for one in wanted:
        policy = one.resource
        if not isinstance(policy, allocator_api.UsePolicy):
            raise InvalidArgumentError(f"{policy.name}: --dry-run past is for use policies")
        request = allocator_api.DryRunUsePolicyRequest(use_policy=policy, start_time=start)
        try:
            found = client.policies.DryRunUsePolicy(request, timeout=DRY_RUN_SECONDS)
        except InvalidArgumentError as error:
            raise manifests.placed(error, one.tree, "use_policy.") from error
        if not output.human:
            output.write_data(to_dict(found))
            continue
        acts = found.policy_acts
        write_lines(output.table(acts, views.PAST) if acts else ["it would have done nothing"])
        begin, end = (local_text(wire.to_datetime(at)) for at in (found.start_time, found.end_time))
        known, unknown = (wire.seconds(part) for part in (found.known, found.unknown))
        share = f"{unknown / (known + unknown):.0%}" if unknown else "none"
        note(
            f"{policy.name} from {begin} to {end}, in steps of {format_duration(wire.seconds(found.step))}: {counted(found.act_count, 'act')},"
            f" {counted(found.subject_count, 'reservation')}; unknown of the time they were held: {share}"
        )
        if found.HasField("complete_since"):
            forgotten = local_text(wire.to_datetime(found.complete_since))
            note(f"not all reservations that ended before {forgotten} are on record")


def _write(session: Session, done: Sequence[manifests.Resource]) -> None:
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
        data.setdefault(next(key for key, one in manifests.LISTS.items() if one == kind), []).append(
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
            steps = plan(client, wanted, prune=prune)
    except GpuscaleError as error:
        leave(max(report(error), ExitCode.USAGE))  # 1 means that something differs
    differing: list[tuple[PlanStep, list[str]]] = []
    for step in steps:
        one, other = _yaml(manifest(step.before)), _yaml(manifest(step.after))
        lines = list(difflib.unified_diff(one, other, f"live/{step.name}", f"file/{step.name}", lineterm=""))
        if lines:
            differing.append((step, lines))
    if session.output.human:
        write_lines([line for _, lines in differing for line in lines])
    else:
        records = [{"name": one.name, "action": str(one.action), "diff": lines} for one, lines in differing]
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


def _edit(session: Session, name: str, of: Callable[..., Sequence[manifests.Resource]]) -> None:
    """Open a manifest until it applies or is left unchanged; its etag protects other changes."""
    with session.connect() as client:
        [before] = of(client, [name])
        shown = {**manifest(before), **({"etag": before.etag} if before.etag else {})}
        text, problem = "\n".join(_yaml(shown)) + "\n", None
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
                wanted = manifests.declared(text, "manifest")
                if [one.resource.name for one in wanted] != [before.name]:
                    problem = InvalidArgumentError(f"the manifest must be that of {before.name} alone")
                    continue
                check(wanted)
                [step] = plan(client, wanted, prune=False)
                after, action = take(client, step)
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


def _yaml(data: object) -> list[str]:
    text = io.StringIO()
    if data:
        dump_yaml(data, text)
    return text.getvalue().splitlines()


def _read_all(files: Sequence[str]) -> list[manifests.DeclaredDocument]:
    """Read all files and check them against the API's rules, before any change."""
    wanted = [one for name in files for text, place in read(name) for one in manifests.declared(text, place)]
    if not wanted:
        raise InvalidArgumentError(f"{', '.join(files)}: nothing to apply; nothing was changed")
    check(wanted)
    return wanted


def read(name: str) -> Iterator[tuple[str, str]]:
    """The text and name of a file, of standard input (`-`), or of each YAML file in a folder.

    Raises InvalidArgumentError: a file cannot be read, or a folder has no YAML files.
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


class PlanAction(StrEnum):
    """What happens to a resource."""

    CREATE = "created"
    CONFIGURE = "configured"
    KEEP = "unchanged"
    DELETE = "deleted"


@dataclass(frozen=True)
class PlanStep:
    """What happens to a resource: as it is, as declared, and as the server would store it."""

    action: PlanAction
    name: str
    before: manifests.Resource | None
    wanted: manifests.DeclaredDocument | None
    after: manifests.Resource | None


def check(wanted: Sequence[manifests.DeclaredDocument]) -> None:
    """Check resources against the rules of the contract, without a server.

    Raises InvalidArgumentError: one breaks a rule or is declared twice; says where.
    """
    seen: set[str] = set()
    for one in wanted:
        if one.resource.name in seen:
            raise one.tree.place.error(f"{one.resource.name} is declared twice")
        seen.add(one.resource.name)
        try:
            validation.validate(one.resource)
        except InvalidArgumentError as error:
            raise manifests.placed(error, one.tree) from error


def plan(client: Client, wanted: Sequence[manifests.DeclaredDocument], *, prune: bool) -> list[PlanStep]:
    """The steps, in order: watchers, which endpoints read, are created first and deleted last.

    The server checks all steps beforehand, so that a refusal changes nothing. Its defaults are not a change.

    Raises GpuscaleError: the server refuses a step; says where.
    """
    ordered = sorted(wanted, key=lambda one: isinstance(one.resource, api.Endpoint))
    existing: list[tuple[manifests.DeclaredDocument, manifests.Resource | None]] = []
    for one in ordered:
        read = lookup.READERS[one.resource.name.partition("/")[0]]
        try:
            existing.append((one, read(client, [one.resource.name])[0]))
        except NotFoundError:
            existing.append((one, None))
    new = frozenset(one.resource.name for one, before in existing if before is None)
    steps: list[PlanStep] = []
    for one, before in existing:
        name, declared = one.resource.name, _tenant(one.resource)
        if before is not None and declared and declared != _tenant(before):
            raise manifests.place_of(one.tree, "tenant").error(
                f"tenant is {_tenant(before) or 'not stated'} and stays: delete {name} first, or leave tenant out"
            )
        after = before
        if before is None or before.spec != one.resource.spec:
            after = _rehearsed(client, one, before, new)
        if before is None:
            steps.append(PlanStep(PlanAction.CREATE, name, before, one, after))
        elif after is None or (
            before.spec == after.spec
            # The server never shows the URL and the secret of a target.
            and not (isinstance(after, allocator_api.NotificationTarget) and before.etag != after.etag)
        ):
            steps.append(PlanStep(PlanAction.KEEP, name, before, one, before))
        else:
            steps.append(PlanStep(PlanAction.CONFIGURE, name, before, one, after))
    if prune:
        named = {one.resource.name for one in wanted}
        there: list[manifests.Resource] = [*lookup.endpoints(client), *lookup.watchers(client)]
        steps += [
            PlanStep(PlanAction.DELETE, one.name, one, None, None) for one in there if one.name not in named
        ]
    return steps


def _rehearsed(
    client: Client, wanted: manifests.DeclaredDocument, before: manifests.Resource | None, new: frozenset[str]
) -> manifests.Resource:
    """The resource as the server would store it.

    The server cannot check an endpoint that reads a watcher among the `new` resources: it is taken as declared.
    """
    try:
        return _put(client, wanted, before, dry_run=True)
    except FailedPreconditionError as error:
        missing = error.metadata.get("names", "").split(", ") if error.reason == "UNKNOWN_WATCHER" else ()
        if not missing or not new.issuperset(missing):
            raise
        resource = wanted.resource
        if isinstance(before, api.Endpoint) and isinstance(resource, api.Endpoint):
            return api.Endpoint(name=resource.name, spec=resource.spec, tenant=before.tenant)
        return resource


def take(client: Client, step: PlanStep) -> tuple[manifests.Resource, PlanAction]:
    """Take a step; returns the resource after it, and what was done.

    Raises:
        InvalidArgumentError: the server refuses it; says where.
        GpuscaleError: any other failure.
    """
    if step.wanted is None:
        doomed = step.before
        if isinstance(doomed, api.Endpoint):
            client.endpoints.DeleteEndpoint(api.DeleteEndpointRequest(name=step.name, etag=doomed.etag))
        else:
            client.queue_watchers.DeleteQueueWatcher(api.DeleteQueueWatcherRequest(name=step.name))
        return doomed or api.QueueWatcher(name=step.name), step.action
    if step.action is PlanAction.KEEP and step.before is not None:
        return step.before, step.action
    return _put(client, step.wanted, step.before, dry_run=False), step.action


def _put(
    client: Client, wanted: manifests.DeclaredDocument, before: manifests.Resource | None, *, dry_run: bool
) -> manifests.Resource:
    """Create or change a resource, or let the server only check that."""
    resource: Any = wanted.resource
    noun = resource.DESCRIPTOR.name
    contract, service = _SERVICES[noun]
    method = f"{'Update' if before else 'Create'}{noun}"
    request = getattr(contract, f"{method}Request")(validate_only=dry_run)
    if before is None:
        request.request_id = str(uuid4())
    else:
        etag = resource.etag or before.etag
        resource = type(resource)(name=resource.name, spec=resource.spec, etag=etag)
    field = request.DESCRIPTOR.fields[0].name
    getattr(request, field).CopyFrom(resource)
    try:
        answer = getattr(getattr(client, service), method)(request)
    except InvalidArgumentError as error:
        raise manifests.placed(error, wanted.tree, f"{field}.") from error
    found: manifests.Resource = getattr(answer, field)
    return found


_SERVICES: Mapping[str, tuple[Any, str]] = {
    "Endpoint": (api, "endpoints"),
    "QueueWatcher": (api, "queue_watchers"),
    "UsePolicy": (allocator_api, "policies"),
    "NotificationTarget": (allocator_api, "notifications"),
    "PowerBudget": (allocator_api, "power"),
}
"""The contract of each kind, and its service of the client."""


def unserved(client: Client, steps: Sequence[PlanStep]) -> Iterator[str]:
    """A warning for each endpoint whose template or adapter does not exist yet."""
    wanted = [
        (step.name, step.wanted.resource.spec.template)
        for step in steps
        if step.wanted is not None and isinstance(step.wanted.resource, api.Endpoint)
    ]
    templates = {one.name: set(one.templates) for one in lookup.adapters(client)} if wanted else {}
    for name, of in wanted:
        named = [of.adapter] if of.adapter else [tier.adapter for tier in of.tiers]
        for adapter in named:
            if adapter not in templates:
                yield f"{name}: {adapter} is not known; replicas wait until it connects"
        known = set[str]().union(*(templates.get(one, set()) for one in named or templates))
        if of.template and of.template not in known and (not named or known):
            there = f"; known: {', '.join(sorted(known))}" if known else ""
            yield f"{name}: no adapter has a template {of.template!r}{there}"


def manifest(resource: manifests.Resource | None) -> dict[str, object]:
    """A resource as a manifest, without unset fields; empty for None."""
    if resource is None:
        return {}
    made: dict[str, object] = {"name": resource.name}
    if tenant := _tenant(resource):
        made["tenant"] = tenant
    from google.protobuf.json_format import MessageToDict

    return made | {"spec": MessageToDict(resource.spec)}


def _tenant(resource: manifests.Resource | None) -> str:
    return resource.tenant if isinstance(resource, api.Endpoint) else ""


_SIGNS = {PlanAction.CREATE: "+", PlanAction.CONFIGURE: "~", PlanAction.DELETE: "-"}


def plan_lines(steps: Sequence[PlanStep]) -> list[str]:
    """The steps and the fields that change; empty if nothing does."""
    changing = [step for step in steps if step.action is not PlanAction.KEEP]
    if not changing:
        return []
    counts = {action: sum(step.action is action for step in steps) for action in PlanAction}
    lines = ["plan: " + ", ".join(f"{count} {action}" for action, count in counts.items() if count)]
    for step in changing:
        lines.append(f"  {_SIGNS[step.action]} {step.name}")
        if step.action is PlanAction.CONFIGURE:
            one, other = dict(_flat(manifest(step.before))), dict(_flat(manifest(step.after)))
            lines += [
                f"      {path}: {one.get(path, '-')} -> {other.get(path, '-')}"
                for path in [*one, *(path for path in other if path not in one)]
                if one.get(path) != other.get(path)
            ]
    return lines


def _flat(data: object, path: str = "") -> Iterator[tuple[str, object]]:
    if is_mapping(data) and data:
        for key, value in data.items():
            yield from _flat(value, f"{path}.{key}" if path else key)
    elif is_list(data) and data:
        for index, value in enumerate(data):
            yield from _flat(value, f"{path}[{index}]")
    else:
        yield path, data
