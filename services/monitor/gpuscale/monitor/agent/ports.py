"""What the collector needs from the outside: somebody who reads GPUs, and somebody who reads the host.

Every method blocks and is called in worker threads only. `GpuSource.open` and `close` are never called while any
other method of the source runs; `read` is called for several GPUs at once, but never twice at once for one GPU.
"""

from typing import Protocol

from gpuscale.monitor.agent.model import GpuSample, HostIdentity, HostReading, Inventory


class GpuSourceError(Exception):
    """The GPUs of this host cannot be read at all; the text says why, such as "NVML: driver not loaded".

    `no_driver` is True where the host simply has no driver, False where one is there but fails.
    """

    def __init__(self, problem: str, *, no_driver: bool = False) -> None:
        super().__init__(problem)
        self.problem = problem
        self.no_driver = no_driver


class GpuSource(Protocol):
    """Reads the GPUs of this host."""

    @property
    def simulated(self) -> bool:
        """Whether no hardware stands behind what it reads."""
        ...

    def open(self) -> Inventory:
        """Find the GPUs; again after `close`, to find what a driver reload changed.

        Raises:
            GpuSourceError: no GPU can be read.
        """
        ...

    def read(self, uuid: str) -> GpuSample:
        """Read one GPU of the last inventory. A reading that fails is absent with its reason.

        Raises:
            GpuSourceError: the source must be closed and opened again before it can read anything.
        """
        ...

    def close(self) -> None:
        """Let go of the driver. Never raises."""
        ...


class HostSource(Protocol):
    """Reads the host."""

    def identity(self) -> HostIdentity:
        """What the host is."""
        ...

    def read(self) -> HostReading:
        """Read the host. A reading that fails is absent with its reason."""
        ...
