"""The GPU source that stands for the one in the child."""

from gpuscale.monitor.agent.isolated.codec import event_in, inventory_in, sample_in
from gpuscale.monitor.agent.isolated.process import ChildProcess
from gpuscale.monitor.agent.ports import GpuSourceError
from gpuscale.monitor.model.readings import DriverEvent, GpuSample, Inventory


class IsolatedSource:
    """The GPUs of this host's NVIDIA driver, through a process that is started by `open` and gone after `close`."""

    simulated = False

    def __init__(self) -> None:
        self._child: ChildProcess | None = None
        self._outdated = False

    @property
    def outdated(self) -> bool:
        """As the source in the child said with the newest reading."""
        return self._outdated

    @property
    def pid(self) -> int | None:
        """Process id of the child; None where there is none."""
        return None if self._child is None else self._child.pid

    def open(self) -> Inventory:
        """Start the child and list its GPUs.

        Raises:
            GpuSourceError: it does not start, or the one before cannot be ended, or it finds no driver.
        """
        if self._child is not None:
            raise GpuSourceError(f"process {self._child.pid} is stuck in the driver and cannot be killed")
        self._child = ChildProcess()
        self._outdated = False
        return inventory_in(self._child.call("open"))

    def read(self, uuid: str) -> GpuSample:
        """Have one GPU read.

        Raises:
            GpuSourceError: the source has to be opened again.
        """
        sample, outdated = self._running().call("read", uuid)
        self._outdated = self._outdated or outdated
        return sample_in(sample)

    def probe(self, uuid: str) -> None:
        """Have one GPU asked a question.

        Raises:
            GpuSourceError: the source has to be opened again.
        """
        self._running().call("probe", uuid)

    def wait_event(self, timeout: float) -> DriverEvent | None:
        """Wait for an event.

        Raises:
            GpuSourceError: the child has ended.
        """
        return event_in(self._running().call("wait_event", timeout))

    def interrupt(self) -> bool:
        """Kill the child, so that whoever waits for it is free."""
        if self._child is not None:
            self._child.kill()
        return True

    def close(self) -> None:
        """End the child. One that the kernel cannot end is kept, and no other is started beside it."""
        if self._child is not None and self._child.end():
            self._child = None

    def _running(self) -> ChildProcess:
        if self._child is None:
            raise GpuSourceError("the process that reads the driver is not there")
        return self._child
