"""How each kind of resource is read, when it is as it should be, and how it stands in words."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message

from gpuscale.api.autoscaler.v1 import Endpoint
from gpuscale.cli.console import resources
from gpuscale.cli.console.cells import Column, word
from gpuscale.cli.views.allocator import RESERVATIONS
from gpuscale.cli.views.autoscaler import ADAPTERS, ENDPOINTS, REPLICAS, WATCHERS
from gpuscale.cli.views.monitor import nodes
from gpuscale.client import Client


class Kind(NamedTuple):
    """One kind of resource: how those of given names are read, what READY is to it, and its columns."""

    read: Callable[[Client, Sequence[str]], Sequence[Message]]
    ready: str
    """A selector; empty for endpoints, which have counts."""
    columns: Sequence[Column[Any]] = ()
    """Those that a resource fills by itself: none of GPUs, whose table takes more than the GPU."""

    def column(self, heading: str) -> Column[Any] | None:
        """The column of that heading, in any case."""
        return next((one for one in self.columns if one.heading.casefold() == heading.casefold()), None)


def _gpus(client: Client, typed: Sequence[str]) -> Sequence[Message]:
    return resources.gpus(resources.nodes(client), typed)


KINDS: Mapping[str, Kind] = {
    "nodes": Kind(resources.nodes, "state=ONLINE", nodes().columns),
    "gpus": Kind(_gpus, "state=OK"),
    "reservations": Kind(resources.reservations, "state=ACTIVE", RESERVATIONS.columns),
    "endpoints": Kind(resources.endpoints, "", ENDPOINTS.columns),
    "replicas": Kind(resources.replicas, "state=READY", REPLICAS.columns),
    "watchers": Kind(resources.watchers, "status.state=OK", WATCHERS.columns),
    "adapters": Kind(resources.adapters, "state=CONNECTED", ADAPTERS.columns),
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
