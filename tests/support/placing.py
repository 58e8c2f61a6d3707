"""The placer for tests that have a list of nodes, and a slow, plain account of what it must answer."""

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from uuid import uuid4

from gpuscale.allocator.domain.model import (
    WHOLE,
    Ask,
    Gpu,
    Node,
    NodeState,
    Pick,
    Policy,
    Reservation,
    ReservedGpu,
    Score,
    State,
    Use,
    Weights,
)
from gpuscale.allocator.placing.constraints import Obstacle
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.policies import scored
from gpuscale.allocator.placing.refusal import Refusal
from tests.support.allocator_values import NOW, WALL
from tests.support.allocator_values import gpu as plain_gpu

NOTHING: frozenset[str] = frozenset()


def reservation(
    gpus: Iterable[ReservedGpu], *, name: str = "", ask: Ask | None = None, fence: int = 1, **fields: object
) -> Reservation:
    """A live reservation of these GPUs."""
    return Reservation(
        id=name or str(uuid4()), fence=fence, request_id="", fingerprint="", holder="", owner="",
        policy=Policy.SPREAD, gpus=tuple(gpus), ttl=60.0, state=State.ACTIVE, deadline=0.0, created=WALL,
        cpu_milli=ask.cpu_milli if ask else 0, host_memory_bytes=ask.host_memory_bytes if ask else 0,
        **({"labels": {}} | fields),  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def held_whole(nodes: Iterable[Node], uuids: Container[str]) -> Use:
    """What is held where somebody holds these GPUs, each whole."""
    use = Use()
    for node in nodes:
        for gpu in node.gpus:
            if gpu.uuid in uuids:
                one = ReservedGpu(node.id, gpu.uuid, gpu.index, gpu.model, gpu.simulated, Score(0.0, ()))
                use.hold(reservation([one], name=f"r-{gpu.uuid}"))
    return use


def take(of: Placer, use: Use, wish: Ask, *, name: str = "", fence: int = 1) -> Reservation:
    held = reservation(of.place(wish, NOW).gpus, name=name, ask=wish, fence=fence)
    use.hold(held)
    return held


def placer(nodes: Iterable[Node], use: Use | None = None, cordons: frozenset[str] = NOTHING) -> Placer:
    built = Placer(Use() if use is None else use)
    built.set_cordons(cordons)
    for node in nodes:
        built.apply_node(node)
    return built


def place(nodes: Sequence[Node], held: Container[str], wish: Ask, now: float) -> Pick | Refusal:
    """What a placer answers that knows these nodes, of whose GPUs some are held whole."""
    return placer(nodes, held_whole(nodes, held)).place(wish, now)


def obstacle(
    node: Node, gpu: Gpu, held: Container[str] | Use, ask: Ask, now: float, cordons: frozenset[str] = NOTHING
) -> Obstacle | None:
    """What is first in the way of a GPU, put plainly."""
    use = held if isinstance(held, Use) else held_whole([node], held)
    checks = (
        (Obstacle.NODE_NOT_SELECTED, bool(ask.nodes) and node.id not in ask.nodes),
        (Obstacle.NODE_NOT_SELECTED, node.id in ask.excluded_nodes),
        (Obstacle.LABELS_DIFFER, any(node.labels.get(key) != value for key, value in ask.node_labels)),
        (Obstacle.GPU_NOT_SELECTED, bool(ask.gpus) and gpu.uuid.lower() not in ask.gpus),
        (Obstacle.GPU_NOT_SELECTED, gpu.uuid.lower() in ask.excluded_gpus),
        (
            Obstacle.MODEL_DIFFERS,
            bool(ask.models) and not any(one.lower() in gpu.model.lower() for one in ask.models),
        ),
        (Obstacle.MIG_PROFILE_DIFFERS, gpu.mig_profile.lower() != ask.mig_profile.lower()),
        (Obstacle.MIG_PROFILE_DIFFERS, any(one.parent == gpu.uuid for one in node.gpus)),
        (Obstacle.NODE_NOT_ONLINE, node.state is NodeState.OFFLINE),
        (Obstacle.STALE, node.state is NodeState.STALE or now > gpu.fresh_until),
        (Obstacle.GPU_NOT_OK, bool(gpu.trouble)),
        (Obstacle.QUARANTINED, bool(gpu.quarantine)),
        (
            Obstacle.CORDONED,
            f"nodes/{node.id}" in cordons or gpu.uuid.lower() in cordons or gpu.parent.lower() in cordons,
        ),
        (Obstacle.NOT_APART, _beside(node, use, ask)),
        (Obstacle.HELD, _held_in_part(node, gpu, use) or _taken(gpu, use, ask)),
        (Obstacle.CPU_BELOW_MIN, _lacks(node.cpu_milli, use.node(node.id).cpu_milli, ask.cpu_milli)),
        (
            Obstacle.HOST_MEMORY_BELOW_MIN,
            _lacks(node.memory_total_bytes, use.node(node.id).memory_bytes, ask.host_memory_bytes),
        ),
    )
    found = next((one for one, hit in checks if hit), None)
    return found or _by_readings(gpu, use, ask)


def free_memory(gpu: Gpu, use: Use) -> int:
    """What is free of the memory of a GPU that reports it, less what holders of shares do not use yet."""
    free = gpu.memory_free_bytes or 0
    for name in use.gpu(gpu.uuid).reservations:
        one = use.live(name)
        held = sum(
            part.memory_bytes or gpu.memory_total_bytes or 0 for part in one.gpus if part.uuid == gpu.uuid
        )
        used = sum(process.memory_bytes or 0 for process in gpu.processes if process.reservation == one.id)
        free -= max(0, held - used)
    return max(0, free)


def best_node(nodes: Sequence[Node], use: Use, ask: Ask, now: float, cordons: frozenset[str]) -> str | None:
    """The node that must be picked for one member, by `spread`, `bestfit` or `firstfit`, one node after the other.

    Without GPUs only what is of the node is in the way, as for a GPU in whose way nothing is.
    """
    like = replace(
        plain_gpu("any", fresh_until=math.inf), model=" ".join(ask.models), mig_profile=ask.mig_profile
    )
    best: tuple[float, str] | None = None
    for node in sorted(nodes, key=lambda one: one.rank):
        looked = node.gpus if ask.gpu_count else (like,)
        fitting = [one for one in looked if obstacle(node, one, use, ask, now, cordons) is None]
        if len(fitting) < max(ask.gpu_count, 1):
            continue
        value = _value(node, fitting, use, ask, cordons)
        if best is None or value > best[0]:
            best = (value, node.id)
    return best and best[1]


def _value(node: Node, fitting: list[Gpu], use: Use, ask: Ask, cordons: frozenset[str]) -> float:
    if ask.policy is Policy.SPREAD and not ask.gpu_count:
        return -math.inf if node.cpu_milli is None else node.cpu_milli - use.node(node.id).cpu_milli
    if ask.policy is Policy.SPREAD:
        scores = sorted((_spread(gpu, use, ask) for gpu in fitting), reverse=True)[: ask.gpu_count]
        return sum(scores) / ask.gpu_count
    if ask.policy is Policy.FIRSTFIT:
        return 0.0
    free = sum(
        0 if _held_in_part(node, gpu, use) else WHOLE - use.gpu(gpu.uuid).milli
        for gpu in node.gpus
        if not gpu.mig_profile
        and not any(one.parent == gpu.uuid for one in node.gpus)
        and not (gpu.trouble or gpu.quarantine)
        and gpu.uuid.lower() not in cordons
    )
    left = 0.0
    if node.cpu_milli is not None:
        left = (node.cpu_milli - use.node(node.id).cpu_milli - ask.cpu_milli) / 128_000
    return math.floor(100 * (1 - 0.5 * (left + (free - ask.gpu_count * ask.gpu_milli) / 8_000)))


def _spread(gpu: Gpu, use: Use, ask: Ask) -> float:
    return scored(gpu, ask.weights, free_memory(gpu, use)).total


def _by_readings(gpu: Gpu, use: Use, ask: Ask) -> Obstacle | None:
    if gpu.memory_free_bytes is None or gpu.memory_total_bytes is None:
        return Obstacle.MEMORY_UNKNOWN
    least = ask.min_memory_bytes
    if ask.gpu_memory_bytes is not None:
        least = max(least, ask.gpu_memory_bytes)
    elif ask.gpu_milli < WHOLE:
        least = max(least, gpu.memory_total_bytes * ask.gpu_milli // WHOLE * 9 // 10)
    if free_memory(gpu, use) < least:
        return Obstacle.MEMORY_BELOW_MIN
    if use.gpu(gpu.uuid).milli:
        return None
    if gpu.utilization_percent is None:
        return None if ask.allow_unknown_utilization else Obstacle.UTILIZATION_UNKNOWN
    limit = ask.max_utilization_percent
    return Obstacle.UTILIZATION_TOO_HIGH if limit < 100 and gpu.utilization_percent >= limit else None


def explained(gpu: Gpu, weights: Weights) -> Score:
    """The spread score of a GPU that nobody shares."""
    return scored(gpu, weights, gpu.memory_free_bytes)


def _beside(node: Node, use: Use, ask: Ask) -> bool:
    return bool(ask.apart_from) and any(
        all(one.labels.get(key) == value for key, value in ask.apart_from)
        for one in use.reservations(node.id)
    )


def _held_in_part(node: Node, gpu: Gpu, use: Use) -> bool:
    """Whether the GPU that it is an instance of is held, or an instance of it, be it there or not."""
    held = [one for live in use.reservations(node.id) for one in live.gpus]
    return any(one.uuid == gpu.parent or one.parent == gpu.uuid for one in held)


def _taken(gpu: Gpu, use: Use, ask: Ask) -> bool:
    held = use.gpu(gpu.uuid).milli
    if ask.exclusive:
        return held > 0
    milli = ask.gpu_milli
    if ask.gpu_memory_bytes is not None and milli >= WHOLE:
        milli = min(max(ask.gpu_memory_bytes * WHOLE // max(gpu.memory_total_bytes or 0, 1), 1), WHOLE)
    return held + milli > WHOLE


def _lacks(total: int | None, held: int, wanted: int) -> bool:
    return wanted > 0 and (total is None or total - held < wanted)
