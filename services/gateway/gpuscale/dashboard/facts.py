"""What the dashboard knows: the latest state of everything, and how much of what is reserved is used. Pure.

A feed writes it, pages read it. Pages redraw only when `version` has changed. A number that was not read is None, never zero. The
services keep no history of idle reservations, so the dashboard counts while it runs; what it missed is a gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from statistics import fmean

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.client.states import gpu_state, marks, node_state


@dataclass(frozen=True, slots=True)
class GpuSummary:
    """One GPU: its place, state, latest reading and holders.

    `held_milli` is how many thousandths of the GPU are reserved, by all `holders` together; `idle_milli` how many of them the
    allocator reports as idle.
    """

    name: str
    node: str
    uuid: str
    index: int
    model: str
    state: str
    simulated: bool
    reading: types_api.GpuReading
    holders: tuple[str, ...] = ()
    held_milli: int = 0
    idle_milli: int = 0

    @property
    def utilization(self) -> float | None:
        """Percent of the time in which a kernel ran."""
        return self.reading.utilization_percent if self.reading.HasField("utilization_percent") else None

    @property
    def memory_used(self) -> int | None:
        """Bytes in use."""
        return self.reading.memory_used_bytes if self.reading.HasField("memory_used_bytes") else None

    @property
    def memory_total(self) -> int | None:
        """Bytes in total."""
        return self.reading.memory_total_bytes if self.reading.HasField("memory_total_bytes") else None

    @property
    def memory_percent(self) -> float | None:
        """Percent of the memory in use."""
        return _percent(self.memory_used, self.memory_total)

    @property
    def temperature(self) -> float | None:
        """Degrees Celsius."""
        return self.reading.temperature_celsius if self.reading.HasField("temperature_celsius") else None

    @property
    def power(self) -> float | None:
        """Watts drawn."""
        return self.reading.power_watts if self.reading.HasField("power_watts") else None

    @property
    def power_limit(self) -> float | None:
        """Power limit in watts."""
        return self.reading.power_limit_watts if self.reading.HasField("power_limit_watts") else None

    @property
    def power_percent(self) -> float | None:
        """Percent of the power limit drawn."""
        return _percent(self.power, self.power_limit)

    @property
    def label(self) -> str:
        """`node/index`, for display."""
        return f"{self.node}/{self.index}"


def _percent(part: float | None, whole: float | None) -> float | None:
    return 100.0 * part / whole if part is not None and whole else None


NOBODY: tuple[tuple[str, ...], int, int] = ((), 0, 0)


@dataclass(slots=True)
class Facts:
    """The latest of everything, by resource name."""

    version: int = 0
    problems: dict[str, str] = field(default_factory=dict[str, str])
    nodes: Mapping[str, monitor_api.Node] = field(default_factory=dict[str, monitor_api.Node])
    reservations: Collection[allocator_api.Reservation] = ()
    bookings: Collection[allocator_api.Booking] = ()
    cordons: Collection[allocator_api.Cordon] = ()
    endpoints: Collection[autoscaler_api.Endpoint] = ()
    replicas: Collection[autoscaler_api.Replica] = ()
    recordings: Collection[monitor_api.Recording] = ()
    events: Collection[monitor_api.HealthEvent] = ()

    def changed(self) -> None:
        """Mark the facts as changed, so that pages redraw."""
        self.version += 1

    def heard(self, source: str) -> None:
        """Record that `source` answers."""
        if self.problems.pop(source, None) is not None:
            self.changed()

    def lost(self, source: str, problem: str) -> None:
        """Record that `source` does not answer; its last facts stay."""
        if self.problems.get(source) != problem:
            self.problems[source] = problem
            self.changed()

    def gpus(self) -> list[GpuSummary]:
        """Every GPU, by node and index, with its holders."""
        # Holders, thousandths reserved and idle, by UUID.
        held: dict[str, tuple[tuple[str, ...], int, int]] = {}
        for reservation in self.reservations:
            if reservation.state == allocator_api.Reservation.STATE_ACTIVE:
                idle_uuids = {one.uuid for one in reservation.usage.gpus if one.state == one.STATE_IDLE}
                for part in reservation.gpus:
                    names, milli, idle = held.get(part.uuid, NOBODY)
                    more = part.milli or 1000
                    idle += more if part.uuid in idle_uuids else 0
                    held[part.uuid] = ((*names, reservation.holder), milli + more, idle)
        marked = marks(self.cordons)
        found: list[GpuSummary] = []
        for node in (self.nodes[name] for name in sorted(self.nodes)):
            online = node.state == monitor_api.NodeState.NODE_STATE_ONLINE
            for gpu in sorted(node.snapshot.gpus, key=lambda one: (one.index, one.uuid)):
                holders, milli, idle = held.get(gpu.uuid, NOBODY)
                state = gpu_state(gpu, marked) if online else node_state(node, marked)
                found.append(
                    GpuSummary(
                        name=gpu.name or f"{node.name}/gpus/{gpu.uuid.lower()}",
                        node=node.name.removeprefix("nodes/"),
                        uuid=gpu.uuid,
                        index=gpu.index,
                        model=gpu.model,
                        state=f"{state}: {gpu.quarantine}" if gpu.quarantine else state,
                        simulated=gpu.simulated,
                        holders=holders,
                        held_milli=milli,
                        idle_milli=idle,
                        reading=gpu.reading,
                    )
                )
        return found

    def replicas_of(self, endpoint: str) -> list[autoscaler_api.Replica]:
        """Replicas of `endpoints/{endpoint}`."""
        return [one for one in self.replicas if one.name.startswith(f"{endpoint}/")]


PERIOD = 10.0
"""Seconds between counts."""
KEPT = 8640
"""Counts kept: a day."""


@dataclass(frozen=True, slots=True)
class Count:
    """GPUs at one moment. A shared GPU counts by its reserved part, except in `total`."""

    at: float  # seconds since 1970
    total: float
    reserved: float
    used: float  # reserved GPUs weighted by their utilization, where that could be read


def count(gpus: Sequence[GpuSummary], at: float) -> Count:
    """Count GPUs at a moment."""
    held = [(gpu.held_milli / 1000.0, gpu.utilization) for gpu in gpus if gpu.held_milli]
    return Count(
        at=at,
        total=len(gpus),
        reserved=sum(share for share, _ in held),
        used=sum(share * used / 100.0 for share, used in held if used is not None),
    )


class FleetTally:
    """The counts of the last day."""

    def __init__(self) -> None:
        self._counts: deque[Count] = deque(maxlen=KEPT)

    def add(self, one: Count) -> None:
        """Keep a count, unless the clock was set back since the last one."""
        if not self._counts or one.at > self._counts[-1].at:
            self._counts.append(one)

    def since(self, start: float, end: float, step: float) -> list[Count]:
        """The counts from `start` to `end`, averaged over steps of equal length (at least PERIOD)."""
        steps = [list(same) for _, same in groupby(self._from(start, end), key=lambda one: one.at // step)]
        return [
            Count(
                at=same[0].at,
                total=fmean(one.total for one in same),
                reserved=fmean(one.reserved for one in same),
                used=fmean(one.used for one in same),
            )
            for same in steps
        ]

    def wasted_hours(self, start: float, end: float) -> float:
        """GPU hours reserved and not used. A count stands for the time until the next, at most PERIOD."""
        pairs = pairwise(self._from(start, end))
        lost = sum(max(0.0, one.reserved - one.used) * min(PERIOD, later.at - one.at) for one, later in pairs)
        return lost / 3600.0

    def _from(self, start: float, end: float) -> list[Count]:
        return [one for one in self._counts if start <= one.at <= end]
