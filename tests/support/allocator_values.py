"""Builders of allocator values with sensible defaults, so that a test names only what it is about."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from gpuscale.allocator.domain.model import Ask, Gpu, Node, NodeState, Order, ReservedGpu, Score
from gpuscale.api.allocator import v1 as api
from gpuscale.common.wire import to_duration

MIB = 1024 * 1024
NOW = 1000.0
"""The time of a test, in seconds of CLOCK_BOOTTIME."""
WALL = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)


def gpu(uuid: str = "GPU-a", *, total: int | None = 80_000, free: int | None = 80_000, **fields: Any) -> Gpu:
    """A GPU that anybody may have; `total` and `free` are in MiB, and `utilization` is in percent."""
    return Gpu(
        uuid=uuid,
        index=fields.pop("index", 0),
        model="Test GPU",
        simulated=True,
        memory_total_bytes=None if total is None else total * MIB,
        memory_free_bytes=None if free is None else free * MIB,
        utilization_percent=fields.pop("utilization", 0.0),
        **{"trouble": "", "quarantine": "", "fresh_until": NOW + 3} | fields,
    )


def node(
    name: str = "n0", *gpus: Gpu, rank: int = 0, state: NodeState = NodeState.ONLINE, reported: bool = True
) -> Node:
    return Node(name, rank, state, gpus, reported)


def plain_node(name: str, count: int, *, rank: int = 0) -> Node:
    """A node with `count` equal free GPUs, `<name>-0` and so on."""
    return node(name, *(gpu(f"{name}-{index}", index=index) for index in range(count)), rank=rank)


def ask(
    count: int = 1,
    *,
    memory: int = 0,
    utilization: float = 100.0,
    unknown: bool = False,
    nodes: Iterable[str] = (),
) -> Ask:
    """An ask; `memory` is in MiB."""
    return Ask(count, memory * MIB, utilization, unknown, nodes=frozenset(nodes))


def order(
    request_id: str | None = None, *, fingerprint: str = "f", ttl: float = 60.0, owner: str = "ann"
) -> Order:
    """An order of Ann for one GPU."""
    return Order(request_id or str(uuid4()), fingerprint, "job", owner, ttl, {}, ask())


def reserved(
    uuid: str, *, node: str = "n0", index: int = 0, milli: int = 1000, memory: int | None = None
) -> ReservedGpu:
    """A GPU as a reservation names it; `memory` is in MiB."""
    held = None if memory is None else memory * MIB
    return ReservedGpu(
        node, uuid, index, "Test GPU", simulated=True, score=Score(1.0, ()), milli=milli, memory_bytes=held
    )


ASK_FIELDS = frozenset(api.Ask.DESCRIPTOR.fields_by_name)


def reserve_request(
    count: int = 1, *, ttl: float | None = None, memory: int | None = None, **fields: object
) -> api.ReserveRequest:
    """A request of an id of its own; `memory` is in MiB, further fields are those of the request or of its ask."""
    of_ask = {name: fields.pop(name) for name in ASK_FIELDS & fields.keys()}
    if memory is not None:
        of_ask["min_memory_bytes"] = memory * MIB
    return api.ReserveRequest(
        ask=api.Ask(gpu_count=count, **of_ask),
        ttl=None if ttl is None else to_duration(ttl),
        **({"request_id": str(uuid4()), "holder": "test"} | fields),
    )
