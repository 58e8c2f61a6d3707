"""What an adapter is told: every replica of its own, and what should become of it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from gpuscale.autoscaler.domain.replicas import ENDED, Goal, Replica, ReplicaReport

HURRIED_DRAIN = 1.0
"""Seconds for a replica whose GPUs may be somebody else's by now."""


class Order(Enum):
    """What should become of a replica."""

    RUN = "RUN"
    STOP = "STOP"
    FORGET = "FORGET"


@dataclass(frozen=True, slots=True)
class DesiredReplica:
    """One line of the desired state; `replica` is `endpoints/{endpoint}/replicas/{replica}`."""

    replica: str
    order: Order
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
    """The desired state of one adapter, by name.

    Args:
        own: its replicas that have not ended, by name.
        reported: what it reported last, by name.
        strays: replicas that it reports for long enough and that are not known here; they are stopped.
    """
    lines = [_line(name, replica) for name, replica in own.items()]
    for name, report in reported.items():
        if name not in own and report.state in ENDED:
            lines.append(DesiredReplica(name, Order.FORGET))
        elif name not in own and name in strays:
            lines.append(DesiredReplica(name, Order.STOP))
    return tuple(sorted(lines, key=lambda line: line.replica))


def unknown_to(
    own: Collection[str], reported: Mapping[str, ReplicaReport], since: Mapping[str, float], now: float
) -> dict[str, float]:
    """Since when each living replica that an adapter reports has been unknown here."""
    living = (name for name, report in reported.items() if report.state not in ENDED and name not in own)
    return {name: since.get(name, now) for name in living}


def stopped(lines: Sequence[DesiredReplica]) -> frozenset[str]:
    """Names of the replicas that are told to stop."""
    return frozenset(line.replica for line in lines if line.order is Order.STOP)


def _line(name: str, replica: Replica) -> DesiredReplica:
    template, lease = replica.template, replica.lease
    return DesiredReplica(
        replica=name,
        order=Order.RUN if replica.goal is Goal.RUN else Order.STOP,
        template=template.template,
        parameters=template.parameters,
        gpu_uuids=lease.gpu_uuids if lease else (),
        gpu_count=template.gpu_count,
        fence=lease.fence if lease else 0,
        reservation=lease.reservation if lease else "",
        lease_token=lease.token if lease else "",
        drain_timeout=HURRIED_DRAIN if replica.hurry else template.drain_timeout,
        capability_set=replica.group.set,
        capabilities=replica.group.asked.capabilities,
    )
