"""How each kind of resource is read, when it is as it should be, and how it stands in words."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message

from gpuscale.api.autoscaler.v1 import Endpoint
from gpuscale.cli import resources
from gpuscale.cli.jsonpath import Path, parse_path
from gpuscale.cli.views.cells import word
from gpuscale.cli.views.monitor import NODES
from gpuscale.client import Client

_LABELS = parse_path("labels")


class Kind(NamedTuple):
    """One kind of resource: how those of given names are read, where its labels are, and what READY is to it."""

    read: Callable[[Client, Sequence[str]], Sequence[Message]]
    ready: str
    """A selector; empty for endpoints, which have counts."""
    labels: Path = _LABELS


def _gpus(client: Client, typed: Sequence[str]) -> Sequence[Message]:
    return resources.gpus(resources.nodes(client), typed)


KINDS: Mapping[str, Kind] = {
    "nodes": Kind(resources.nodes, "state=ONLINE", NODES.labels),
    "gpus": Kind(_gpus, "state=OK"),
    "reservations": Kind(resources.reservations, "state=ACTIVE"),
    "endpoints": Kind(resources.endpoints, ""),
    "replicas": Kind(resources.replicas, "state=READY"),
    "watchers": Kind(resources.watchers, "status.state=OK"),
    "adapters": Kind(resources.adapters, "state=CONNECTED"),
}


def is_ready(endpoint: Endpoint) -> bool:
    """Whether as many replicas work as are aimed at."""
    return endpoint.status.ready_replicas >= endpoint.status.desired_replicas


def standing(item: Message) -> str:
    """How a resource stands, and why, in one line."""
    if isinstance(item, Endpoint):
        status = item.status
        counts = f"{status.ready_replicas} of {status.desired_replicas} replicas ready"
        return f"{counts}: {status.summary}" if status.summary else counts
    of: Any = item
    holder: Any = getattr(of, "status", of)
    found = word(holder, "state") if "state" in holder.DESCRIPTOR.fields_by_name else "there"
    why = next((str(why) for field in _WHY if (why := getattr(holder, field, ""))), "")
    return f"{found}: {why}" if why else found


_WHY = ("reason", "message", "end_reason")
