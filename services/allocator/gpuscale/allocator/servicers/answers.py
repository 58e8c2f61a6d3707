"""Reservations, their GPUs and places in the queue as messages."""

from collections import OrderedDict
from datetime import datetime, timedelta
from functools import cache
from typing import TypeAlias

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.allocator.domain.jobs import JobMember, ReservedJob
from gpuscale.allocator.domain.model import EndCause, Policy, Reservation, ReservedGpu, Score, State
from gpuscale.allocator.domain.usage import UNREAD, ReservationUsage, UseState
from gpuscale.allocator.queueing.model import Foreseen, QueuePlace
from gpuscale.allocator.usecases.leases import Renewal
from gpuscale.api.allocator import v1 as api
from gpuscale.common import names, wire
from gpuscale.common.security.auth import for_caller

_CAUSES = {one: api.Reservation.EndCause.Value(f"END_CAUSE_{one.name}") for one in EndCause}
_LEASE_ERRORS = {name.removeprefix("LEASE_ERROR_"): value for name, value in api.LeaseError.items()}
_STATES = {one: api.Reservation.State.Value(f"STATE_{one.name}") for one in State}
_USE_STATES = {one: api.GpuUsage.State.Value(f"STATE_{one.name}") for one in UseState}
POLICIES = {one: api.PlacementPolicy.Value(f"PLACEMENT_POLICY_{one.name}") for one in Policy}
_NANOS = 1_000_000_000
REMEMBERED = 4096
"""Open reservations whose messages are cached; the oldest are dropped first."""
_Known: TypeAlias = tuple[tuple[ReservedGpu, ...], tuple[float, int], api.Reservation]
_known: OrderedDict[str, _Known] = OrderedDict()


def from_renewal(renewal: Renewal, now: float, wall: datetime) -> api.LeaseStatus:
    """The status of a lease, answered at `now` and `wall`."""
    status = api.LeaseStatus(name=names.reservation_name(renewal.lease.id), fence=renewal.lease.fence)
    one = renewal.reservation
    if one is not None:
        status.state = _STATES[one.state]
        status.message = one.end_reason
        if one.live:
            status.remaining.CopyFrom(wire.to_duration(max(0.0, one.deadline - now)))
        if one.revoke_at is not None:
            status.revoke_time.CopyFrom(_at(one.revoke_at, now, wall))
    if renewal.error is not None:
        status.error_reason = renewal.error.reason
        status.error = _LEASE_ERRORS.get(renewal.error.reason, api.LeaseError.LEASE_ERROR_UNAVAILABLE)
        status.message = for_caller(renewal.error).message
    return status


def from_reservation(
    reservation: Reservation, now: float, wall: datetime, usage: ReservationUsage | None = None
) -> api.Reservation:
    """The message of a reservation, answered at `now` and `wall`."""
    message = api.Reservation()
    put_reservation(message, reservation, now, wall)
    if usage is not None:
        gpus = (
            api.GpuUsage(
                uuid=uuid,
                state=_USE_STATES[one.state],
                memory_used_bytes=one.memory_bytes,
                utilization_percent=one.utilization_percent,
                outsider_pids=one.outsiders,
                outsider_memory_bytes=one.outsider_memory_bytes,
                quarantine=one.quarantine,
            )
            for uuid, one in usage.gpus.items()
            if one is not UNREAD
        )
        message.usage.CopyFrom(api.ReservationUsage(gpus=gpus, idle=usage.idle, overused=usage.over_used))
    return message


def put_reservation(message: api.Reservation, reservation: Reservation, now: float, wall: datetime) -> None:
    """Fill the message of a reservation in place; a separate message would be copied into the answer."""
    known = _known.pop(reservation.id, None)
    lasting = reservation.ttl, reservation.fence  # what rarely changes: these, and GPUs where one is lost
    if known is None or known[0] is not reservation.gpus or known[1] != lasting:
        made = api.Reservation()  # field by field, in half of the time
        made.name, made.fence = names.reservation_name(reservation.id), reservation.fence
        made.request_id, made.policy = reservation.request_id, POLICIES[reservation.policy]
        made.holder, made.owner, made.tenant = reservation.holder, reservation.owner, reservation.tenant
        made.preemptible, made.member_count = reservation.preemptible, reservation.member_count
        made.priority, made.cpu_milli = reservation.priority, reservation.cpu_milli
        made.host_memory_bytes = reservation.host_memory_bytes
        if reservation.labels:
            made.labels.update(reservation.labels)
        _put_seconds(made.ttl, reservation.ttl)
        wire.put_timestamp(made.create_time, reservation.created)
        if (wanted := reservation.wanted) and wanted.fence:  # not what may move and was granted at once
            made.asked_gpu_count = wanted.ask.member_count * wanted.ask.gpu_count
            if wanted.granted:
                wire.put_timestamp(made.grant_time, wanted.granted)
        for gpu in reservation.gpus:
            put_gpu(made.gpus.add(), gpu)
        known = reservation.gpus, lasting, made
    if reservation.ended is None:  # else it is seldom asked for again
        _known[reservation.id] = known
        if len(_known) > REMEMBERED:
            _known.popitem(last=False)
    message.CopyFrom(known[2])
    waits = reservation.ended is None and reservation.waiting
    message.state = api.Reservation.STATE_WAITING if waits else _STATES[reservation.state]
    if reservation.end_reason:
        message.end_reason = reservation.end_reason
    if cause := reservation.end_cause:
        message.end_cause = _CAUSES[cause]
    put_times(message, reservation, now, wall)
    if reservation.ended is not None:
        wire.put_timestamp(message.end_time, reservation.ended)
    if reservation.job is not None:
        message.job.CopyFrom(from_job(reservation.job, reservation))


def put_times(message: api.Reservation, reservation: Reservation, now: float, wall: datetime) -> None:
    """Set the fields that change with the clock alone."""
    if reservation.live:
        remaining = left if (left := reservation.deadline - now) > 0.0 else 0.0
        _put_seconds(message.remaining, remaining)
        wire.put_timestamp(message.expire_time, wall + timedelta(seconds=remaining))
    if reservation.revoke_at is not None:
        message.revoke_time.CopyFrom(_at(reservation.revoke_at, now, wall))
    if reservation.until is not None:
        message.limit_time.CopyFrom(_at(reservation.until, now, wall))


def from_job(job: ReservedJob, of: Reservation) -> api.Job:
    """The message of the job of a reservation."""
    lost = of.state in {State.EXPIRED, State.LOST}
    state = job.state(of.member_count, live=of.live, lost=lost, waiting=of.waiting)
    return api.Job(
        title=job.title,
        command=job.command,
        user=job.user,
        state=api.Job.State.Value(f"STATE_{state.name}"),
        exit_code=job.exit_code(of.member_count),
        members=map(_from_member, job.members),
        attempt=job.attempt,
        earlier=map(_from_member, job.earlier),
    )


def _from_member(one: JobMember) -> api.JobMember:
    return api.JobMember(
        member=one.member,
        node=one.node,
        pid=one.pid,
        start_time=wire.optional_timestamp(one.started),
        end_time=wire.optional_timestamp(one.ended),
        exit_code=one.exit_code,
        end_reason=one.end_reason,
        signal_time=wire.optional_timestamp(one.signalled),
        last_lines=one.last_lines,
    )


def to_member(message: api.JobMember) -> JobMember:
    """The state of a job member."""
    return JobMember(
        member=message.member,
        node=message.node,
        pid=message.pid,
        started=wire.to_datetime(message.start_time) if message.HasField("start_time") else None,
        ended=wire.to_datetime(message.end_time) if message.HasField("end_time") else None,
        exit_code=wire.or_else(message, "exit_code", None),
        end_reason=message.end_reason,
        signalled=wire.to_datetime(message.signal_time) if message.HasField("signal_time") else None,
        last_lines=tuple(message.last_lines),
    )


def _put_seconds(duration: Duration, seconds: float) -> None:
    """Set a Duration that is part of a message, not below 0."""
    duration.seconds, duration.nanos = divmod(round(seconds * _NANOS), _NANOS)


def _at(moment: float, now: float, wall: datetime) -> Timestamp:
    """A moment of CLOCK_BOOTTIME, converted to the wall clock."""
    return wire.to_timestamp(wall + timedelta(seconds=moment - now))


_NODE = "node"
"""Deprecated, for clients from before `node_name`."""


def put_gpu(message: api.ReservedGpu, gpu: ReservedGpu) -> api.ReservedGpu:
    """Fill the message of a GPU field by field, in a third of the time of making one and copying it."""
    message.name, message.node_name = names.gpu_name(gpu.node, gpu.uuid), names.node_name(gpu.node)
    setattr(message, _NODE, gpu.node)
    message.uuid, message.index = gpu.uuid, gpu.index
    message.model, message.simulated = gpu.model, gpu.simulated
    put_score(message.score, gpu.score)
    message.milli, message.member, message.lost = gpu.milli, gpu.member, gpu.lost
    if gpu.memory_bytes is not None:
        message.memory_bytes = gpu.memory_bytes
    return message


def put_score(message: api.GpuScore, score: Score) -> api.GpuScore:
    """Fill the message of a score, with its parts."""
    message.total, message.note = score.total, score.note
    for part in score.parts:
        of = message.parts.add()
        of.name, of.weight = part.name, part.weight
        if part.value is not None:
            of.value = part.value
    return message


@cache
def reason_to_wire(reason: str) -> api.NoRoomReason.ValueType:
    """The enum value of a no-room reason; unspecified for none."""
    return api.NoRoomReason.Value(f"NO_ROOM_REASON_{reason or 'UNSPECIFIED'}")


def put_place(message: api.QueuePlace, place: QueuePlace, now: float, since: float) -> None:
    """Fill the message of a place in the queue, at `now`, for a caller waiting since `since`."""
    obstacle = place.obstacle
    message.position, message.message, message.order = place.position, obstacle.message, place.order
    message.reason = reason_to_wire(obstacle.reason)
    _put_seconds(message.waited, max(0.0, now - since))
    put_estimate(message, place, now)


def put_estimate(message: api.QueuePlace | api.Job, place: QueuePlace, now: float) -> None:
    """Set the expected wait, if known."""
    best = place.foreseen or Foreseen(place.start)
    for suffix, at in (("", best.start), ("_low", best.earliest), ("_high", best.latest)):
        if at is not None:
            _put_seconds(getattr(message, f"estimated_wait{suffix}"), max(0.0, at - now))
