"""The steps of `apply`: plans and makes the changes that manifests ask for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import uuid4

from google.protobuf.json_format import MessageToDict

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.console import lookup
from gpuscale.cli.grammar.jsonpath import is_list, is_mapping
from gpuscale.cli.manifests.documents import DeclaredDocument, Resource, place_of, placed
from gpuscale.client import Client
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from gpuscale.common.rpc.validation import validate


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
    before: Resource | None
    wanted: DeclaredDocument | None
    after: Resource | None


def check(wanted: Sequence[DeclaredDocument]) -> None:
    """Check resources against the rules of the contract, without a server.

    Raises:
        InvalidArgumentError: one breaks a rule or is declared twice; says where.
    """
    seen: set[str] = set()
    for one in wanted:
        if one.resource.name in seen:
            raise one.tree.place.error(f"{one.resource.name} is declared twice")
        seen.add(one.resource.name)
        try:
            validate(one.resource)
        except InvalidArgumentError as error:
            raise placed(error, one.tree) from error


def plan(client: Client, wanted: Sequence[DeclaredDocument], *, prune: bool) -> list[PlanStep]:
    """The steps, in order: watchers, which endpoints read, are created first and deleted last.

    The server checks all steps beforehand, so that a refusal changes nothing. Its defaults are not a change.

    Raises:
        GpuscaleError: the server refuses a step; says where.
    """
    ordered = sorted(wanted, key=lambda one: isinstance(one.resource, api.Endpoint))
    existing: list[tuple[DeclaredDocument, Resource | None]] = []
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
            raise place_of(one.tree, "tenant").error(
                f"tenant is {_tenant(before) or 'not stated'} and stays: delete {name} first, or leave tenant out"
            )
        after = before
        if before is None or before.spec != one.resource.spec:
            after = _rehearsed(client, one, before, new)
        if before is None:
            steps.append(PlanStep(PlanAction.CREATE, name, before, one, after))
        elif after is None or (before.spec == after.spec and not _secretly_differs(before, after)):
            steps.append(PlanStep(PlanAction.KEEP, name, before, one, before))
        else:
            steps.append(PlanStep(PlanAction.CONFIGURE, name, before, one, after))
    if prune:
        named = {one.resource.name for one in wanted}
        there: list[Resource] = [*lookup.endpoints(client), *lookup.watchers(client)]
        steps += [
            PlanStep(PlanAction.DELETE, one.name, one, None, None) for one in there if one.name not in named
        ]
    return steps


def _rehearsed(
    client: Client, wanted: DeclaredDocument, before: Resource | None, new: frozenset[str]
) -> Resource:
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


def take(client: Client, step: PlanStep) -> tuple[Resource, PlanAction]:
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


def _put(client: Client, wanted: DeclaredDocument, before: Resource | None, *, dry_run: bool) -> Resource:
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
        raise placed(error, wanted.tree, f"{field}.") from error
    found: Resource = getattr(answer, field)
    return found


def _secretly_differs(before: Resource, after: Resource) -> bool:
    """Whether the URL or secret of a target, which the server never shows, would change."""
    return isinstance(after, allocator_api.NotificationTarget) and before.etag != after.etag


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


def manifest(resource: Resource | None) -> dict[str, object]:
    """A resource as a manifest, without unset fields; empty for None."""
    if resource is None:
        return {}
    made: dict[str, object] = {"name": resource.name}
    if tenant := _tenant(resource):
        made["tenant"] = tenant
    return made | {"spec": MessageToDict(resource.spec)}


def _tenant(resource: Resource | None) -> str:
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
