"""What has to be done so that queue watchers and endpoints are as files say, and doing it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from uuid import uuid4

from google.protobuf.json_format import MessageToDict

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.console import resources
from gpuscale.cli.grammar.jsonpath import is_list, is_mapping
from gpuscale.cli.manifests.documents import Declared, Resource
from gpuscale.cli.manifests.placing import placed
from gpuscale.client import Client
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from gpuscale.common.rpc.validation import validate


class Action(StrEnum):
    """What becomes of a resource, in the word that is written when it is done."""

    CREATE = "created"
    CONFIGURE = "configured"
    KEEP = "unchanged"
    DELETE = "deleted"


@dataclass(frozen=True)
class Step:
    """What becomes of one resource: as it is, and as it is wanted."""

    action: Action
    name: str
    before: Resource | None
    wanted: Declared | None


def check(wanted: Sequence[Declared]) -> None:
    """Hold resources against the rules of the contract; nobody is asked.

    Raises:
        InvalidArgumentError: one breaks a rule, or stands twice; says where.
    """
    seen: set[str] = set()
    for one in wanted:
        if one.resource.name in seen:
            raise one.tree.place.error(f"{one.resource.name} stands twice")
        seen.add(one.resource.name)
        try:
            validate(one.resource)
        except InvalidArgumentError as error:
            raise placed(error, one.tree) from error


def plan(client: Client, wanted: Sequence[Declared], *, prune: bool) -> list[Step]:
    """The steps, in the order in which they can be taken: endpoints read watchers, so these come first and go last."""
    ordered = sorted(wanted, key=lambda one: isinstance(one.resource, api.Endpoint))
    steps = [_step(one, _existing(client, one.resource)) for one in ordered]
    if prune:
        named = {one.resource.name for one in wanted}
        there: list[Resource] = [*resources.endpoints(client), *resources.watchers(client)]
        steps += [Step(Action.DELETE, one.name, one, None) for one in there if one.name not in named]
    return steps


def _step(wanted: Declared, before: Resource | None) -> Step:
    name = wanted.resource.name
    if before is None:
        return Step(Action.CREATE, name, None, wanted)
    same = before.spec == wanted.resource.spec
    return Step(Action.KEEP if same else Action.CONFIGURE, name, before, wanted)


def _existing(client: Client, wanted: Resource) -> Resource | None:
    read = resources.endpoints if isinstance(wanted, api.Endpoint) else resources.watchers
    try:
        [found] = read(client, [wanted.name])
    except NotFoundError:
        return None
    return found


def coming(steps: Sequence[Step]) -> frozenset[str]:
    """Names of what is not there yet, and will be."""
    return frozenset(step.name for step in steps if step.action is Action.CREATE)


def rehearse(client: Client, step: Step, new: frozenset[str]) -> tuple[Resource, Action]:
    """As `take`, where the server only says what would come of it; `new` has the names of what other steps make.

    An endpoint that reads a watcher of the same files cannot be checked by a server that has not that watcher yet: it is
    then as the file says.

    Raises:
        GpuscaleError: as of `take`.
    """
    try:
        return take(client, step, dry_run=True)
    except FailedPreconditionError as error:
        missing = error.metadata.get("names", "").split(", ") if error.reason == "WATCHER_NOT_FOUND" else ()
        if step.wanted is None or not missing or not new.issuperset(missing):
            raise
        return step.wanted.resource, step.action


def take(client: Client, step: Step, *, dry_run: bool = False) -> tuple[Resource, Action]:
    """Take a step, or let the server say what would come of it; (the resource after it, what was done).

    Raises:
        InvalidArgumentError: the server refuses it; says where it stands.
        GpuscaleError: it failed.
    """
    if step.wanted is None:
        return _delete(client, step, dry_run=dry_run), step.action
    if step.action is Action.KEEP and step.before is not None:
        return step.before, step.action
    resource = step.wanted.resource
    try:
        if isinstance(resource, api.Endpoint):
            after: Resource = _endpoint(client, resource, step.before, dry_run=dry_run)
        else:
            after = _watcher(client, resource, step.before, dry_run=dry_run)
    except InvalidArgumentError as error:
        prefix = "endpoint." if isinstance(resource, api.Endpoint) else "queue_watcher."
        raise placed(error, step.wanted.tree, prefix) from error
    # The server may see that another text means the same.
    same = step.before is not None and after.etag == step.before.etag and not dry_run
    return after, Action.KEEP if same else step.action


def _endpoint(
    client: Client, wanted: api.Endpoint, before: Resource | None, *, dry_run: bool
) -> api.Endpoint:
    service = client.endpoints
    if before is None:
        new = api.CreateEndpointRequest(endpoint=wanted, request_id=str(uuid4()), validate_only=dry_run)
        return service.CreateEndpoint(new).endpoint
    changed = api.Endpoint(name=wanted.name, spec=wanted.spec, etag=wanted.etag or before.etag)
    return service.UpdateEndpoint(api.UpdateEndpointRequest(endpoint=changed, validate_only=dry_run)).endpoint


def _watcher(
    client: Client, wanted: api.QueueWatcher, before: Resource | None, *, dry_run: bool
) -> api.QueueWatcher:
    service = client.queue_watchers
    if before is None:
        new = api.CreateQueueWatcherRequest(
            queue_watcher=wanted, request_id=str(uuid4()), validate_only=dry_run
        )
        return service.CreateQueueWatcher(new).queue_watcher
    changed = api.QueueWatcher(name=wanted.name, spec=wanted.spec, etag=wanted.etag or before.etag)
    request = api.UpdateQueueWatcherRequest(queue_watcher=changed, validate_only=dry_run)
    return service.UpdateQueueWatcher(request).queue_watcher


def _delete(client: Client, step: Step, *, dry_run: bool) -> Resource:
    resource = step.before
    if isinstance(resource, api.Endpoint):
        if not dry_run:
            client.endpoints.DeleteEndpoint(api.DeleteEndpointRequest(name=step.name, etag=resource.etag))
        return resource
    if not dry_run:
        client.queue_watchers.DeleteQueueWatcher(api.DeleteQueueWatcherRequest(name=step.name))
    return resource or api.QueueWatcher(name=step.name)


def manifest(resource: Resource | None) -> dict[str, object]:
    """A resource as a manifest, in which what is not stated does not stand; empty for none."""
    if resource is None:
        return {}
    return {"name": resource.name, "spec": MessageToDict(resource.spec)}


def changes(before: Resource | None, after: Resource | None) -> list[str]:
    """The fields that differ, as `spec.minReplicas: 0 -> 1`; `-` where a field is not stated."""
    one, other = dict(_flat(manifest(before))), dict(_flat(manifest(after)))
    paths = [*one, *(path for path in other if path not in one)]
    return [
        f"{path}: {one.get(path, '-')} -> {other.get(path, '-')}"
        for path in paths
        if one.get(path) != other.get(path)
    ]


def _flat(data: object, path: str = "") -> Iterator[tuple[str, object]]:
    if is_mapping(data) and data:
        for key, value in data.items():
            yield from _flat(value, f"{path}.{key}" if path else key)
    elif is_list(data) and data:
        for index, value in enumerate(data):
            yield from _flat(value, f"{path}[{index}]")
    else:
        yield path, data
