"""What the dashboard knows: the latest state of everything. Pure.

A feed writes it, pages read it. Pages redraw only when `version` has changed. A number that was not read is None, never zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.client.states import gpu_state, marks, node_state
from gpuscale.dashboard.humanize import known, problems


@dataclass(frozen=True, slots=True)
class GpuSummary:
    """One GPU: its place, state, latest reading and holders.

    `held_milli` is how many thousandths of the GPU are reserved, by all `holders` together; `idle_milli` how many of them the
    allocator reports as idle.
    """

    node: str
    uuid: str
    index: int
    model: str
    state: str
    simulated: bool = False
    reading: types_api.GpuReading = field(default_factory=types_api.GpuReading)
    utilization: float | None = None  # percent of the time in which a kernel ran
    memory_used: float | None = None  # bytes
    memory_total: float | None = None
    temperature: float | None = None  # degrees Celsius
    power: float | None = None  # watts drawn
    power_limit: float | None = None
    holders: tuple[str, ...] = ()
    held_milli: int = 0
    idle_milli: int = 0

    @property
    def memory_percent(self) -> float | None:
        """Percent of the memory in use."""
        return _percent(self.memory_used, self.memory_total)

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
    troubles: dict[str, str] = field(default_factory=dict[str, str])
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

    def told(self, service: str, trouble: str) -> None:
        """Record that a service answers, and what it says is wrong with it; empty for nothing."""
        self.heard(service)
        if self.troubles.get(service, "") != trouble:
            self.troubles[service] = trouble
            self.changed()

    @property
    def wrong(self) -> list[str]:
        """What cannot be read and why, and what is wrong with services, in words."""
        return [*filter(None, (problems(self.problems), *self.troubles.values()))]

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
                        node=node.name.removeprefix("nodes/"),
                        uuid=gpu.uuid,
                        index=gpu.index,
                        model=gpu.model,
                        state=f"{state}: {gpu.quarantine}" if gpu.quarantine else state,
                        simulated=gpu.simulated,
                        reading=gpu.reading,
                        utilization=known(gpu.reading, "utilization_percent"),
                        memory_used=known(gpu.reading, "memory_used_bytes"),
                        memory_total=known(gpu.reading, "memory_total_bytes"),
                        temperature=known(gpu.reading, "temperature_celsius"),
                        power=known(gpu.reading, "power_watts"),
                        power_limit=known(gpu.reading, "power_limit_watts"),
                        holders=holders,
                        held_milli=milli,
                        idle_milli=idle,
                    )
                )
        return found
