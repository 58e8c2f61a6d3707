"""The states of a replica and their transitions. Pure.

    PENDING ──assigned──> STARTING ──> READY
       │                     │           │
       │                     └─────┬─────┘
    asked to stop            asked to stop ──> DRAINING ──reported──> STOPPED
       └──> STOPPED          ended by itself ──────────────────────> FAILED

A replica that an adapter was told of only ends by that adapter's report, never by silence. `UNKNOWN` is shown while the adapter
is silent and never stored. The intent, with the id of its Reserve request, is on disk before any action.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import Enum

from gpuscale.autoscaler.domain.inputs import NO_GROUP, GroupOfReplica, WorkerGroup
from gpuscale.autoscaler.domain.spec import ReplicaTemplate

ASSUMED_DRAIN = 60.0
"""Most seconds for a replica without a drain timeout to finish before its GPUs are revoked."""
SAME_MOMENT = 1.0
"""Seconds by which two answers about the same moment may differ."""
MOST_AT_ONCE = 8
"""Most pending questions to one adapter."""


class ReplicaState(Enum):
    """The state of a replica."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    READY = "READY"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"


ENDED = frozenset({ReplicaState.STOPPED, ReplicaState.FAILED})


class EndReason(Enum):
    """Why a replica ended, or will end."""

    SCALED_IN = "SCALED_IN"
    ENDPOINT_DELETED = "ENDPOINT_DELETED"
    TEMPLATE_CHANGED = "TEMPLATE_CHANGED"
    REVOKED = "REVOKED"
    LEASE_LOST = "LEASE_LOST"
    EXITED = "EXITED"
    ADAPTER_STOPPED = "ADAPTER_STOPPED"
    ADAPTER_FORGOTTEN = "ADAPTER_FORGOTTEN"
    ADAPTER_LACKS_IT = "ADAPTER_LACKS_IT"
    PREEMPTED = "PREEMPTED"


class Goal(Enum):
    """The desired state of a replica; FORGET is only told to adapters, of one that has ended."""

    RUN = "RUN"
    STOP = "STOP"
    FORGET = "FORGET"


@dataclass(frozen=True, slots=True)
class ReplicaLease:
    """The reservation that holds a replica's GPUs: `reservations/{reservation}`, its fence and GPU UUIDs.

    The token of the grant is for the agent that admits the replica.
    """

    reservation: str
    fence: int
    gpu_uuids: tuple[str, ...]
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Revocation:
    """A planned revocation of a replica's GPUs, for example by a drain of its node."""

    at: float  # when, in seconds since boot
    leave_at: float  # when it is asked to finish at the latest, in seconds since boot
    time: datetime  # when they are revoked, by the allocator's wall clock; for display
    reason: str  # why, in the allocator's words

    @property
    def leave_time(self) -> datetime:
        """`leave_at` by the allocator's wall clock."""
        return self.time - timedelta(seconds=self.at - self.leave_at)


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as stored."""

    endpoint: str  # id of its endpoint
    id: str  # its own id; never reused
    request_id: str  # UUID of its only Reserve request, which may be sent repeatedly
    template: ReplicaTemplate  # its template from the endpoint's spec, at its decision
    create_time: datetime  # when it was decided
    state: ReplicaState = ReplicaState.PENDING
    goal: Goal = Goal.RUN
    # ids of the nodes in its outstanding Reserve; else empty
    nodes: tuple[str, ...] = ()
    adapter: str = ""
    node: str = ""
    lease: ReplicaLease | None = None  # the lease of its GPUs; None if it needs none or has none yet
    owes_release: bool = (
        False  # it has ended, and the allocator has not acknowledged the end of its lease yet
    )
    hurry: bool = False  # it lost its GPUs and must stop at once
    pid: int = 0
    exit_code: int | None = None
    reason: str = ""
    ready_at: float | None = None  # when it was first ready, in seconds since boot
    ended_at: float | None = None  # when it ended, in seconds since boot; None after a reboot too
    end_time: datetime | None = None
    group: GroupOfReplica = NO_GROUP  # its capability set, and what its workers can do
    revocation: Revocation | None = None  # its planned revocation, if any
    end_reason: EndReason | None = None  # why it ended, or will; None while it should run

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.state in ENDED

    @property
    def aimed_at(self) -> bool:
        """Whether it counts towards the wanted number."""
        return not self.ended and self.goal is Goal.RUN

    @property
    def leaving(self) -> bool:
        """Whether it only runs until it is replaced, or its deadline."""
        return self.aimed_at and self.revocation is not None

    @property
    def granted(self) -> bool:
        """Whether it counts and has all the GPUs it needs: reserved ones, or those of its adapter's engine."""
        has_gpus = self.template.gpu_count == 0 or self.lease is not None or bool(self.adapter)
        return self.aimed_at and has_gpus


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment on both clocks: `now` seconds since boot for computing, `wall` for display."""

    now: float
    wall: datetime


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica as its adapter sees it; `workers`: what they can do, if known."""

    state: ReplicaState
    pid: int = 0
    exit_code: int | None = None
    reason: str = ""
    workers: WorkerGroup | None = None


def assigned(replica: Replica, adapter: str, node: str, lease: ReplicaLease | None) -> Replica:
    """Its adapter is chosen and its GPUs are reserved: from here on the adapter is told to run it."""
    return replace(
        replica, state=ReplicaState.STARTING, nodes=(), adapter=adapter, node=node, lease=lease, reason=""
    )


def asked_to_stop(
    replica: Replica, reason: str, at: Moment, *, why: EndReason = EndReason.SCALED_IN, hurry: bool = False
) -> Replica:
    """Ask it to finish its work and stop; a replica that no adapter was told of stops here.

    A replica with an outstanding Reserve stays PENDING until it is known what there is to release.
    """
    if replica.ended or (replica.goal is Goal.STOP and replica.hurry >= hurry):
        return replica
    stopping = replace(replica, goal=Goal.STOP, reason=reason, end_reason=why, hurry=hurry)
    if replica.state is not ReplicaState.PENDING:
        return replace(stopping, state=ReplicaState.DRAINING)
    return stopping if replica.nodes else ended(stopping, ReplicaState.STOPPED, reason, at)


def revoked(replica: Replica, at: float | None, time: datetime, reason: str, now: float) -> Replica:
    """Plan the revocation of its GPUs `at` (None: cancel it); returns the same replica if nothing changes.

    It is asked to finish its drain timeout before that; without one, with half of the remaining time, or `ASSUMED_DRAIN`.
    """
    known = replica.revocation
    if at is None:  # once its deadline has passed, this is the last update
        over = known is None or known.at - SAME_MOMENT <= now
        return replica if over else replace(replica, revocation=None)
    if known is not None and known.reason == reason and abs(known.at - at) < SAME_MOMENT:
        return replica
    drain = replica.template.drain_timeout
    if drain is None:
        drain = min(ASSUMED_DRAIN, max(0.0, at - now) / 2)
    return replace(replica, revocation=Revocation(at, at - drain, time, reason))


def ended(
    replica: Replica, state: ReplicaState, reason: str, at: Moment, why: EndReason | None = None
) -> Replica:
    """End it; a lease that it has must be released. `why`: None keeps the reason of the request to stop."""
    return replace(
        replica,
        state=state,
        nodes=(),
        reason=reason,
        end_reason=why or replica.end_reason,
        owes_release=replica.lease is not None,
        ended_at=at.now,
        end_time=at.wall,
    )


def reported(replica: Replica, report: ReplicaReport, at: Moment) -> Replica:
    """Apply its adapter's report to a replica that has not ended.

    One that ended on its own has FAILED, whatever its exit code, unless its adapter stopped it because the adapter itself was
    told to end. One that should stop stays DRAINING until it has ended, even if its adapter has not heard of that yet.
    """
    group = replica.group
    if report.workers is not None:
        group = replace(group, reported=report.workers)
    seen = replace(replica, pid=report.pid, exit_code=report.exit_code, group=group)
    if report.state in ENDED:
        if replica.goal is Goal.STOP:
            why_and_how = filter(None, (replica.reason, report.reason))
            return ended(seen, report.state, "; ".join(why_and_how), at)
        if report.state is ReplicaState.STOPPED:
            reason = report.reason or "its adapter was told to end"
            return ended(seen, ReplicaState.STOPPED, reason, at, EndReason.ADAPTER_STOPPED)
        return ended(seen, ReplicaState.FAILED, report.reason or "it ended by itself", at, EndReason.EXITED)
    if replica.goal is Goal.STOP:
        return seen
    ready = report.state is ReplicaState.READY
    ready_at = at.now if ready and replica.ready_at is None else replica.ready_at
    return replace(seen, state=report.state, reason=report.reason, ready_at=ready_at)


def shown_state(replica: Replica, silent: bool) -> ReplicaState:
    """The state to show: UNKNOWN for a replica whose adapter is silent, since it may or may not run."""
    if silent and replica.adapter and not replica.ended:
        return ReplicaState.UNKNOWN
    return replica.state


HURRIED_DRAIN = 1.0
"""Seconds for a replica whose GPUs may have been granted to others."""


@dataclass(frozen=True, slots=True)
class DesiredReplica:
    """One line of the desired state; `replica` is `endpoints/{endpoint}/replicas/{replica}`."""

    replica: str
    goal: Goal
    template: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    gpu_uuids: tuple[str, ...] = ()
    fence: int = 0
    drain_timeout: float | None = None
    gpu_count: int = 0
    reservation: str = ""
    lease_token: str = field(default="", repr=False)
    capability_set: str = ""
    capabilities: Mapping[str, int] = field(default_factory=dict[str, int])


def desired_state(
    own: Mapping[str, Replica], reported: Mapping[str, ReplicaReport], strays: Collection[str]
) -> tuple[DesiredReplica, ...]:
    """The desired state of an adapter by name, from its live replicas and its report; `strays` are stopped."""
    lines = [
        DesiredReplica(
            replica=name,
            goal=replica.goal,
            template=replica.template.template,
            parameters=replica.template.parameters,
            gpu_uuids=lease.gpu_uuids if (lease := replica.lease) else (),
            gpu_count=replica.template.gpu_count,
            fence=lease.fence if lease else 0,
            reservation=lease.reservation if lease else "",
            lease_token=lease.token if lease else "",
            drain_timeout=HURRIED_DRAIN if replica.hurry else replica.template.drain_timeout,
            capability_set=replica.group.set,
            capabilities=replica.group.asked.capabilities,
        )
        for name, replica in own.items()
    ]
    for name, report in reported.items():
        if name not in own and report.state in ENDED:
            lines.append(DesiredReplica(name, Goal.FORGET))
        elif name not in own and name in strays:
            lines.append(DesiredReplica(name, Goal.STOP))
    return tuple(sorted(lines, key=lambda line: line.replica))


def unknown_to(
    own: Collection[str], reported: Mapping[str, ReplicaReport], since: Mapping[str, float], now: float
) -> dict[str, float]:
    """Since when each living replica that an adapter reports has been unknown here."""
    living = (name for name, report in reported.items() if report.state not in ENDED and name not in own)
    return {name: since.get(name, now) for name in living}


def stopped(lines: Sequence[DesiredReplica]) -> frozenset[str]:
    """Names of the replicas that are told to stop."""
    return frozenset(line.replica for line in lines if line.goal is Goal.STOP)


@dataclass(frozen=True, slots=True)
class LogPart:
    """Part of a replica's log, and its offset; `problem`: why there is none."""

    content: bytes = b""
    offset: int = 0
    problem: str = ""
