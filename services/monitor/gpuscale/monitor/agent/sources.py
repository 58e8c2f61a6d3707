"""Which GPUs the agent reads: real ones, simulated ones, or whichever the host has."""

import importlib.util
from collections.abc import Callable
from typing import Literal

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.monitor.agent.ports import GpuSource, GpuSourceError
from gpuscale.monitor.agent.simulated import SimulatedSource
from gpuscale.monitor.model.readings import DriverEvent, GpuSample, Inventory

SourceKind = Literal["nvml", "simulated", "auto"]


class AutoSource:
    """Real GPUs if the host has a driver when it is first opened, even one that fails; else simulated ones."""

    def __init__(self, real: GpuSource, simulated: GpuSource) -> None:
        self._real = real
        self._simulated = simulated
        self._chosen: GpuSource | None = None

    @property
    def simulated(self) -> bool:
        """Whether the simulated GPUs were chosen; False before the choice."""
        return self._chosen is self._simulated

    @property
    def outdated(self) -> bool:
        """As the chosen source says."""
        return (self._chosen or self._real).outdated

    def open(self) -> Inventory:
        """Choose if that is still to be done, and open.

        Raises:
            GpuSourceError: there is a driver, and it fails.
        """
        if self._chosen is not None:
            return self._chosen.open()
        self._chosen = self._real
        try:
            return self._real.open()
        except GpuSourceError as error:
            if not error.no_driver:
                raise
        self._real.close()
        self._chosen = self._simulated
        return self._simulated.open()

    def read(self, uuid: str) -> GpuSample:
        """Read one GPU of the last inventory."""
        return (self._chosen or self._real).read(uuid)

    def probe(self, uuid: str) -> None:
        """Ask one GPU of the last inventory a question."""
        (self._chosen or self._real).probe(uuid)

    def wait_event(self, timeout: float) -> DriverEvent | None:
        """Wait for an event of the chosen source."""
        return (self._chosen or self._real).wait_event(timeout)

    def interrupt(self) -> bool:
        """End the calls of the chosen source, where that can be done."""
        return (self._chosen or self._real).interrupt()

    def close(self) -> None:
        """Let go of the driver."""
        (self._chosen or self._real).close()


def make_source(
    kind: SourceKind, node: str, simulated_count: int, now: Callable[[], float], *, isolate: bool = False
) -> GpuSource:
    """The source of that kind; `isolate` has real GPUs read in a process of its own.

    Raises:
        FailedPreconditionError: `nvml` without nvidia-ml-py.
    """
    simulated = SimulatedSource(node, simulated_count, now)
    if kind == "simulated":
        return simulated
    if importlib.util.find_spec("pynvml") is None:
        if kind == "auto":
            return simulated
        raise FailedPreconditionError(
            "reading GPUs needs nvidia-ml-py: pip install 'gpuscale[agent]'", reason="NVML_NOT_INSTALLED"
        )
    real = _real_source(now, isolate=isolate)
    return real if kind == "nvml" else AutoSource(real, simulated)


def _real_source(now: Callable[[], float], *, isolate: bool) -> GpuSource:
    """Of this process, or of a child; only one of them loads pynvml here."""
    if isolate:
        from gpuscale.monitor.agent.isolated import IsolatedSource

        return IsolatedSource()
    from gpuscale.monitor.agent.nvml import NvmlSource

    return NvmlSource(now)
