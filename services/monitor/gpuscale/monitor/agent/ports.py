"""What the collector needs from the outside: somebody who reads GPUs, and somebody who reads the host.

Every method blocks and is called in worker threads only; a property does not block. `GpuSource.open` and `close` are
never called while any other method of the source runs. `read` and `probe` are called for several GPUs at once, but
never twice at once for one GPU; `wait_event` runs beside them in a thread of its own.
"""

from typing import Protocol

from gpuscale.monitor.model.readings import DriverEvent, GpuSample, HostIdentity, HostReading, Inventory


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

    @property
    def outdated(self) -> bool:
        """Whether what `open` found is known to have changed, such as the MIG instances of a GPU."""
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

    def probe(self, uuid: str) -> None:
        """Ask a GPU of the last inventory one cheap question. Any answer will do, a refusal too.

        Raises:
            GpuSourceError: as in `read`.
        """
        ...

    def wait_event(self, timeout: float) -> DriverEvent | None:
        """Wait at most `timeout` seconds for the next event of any GPU; None where there was none in time.

        Only where the inventory says that there are events.
        """
        ...

    def interrupt(self) -> bool:
        """End every call that is out, with a GpuSourceError, so that the source can be opened again.

        Returns whether that can be done at all, which it cannot where the driver is called in this process. Does not
        block, and may be called at any time.
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
