"""`gpuscalectl apply`: create or change queue watchers and endpoints until they are as files say."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.output import Format, to_dict, write_lines
from gpuscale.cli.session import note, session_of
from gpuscale.common.errors import InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from gpuscale.api.autoscaler.v1 import Endpoint, QueueWatcher
    from gpuscale.cli.manifests import Resource
    from gpuscale.client import Client

SUFFIXES = frozenset({".yaml", ".yml", ".json"})


def apply(
    context: typer.Context,
    file: Annotated[
        list[str],
        typer.Option(
            "--file", "-f", metavar="FILE", help="A YAML file, a folder of them, or - for standard input."
        ),
    ],
) -> None:
    """Create or change queue watchers and endpoints until they are as the files say."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.manifests import parse

    # All files are read before anything is changed. Endpoints read watchers, so these come first.
    wanted = [resource for name in file for text, source in read(name) for resource in parse(text, source)]
    wanted.sort(key=lambda resource: isinstance(resource, api.Endpoint))
    session = session_of(context)
    applied: dict[str, list[dict[str, object]]] = {"queueWatchers": [], "endpoints": []}
    with session.connect() as client:
        for resource in wanted:
            result, what = _apply(client, resource)
            # Data is written at the end; if one of them fails, what was done before is still said.
            (write_lines if session.output.human else _notes)([f"{result.name} {what}"])
            applied["endpoints" if isinstance(result, api.Endpoint) else "queueWatchers"].append(
                to_dict(result)
            )
    if session.output.format is Format.NAME:
        write_lines([str(item["name"]) for items in applied.values() for item in items])
    elif not session.output.human:
        session.output.write_data(applied)
    if not wanted:
        note("nothing to apply")


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


def _apply(client: "Client", wanted: "Resource") -> "tuple[Resource, str]":
    from gpuscale.api.autoscaler import v1 as api

    return _endpoint(client, wanted) if isinstance(wanted, api.Endpoint) else _watcher(client, wanted)


def _endpoint(client: "Client", wanted: "Endpoint") -> "tuple[Endpoint, str]":
    from uuid import uuid4

    from gpuscale.api.autoscaler import v1 as api

    try:
        existing = client.endpoints.GetEndpoint(api.GetEndpointRequest(name=wanted.name)).endpoint
    except NotFoundError:
        new = api.CreateEndpointRequest(endpoint=wanted, request_id=str(uuid4()))
        return client.endpoints.CreateEndpoint(new).endpoint, "created"
    if existing.spec == wanted.spec:
        return existing, "unchanged"
    changed = api.Endpoint(name=wanted.name, spec=wanted.spec, etag=wanted.etag or existing.etag)
    updated = client.endpoints.UpdateEndpoint(api.UpdateEndpointRequest(endpoint=changed)).endpoint
    return updated, "unchanged" if updated.etag == existing.etag else "configured"


def _watcher(client: "Client", wanted: "QueueWatcher") -> "tuple[QueueWatcher, str]":
    from uuid import uuid4

    from gpuscale.api.autoscaler import v1 as api

    watchers = client.queue_watchers
    try:
        existing = watchers.GetQueueWatcher(api.GetQueueWatcherRequest(name=wanted.name)).queue_watcher
    except NotFoundError:
        new = api.CreateQueueWatcherRequest(queue_watcher=wanted, request_id=str(uuid4()))
        return watchers.CreateQueueWatcher(new).queue_watcher, "created"
    if existing.spec == wanted.spec:
        return existing, "unchanged"
    changed = api.QueueWatcher(name=wanted.name, spec=wanted.spec, etag=wanted.etag or existing.etag)
    updated = watchers.UpdateQueueWatcher(api.UpdateQueueWatcherRequest(queue_watcher=changed)).queue_watcher
    return updated, "unchanged" if updated.etag == existing.etag else "configured"
