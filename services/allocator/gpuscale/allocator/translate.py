"""Translate between the messages of the contract and the allocator's values."""

from datetime import datetime, timedelta

from gpuscale.allocator.model import Ask, Order, Policy, Reservation, ReservedGpu, Score, State, Weights
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common import names, wire

_MIB = 1024 * 1024

_STATES = {
    State.PENDING: allocator_api.Reservation.STATE_PENDING,
    State.ACTIVE: allocator_api.Reservation.STATE_ACTIVE,
    State.RELEASED: allocator_api.Reservation.STATE_RELEASED,
    State.EXPIRED: allocator_api.Reservation.STATE_EXPIRED,
}
_POLICIES = {Policy.SPREAD: allocator_api.PlacementPolicy.PLACEMENT_POLICY_SPREAD}


def to_order(request: allocator_api.ReserveRequest, owner: str, defaults: AllocatorSettings) -> Order:
    """The order of a valid request; what it leaves open is filled in from the settings.

    The fingerprint covers every field but the request id, as the caller sent them, and the caller.

    Raises:
        InvalidArgumentError: a node's name is none.
    """
    request_id = request.request_id.lower()
    content = allocator_api.ReserveRequest()
    content.CopyFrom(request)
    content.ClearField("request_id")
    ttl = wire.optional_seconds(request, "ttl")
    return Order(
        request_id=request_id,
        fingerprint=f"{wire.fingerprint(content)} {owner}",
        holder=request.holder,
        owner=owner,
        ttl=defaults.default_ttl_seconds if ttl is None else ttl,
        labels=dict(request.labels),
        ask=_to_ask(request, defaults),
    )


def _to_ask(request: allocator_api.ReserveRequest, defaults: AllocatorSettings) -> Ask:
    weights = request.weights
    nodes = (names.parse(names.NODE, name, f"nodes[{i}]") for i, name in enumerate(request.nodes))
    return Ask(
        gpu_count=request.gpu_count,
        min_memory_bytes=(
            request.min_memory_bytes
            if request.HasField("min_memory_bytes")
            else defaults.default_min_memory_mib * _MIB
        ),
        max_utilization_percent=(
            request.max_utilization_percent
            if request.HasField("max_utilization_percent")
            else defaults.default_max_utilization_percent
        ),
        allow_unknown_utilization=request.allow_unknown_utilization,
        weights=Weights(
            weights.memory if weights.HasField("memory") else defaults.memory_weight,
            weights.utilization if weights.HasField("utilization") else defaults.utilization_weight,
        ),
        nodes=frozenset(ids["node"] for ids in nodes),
    )


def from_reservation(reservation: Reservation, now: float, wall: datetime) -> allocator_api.Reservation:
    """The message of a reservation, answered at `now` and `wall`."""
    message = allocator_api.Reservation(
        name=names.reservation_name(reservation.id),
        holder=reservation.holder,
        state=_STATES[reservation.state],
        fence=reservation.fence,
        gpus=[_from_gpu(gpu) for gpu in reservation.gpus],
        ttl=wire.to_duration(reservation.ttl),
        create_time=wire.to_timestamp(reservation.created),
        policy=_POLICIES[reservation.policy],
        request_id=reservation.request_id,
        owner=reservation.owner,
        labels=reservation.labels,
    )
    if reservation.live:
        remaining = max(0.0, reservation.deadline - now)
        message.remaining.CopyFrom(wire.to_duration(remaining))
        message.expire_time.CopyFrom(wire.to_timestamp(wall + timedelta(seconds=remaining)))
    if reservation.ended is not None:
        message.end_time.CopyFrom(wire.to_timestamp(reservation.ended))
    return message


def _from_gpu(gpu: ReservedGpu) -> allocator_api.ReservedGpu:
    return allocator_api.ReservedGpu(
        name=names.gpu_name(gpu.node, gpu.uuid),
        node=gpu.node,
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.model,
        simulated=gpu.simulated,
        score=_from_score(gpu.score),
    )


def _from_score(score: Score) -> allocator_api.GpuScore:
    parts = (
        allocator_api.ScorePart(name=part.name, value=part.value, weight=part.weight) for part in score.parts
    )
    return allocator_api.GpuScore(total=score.total, parts=parts, note=score.note)
