"""How a container is known to be ours: its name and its labels, both, so that nothing else is ever touched. Pure.

Labels alone would not do: an image that somebody commits from one of our containers hands its labels on to every
container that is made of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from gpuscale.autoscaler.adapters.templates import ReplicaOrder
from gpuscale.common import names

ADAPTER = "gpuscale.adapter"
ENDPOINT = "gpuscale.endpoint"
REPLICA = "gpuscale.replica"
FENCE = "gpuscale.fence"
GPU_UUIDS = "gpuscale.gpu-uuids"

_DIGEST_LENGTH = 10


def container_name(adapter: str, replica: str) -> str:
    """The one name that a replica's container has: the ids for people, and a digest that keeps any two apart.

    Raises:
        InvalidArgumentError: that is no name of a replica.
    """
    ids = names.parse(names.REPLICA, replica, "replica")
    digest = hashlib.sha256(f"{adapter} {replica}".encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"gpuscale-{ids['endpoint']}-{ids['replica']}-{digest}"


def labels(adapter: str, order: ReplicaOrder) -> dict[str, str]:
    """What a replica's container carries: whose it is, which replica it is, and the GPUs it was started for."""
    return {
        ADAPTER: adapter,
        ENDPOINT: order.endpoint,
        REPLICA: order.replica,
        FENCE: str(order.fence),
        GPU_UUIDS: ",".join(order.gpu_uuids),
    }


def owned(adapter: str, called: Iterable[str], marked: Mapping[str, str]) -> str | None:
    """The replica that a container is for; None where it is not this adapter's.

    Args:
        adapter: id of the adapter.
        called: names of the container; engines put a slash before them.
        marked: its labels.
    """
    replica = marked.get(REPLICA, "")
    if marked.get(ADAPTER) != adapter or names.match(names.REPLICA, replica) is None:
        return None
    mine = container_name(adapter, replica)
    return replica if any(name.removeprefix("/") == mine for name in called) else None
