"""How collecting goes: times each snapshot on its way from the collector, and remembers when one was as it should be.

A GPU that the host has given away on purpose, such as to a virtual machine, is not expected, and nothing is held against it.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from gpuscale.common.runtime.clock import Clock
from gpuscale.monitor.agent.bus import Bus, pci_address
from gpuscale.monitor.model.readings import GpuState, GpuView, ReadingStatus, Snapshot

_WORKING = frozenset({GpuState.OK, GpuState.DEGRADED, GpuState.SLOW, GpuState.DIVIDED})
# Absent for a reason that says nothing against the GPU.
_EXCUSED = frozenset({ReadingStatus.NOT_SUPPORTED, ReadingStatus.NO_PERMISSION})


class CollectionMeter:
    """Stands between a collector and whoever has it collect.

    Args:
        collect: takes a snapshot.
        clock: what tells the time.
        bus: which GPUs are on the host's PCI bus, whatever NVIDIA's driver says.

    Attributes:
        newest: the newest snapshot; None before the first.
        duration: seconds that it took; None before the first.
        last_success: when the newest snapshot was taken that had every GPU, each of them answering, since the epoch;
            None for never.
        failures: readings that should have been there and were not, by reason, since the start.
    """

    def __init__(self, collect: Callable[[], Awaitable[Snapshot]], clock: Clock, bus: Bus) -> None:
        self._collect = collect
        self._clock = clock
        self._bus = bus
        self.newest: Snapshot | None = None
        self.duration: float | None = None
        self.last_success: float | None = None
        self.failures: Counter[ReadingStatus] = Counter()

    async def collect(self) -> Snapshot:
        """Take a snapshot."""
        began = self._clock.now()
        snapshot = await self._collect()
        self.duration = self._clock.now() - began
        self.newest = snapshot
        self.failures.update(
            absent.status
            for view in snapshot.gpus
            for absent in view.reading.absent
            if absent.status not in _EXCUSED
        )
        if self._bus.given_away or not self.succeeded():
            await asyncio.to_thread(self._bus.look)
        if self.succeeded():
            self.last_success = snapshot.sample_time.timestamp()
        return snapshot

    def expected(self) -> int:
        """How many GPUs there should be: those on the bus, or those that were found if they are more."""
        return max(self._on_bus(), self._found())

    def succeeded(self) -> bool:
        """Whether the newest snapshot has every GPU that is expected, and each answers."""
        if self.newest is None:
            return False
        all_given_away = bool(self._bus.gpus) and not self._on_bus()
        if self.newest.gpu_problem and not all_given_away:
            return False
        return self._found() >= self._on_bus() and all(view.state in _WORKING for view in self._views())

    def _on_bus(self) -> int:
        return len(self._bus.gpus - self._bus.given_away)

    def _found(self) -> int:
        """How many GPUs of the bus the newest snapshot has; MIG instances are on the bus as their GPU."""
        return len({view.identity.pci_bus_id or view.identity.uuid for view in self._views()})

    def _views(self) -> list[GpuView]:
        """The GPUs of the newest snapshot, but for those that are given away."""
        views = self.newest.gpus if self.newest is not None else ()
        return [view for view in views if pci_address(view.identity.pci_bus_id) not in self._bus.given_away]
