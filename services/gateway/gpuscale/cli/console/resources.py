"""Reading resources: whole lists, or the ones that were named.

A name may be written in full (`endpoints/jobs/replicas/r1`) or without its collections (`jobs/r1`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.client import Client, pages
from gpuscale.common import names
from gpuscale.common.errors import InvalidArgumentError, NotFoundError


class Named(Protocol):
    """A resource of the contract."""

    name: str


N = TypeVar("N", bound=Named)
_UUID = r"[A-Za-z]+-[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"


def full_name(pattern: str, typed: str) -> str:
    """The resource name of what was typed.

    Raises:
        InvalidArgumentError: it cannot be a name of that pattern.
    """
    if names.match(pattern, typed) is not None:
        return typed
    collections, ids = pattern.split("/")[::2], typed.split("/")
    name = "/".join(part for pair in zip(collections, ids, strict=False) for part in pair)
    if len(collections) != len(ids) or names.match(pattern, name) is None:
        short = "/".join(pattern.split("/")[1::2]).replace("{", "").replace("}", "").upper()
        raise InvalidArgumentError(f"{typed!r} is not a name; write {short} or {pattern}")
    return name


def chosen(items: Iterable[N], pattern: str, typed: Sequence[str]) -> list[N]:
    """The items of these names in their order; all items where no name is given.

    Raises:
        NotFoundError: one of them is not there.
    """
    if not typed:
        return list(items)
    by_name = {item.name: item for item in items}
    wanted = [full_name(pattern, name) for name in typed]
    for name in wanted:
        if name not in by_name:
            raise NotFoundError(f"{name} not found")
    return [by_name[name] for name in wanted]


def is_uuid(typed: str) -> bool:
    """Whether a text looks like the UUID of a GPU, such as GPU-6afcb721-67c0-5d87-a657-b17ffccbb12a."""
    return re.fullmatch(_UUID, typed) is not None


def named(typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """(resource names, UUIDs) of nodes and GPUs: `host-1`, `host-1/gpu-…`, or a UUID alone."""
    uuids = [one for one in typed if is_uuid(one)]
    others = [one for one in typed if one not in uuids]
    found = [
        one
        if names.match(names.NODE, one)
        else full_name(names.GPU if "/" in one else names.NODE, one.lower() if "/" in one else one)
        for one in others
    ]
    return found, uuids


def nodes(client: Client, typed: Sequence[str] = ()) -> list[monitor_api.Node]:
    """The nodes of these names, or all."""
    if typed:
        wanted = [monitor_api.GetNodeRequest(name=full_name(names.NODE, name)) for name in typed]
        return [client.fleet.GetNode(request).node for request in wanted]
    return [
        item for page in pages(client.fleet.ListNodes, monitor_api.ListNodesRequest()) for item in page.nodes
    ]


def gpus(of: Iterable[monitor_api.Node], typed: Sequence[str] = ()) -> list[types_api.Gpu]:
    """GPUs of these nodes, all or those of these names; here a name may be the UUID alone."""
    found = [gpu for node in of for gpu in node.snapshot.gpus]
    by_uuid = {gpu.uuid.lower(): gpu.name for gpu in found}
    return chosen(found, names.GPU, [by_uuid.get(name.lower(), name) for name in typed])


def reservations(
    client: Client, typed: Sequence[str] = (), *, holder: str = "", ended: bool = False
) -> list[allocator_api.Reservation]:
    """The reservations of these names, or all that are held, or those of one holder."""
    if typed:
        wanted = [
            allocator_api.GetReservationRequest(name=full_name(names.RESERVATION, name)) for name in typed
        ]
        return [client.allocator.GetReservation(request).reservation for request in wanted]
    request = allocator_api.ListReservationsRequest(holder=holder, show_ended=ended)
    return [item for page in pages(client.allocator.ListReservations, request) for item in page.reservations]


def holders(of: Iterable[allocator_api.Reservation]) -> Mapping[str, str]:
    """Who holds each reserved GPU: name of the GPU -> holder."""
    return {gpu.name: reservation.holder for reservation in of for gpu in reservation.gpus}


def endpoints(client: Client, typed: Sequence[str] = ()) -> list[autoscaler_api.Endpoint]:
    """The endpoints of these names, or all."""
    if typed:
        wanted = [autoscaler_api.GetEndpointRequest(name=full_name(names.ENDPOINT, name)) for name in typed]
        return [client.endpoints.GetEndpoint(request).endpoint for request in wanted]
    request = autoscaler_api.ListEndpointsRequest()
    return [item for page in pages(client.endpoints.ListEndpoints, request) for item in page.endpoints]


def replicas(
    client: Client, typed: Sequence[str] = (), *, endpoint: str = "", ended: bool = False
) -> list[autoscaler_api.Replica]:
    """The replicas of these names, or all, or those of one endpoint."""
    parent = full_name(names.ENDPOINT, endpoint) if endpoint else ""
    request = autoscaler_api.ListReplicasRequest(parent=parent, show_ended=ended or bool(typed))
    found = (item for page in pages(client.endpoints.ListReplicas, request) for item in page.replicas)
    return chosen(found, names.REPLICA, typed)


def watchers(client: Client, typed: Sequence[str] = ()) -> list[autoscaler_api.QueueWatcher]:
    """The queue watchers of these names, or all."""
    if typed:
        wanted = [
            autoscaler_api.GetQueueWatcherRequest(name=full_name(names.WATCHER, name)) for name in typed
        ]
        return [client.queue_watchers.GetQueueWatcher(request).queue_watcher for request in wanted]
    request = autoscaler_api.ListQueueWatchersRequest()
    return [
        item
        for page in pages(client.queue_watchers.ListQueueWatchers, request)
        for item in page.queue_watchers
    ]


def decisions(
    client: Client, typed: Sequence[str] = (), *, endpoint: str = "", limit: int = 20
) -> list[autoscaler_api.Decision]:
    """The decisions of these names, or the newest `limit`, newest first, of all endpoints or of one."""
    if typed:
        wanted = [autoscaler_api.GetDecisionRequest(name=full_name(names.DECISION, name)) for name in typed]
        return [client.decisions.GetDecision(request).decision for request in wanted]
    parent = full_name(names.ENDPOINT, endpoint) if endpoint else ""
    request = autoscaler_api.ListDecisionsRequest(parent=parent, page_size=limit)
    return list(
        islice(
            (item for page in pages(client.decisions.ListDecisions, request) for item in page.decisions),
            limit,
        )
    )


def adapters(client: Client, typed: Sequence[str] = ()) -> list[autoscaler_api.Adapter]:
    """The worker adapters of these names, or all."""
    request = autoscaler_api.ListAdaptersRequest()
    found = (item for page in pages(client.adapters.ListAdapters, request) for item in page.adapters)
    return chosen(found, names.ADAPTER, typed)


def cordons(client: Client, typed: Sequence[str] = ()) -> list[allocator_api.Cordon]:
    """The cordons of these nodes and GPUs, or all.

    Raises:
        NotFoundError: there is no cordon on one of them.
    """
    request = allocator_api.ListCordonsRequest()
    found = [item for page in pages(client.nodes.ListCordons, request) for item in page.cordons]
    by_name = {item.name: item for item in found}
    wanted = [spot_name(name) for name in typed]
    for name in wanted:
        if name not in by_name:
            raise NotFoundError(f"{name} is not cordoned: not found")
    return [by_name[name] for name in wanted] if typed else found


def spot_name(typed: str) -> str:
    """The resource name of a node or GPU, in full or without its collections.

    Raises:
        InvalidArgumentError: it cannot be either.
    """
    slashes = typed.count("/")
    if slashes == 3 or (slashes == 1 and not typed.startswith("nodes/")):
        return full_name(names.GPU, typed.lower())
    return full_name(names.NODE, typed)


def quotas(client: Client) -> list[allocator_api.Quota]:
    """The quotas of all tenants, and tenants without one that hold or wait for something."""
    request = allocator_api.ListQuotasRequest()
    return [item for page in pages(client.quotas.ListQuotas, request) for item in page.quotas]
