"""A GPU source in a process of its own, which can be killed where a thread that is stuck in a driver cannot.

The parent never loads the driver's library. Each of its threads that calls the source has a connection of its own to the
child (a lane), which a thread there serves: what is stuck holds up nobody but who asked. When the child is killed, all
who wait for it are told at once. It dies with its parent, whatever way that goes (`isolated_child`).

Values are pickled: both ends are the same program, and the child is the parent's own.
"""

import os
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakSet, finalize

from gpuscale.monitor.agent.sources import GpuSourceError
from gpuscale.monitor.model.readings import DriverEvent, GpuSample, Inventory

MODULE = "gpuscale.monitor.agent.isolated_child"
# Twice that is longer than a release waits: a child that the kernel cannot end is one that still holds the driver.
END_SECONDS = 1.5


class _Lane:
    """The connection of one thread; closed when the thread has ended."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._connection = Connection(os.dup(end.fileno()))
        finalize(self, end.close)

    def ask(self, question: tuple[str, Any]) -> Any:
        """Send a question and wait for the answer. EOFError or OSError: the other end is gone."""
        self._connection.send(question)
        return self._connection.recv()

    def shut(self) -> None:
        """Wake the thread that waits here: nothing will come."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was faster

    def close(self) -> None:
        """Close it; no call may be out."""
        self._end.close()
        self._connection.close()


class ChildProcess:
    """A running child. Its calls block; `kill` does not, and ends them all."""

    def __init__(self) -> None:
        """Start it; it dies with the thread that makes this call, too, as PR_SET_PDEATHSIG goes by threads."""
        self._lanes: WeakSet[_Lane] = WeakSet()
        self._lock = threading.Lock()
        self._own = threading.local()
        self._killed = False
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid())]
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                self._control.close()
                raise GpuSourceError(
                    f"the process that reads the driver does not start: {error.strerror}"
                ) from error

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def call(self, method: str, argument: object = None) -> Any:
        """Call the child's source over this thread's lane; GpuSourceError of it, or if the child has ended."""
        try:
            answer = self._lane().ask((method, argument))
        except (EOFError, OSError) as error:
            how = "did not answer and was killed" if self._killed else "has ended"
            raise GpuSourceError(f"the process that reads the driver {how}") from error
        if isinstance(answer, GpuSourceError):
            raise answer
        return answer

    def kill(self) -> None:
        """Kill it, and wake those who wait for it even if the kernel cannot end it."""
        with self._lock:
            self._killed = True
            self._process.kill()
            for lane in self._lanes:
                lane.shut()

    def end(self) -> bool:
        """End it, while no call is pending; returns whether it is gone: one stuck in the kernel is not."""
        with self._lock:
            self._control.close()
            for lane in self._lanes:
                lane.close()
        if self._wait():
            return True
        self.kill()
        return self._wait()

    def _wait(self) -> bool:
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._own, "lane", None)
        if lane is None:
            with self._lock:
                if self._killed:
                    raise EOFError
                end, theirs = socket.socketpair()
                self._own.lane = lane = _Lane(end)
                self._lanes.add(lane)
                with theirs:
                    socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
        return lane


class IsolatedSource:
    """The GPUs of this host's NVIDIA driver, through a process that lives from `open` to `close`."""

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
        """Start the child and list its GPUs; GpuSourceError if it does not start, or finds no driver."""
        if self._child is not None:
            raise GpuSourceError(f"process {self._child.pid} is stuck in the driver and cannot be killed")
        self._child = ChildProcess()
        self._outdated = False
        found: Inventory = self._child.call("open")
        return found

    def read(self, uuid: str) -> GpuSample:
        """Have one GPU read. Raises GpuSourceError: the source has to be opened again."""
        sample: GpuSample
        sample, outdated = self._running().call("read", uuid)
        self._outdated = self._outdated or outdated
        return sample

    def probe(self, uuid: str) -> None:
        """Have one GPU asked a question. Raises GpuSourceError: the source has to be opened again."""
        self._running().call("probe", uuid)

    def wait_event(self, timeout: float) -> DriverEvent | None:
        """Wait for an event. Raises GpuSourceError: the child has ended."""
        event: DriverEvent | None = self._running().call("wait_event", timeout)
        return event

    def interrupt(self) -> bool:
        """Kill the child, which frees whoever waits for it."""
        if self._child is not None:
            self._child.kill()
        return True

    def close(self) -> None:
        """End the child. One that the kernel cannot end is kept, and no second one is started."""
        if self._child is not None and self._child.end():
            self._child = None

    def _running(self) -> ChildProcess:
        if self._child is None:
            raise GpuSourceError("the process that reads the driver is not there")
        return self._child
