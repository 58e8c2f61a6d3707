"""A GPU source in a child process, which unlike a thread can be killed when it is stuck in the driver.

The parent never loads the driver's library. Each calling thread has its own connection (a lane) to the child, where a thread
serves it, so a stuck call blocks only its caller. Killing the child ends all calls at once. The child dies with its parent
(`main`). Values are pickled, as both ends are the same program.
"""

import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import compress
from multiprocessing.connection import Connection
from operator import is_not
from typing import Any
from weakref import WeakSet, finalize

from gpuscale.monitor.agent.sources import GpuSource, GpuSourceError
from gpuscale.monitor.model.readings import DriverEvent, GpuReading, GpuSample, Inventory

# A release waits less than twice this long, so a child that the kernel cannot end still counts as holding the driver.
END_SECONDS = 1.5
_PARTS = len(GpuReading._fields) + len(GpuSample._fields)
"""Parts of a sample: those of its reading, which is one of its fields, the others, and `outdated`."""
_Change = list[tuple[int, Any]]
"""The places and values of parts that are others than the lane told last: most never change."""


class _Lane:
    """The connection of one thread, closed when the thread ends."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._connection = Connection(os.dup(end.fileno()))
        self.told: dict[str, list[Any]] = {}  # the parts of samples by UUID
        finalize(self, end.close)

    def ask(self, question: tuple[str, Any]) -> Any:
        """Send a question and wait for the answer. EOFError or OSError if the other end is gone."""
        self._connection.send_bytes(pickle.dumps(question))
        return pickle.loads(self._connection.recv_bytes())  # noqa: S301 - from our own child process

    def shut(self) -> None:
        """End a pending `ask`."""
        with suppress(OSError):  # the other end may have closed
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it. No call may be pending."""
        self._end.close()
        self._connection.close()


class ChildProcess:
    """A running child. Calls block; `kill` does not, and ends all calls."""

    def __init__(self) -> None:
        """Start it. It dies with the calling thread, as PR_SET_PDEATHSIG goes by threads."""
        self._lanes: WeakSet[_Lane] = WeakSet()
        self._lock = threading.Lock()
        self._own = threading.local()
        self._killed = False
        self._control, theirs = socket.socketpair()
        with theirs:
            ends = str(theirs.fileno()), str(os.getpid())
            command = [sys.executable, "-m", "gpuscale.monitor.agent.isolated", *ends]
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                self._control.close()
                problem = f"cannot start the process that reads the driver: {error.strerror}"
                raise GpuSourceError(problem) from error

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def call(self, method: str, argument: object = None) -> Any:
        """Call a method of the child's source. GpuSourceError as the source raises it, or if the child has ended."""
        try:
            answer = self.lane().ask((method, argument))
        except (EOFError, OSError) as error:
            how = "did not answer and was killed" if self._killed else "has ended"
            raise GpuSourceError(f"the process that reads the driver {how}") from error
        if isinstance(answer, GpuSourceError):
            raise answer
        return answer

    def kill(self) -> None:
        """Kill it and end all calls, even if the kernel cannot end the process."""
        with self._lock:
            self._killed = True
            self._process.kill()
            for lane in self._lanes:
                lane.shut()

    def end(self) -> bool:
        """End it, while no call is pending; returns False if it is stuck in the kernel."""
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

    def lane(self) -> _Lane:
        """The lane of the calling thread, made at its first question. EOFError if the child is to end."""
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
    """The GPUs of this host's NVIDIA driver, through a child process that lives from `open` to `close`."""

    simulated = False

    def __init__(self) -> None:
        self._child: ChildProcess | None = None
        self.outdated = False  # as of the newest reading

    @property
    def pid(self) -> int | None:
        """Process id of the child; None without one."""
        return None if self._child is None else self._child.pid

    def open(self) -> Inventory:
        """Start the child and list its GPUs. GpuSourceError if it does not start or finds no driver."""
        if self._child is not None:
            raise GpuSourceError(f"process {self._child.pid} is stuck in the driver and cannot be killed")
        self._child = ChildProcess()
        self.outdated = False
        found: Inventory = self._child.call("open")
        return found

    def read(self, uuid: str) -> GpuSample:
        """Read a GPU. GpuSourceError if the source must be reopened."""
        child = self._running()
        change: _Change = child.call("read", uuid)
        told = child.lane().told.setdefault(uuid, [None] * _PARTS)
        for place, value in change:
            told[place] = value
        *reading, state, ends, calls, refusals, outdated = told
        self.outdated = self.outdated or outdated
        return GpuSample(state, GpuReading._make(reading), ends, calls, refusals)

    def probe(self, uuid: str) -> None:
        """Probe a GPU. GpuSourceError if the source must be reopened."""
        self._running().call("probe", uuid)

    def wait_event(self, timeout: float) -> DriverEvent | None:
        """Wait for an event. GpuSourceError if the child has ended."""
        event: DriverEvent | None = self._running().call("wait_event", timeout)
        return event

    def interrupt(self) -> bool:
        """Kill the child, which ends all calls."""
        if self._child is not None:
            self._child.kill()
        return True

    def close(self) -> None:
        """End the child. If the kernel cannot end it, it is kept and no other is started."""
        if self._child is not None and self._child.end():
            self._child = None

    def _running(self) -> ChildProcess:
        if self._child is None:
            raise GpuSourceError("the process that reads the driver is not running")
        return self._child


_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve lanes over the socket FD, the first argument, until the parent, process PID, is gone."""
    from gpuscale.monitor.agent.nvml import NvmlSource  # never in the parent

    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    # The kernel kills this process when its parent dies, which may already have happened.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    for sent_to_all in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent ends this program
        signal.signal(sent_to_all, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as control:
        serve(control, NvmlSource())
    os._exit(0)  # threads may be stuck in the driver


def serve(control: socket.socket, source: GpuSource) -> None:
    """Serve each lane that comes over a socket, with one byte, in a thread, until the socket closes."""
    descriptors: list[int] = []
    with suppress(OSError):
        while descriptors := socket.recv_fds(control, 1, 1)[1]:
            threading.Thread(
                target=_serve_lane, args=(Connection(descriptors[0]), source), daemon=True
            ).start()


def _serve_lane(lane: Connection, source: GpuSource) -> None:
    told: dict[str, Sequence[object]] = {}

    def read(uuid: str) -> _Change:
        sample = source.read(uuid)
        before = told.get(uuid, [None] * _PARTS)
        now = told[uuid] = (*sample.reading, sample.state, *sample[2:], source.outdated)
        others = compress(enumerate(now), map(is_not, before, now))
        return [(place, value) for place, value in others if value != before[place]]

    calls: dict[str, Callable[[Any], object]] = {
        "open": lambda _: source.open(),
        "read": read,
        "probe": source.probe,
        "wait_event": source.wait_event,
    }
    with lane:
        while True:
            try:
                method, argument = pickle.loads(lane.recv_bytes())  # noqa: S301 - from our own parent
                try:
                    answer = calls[method](argument)
                except GpuSourceError as error:
                    answer = error
                lane.send_bytes(pickle.dumps(answer))
            except (EOFError, OSError):
                return  # the caller is gone


if __name__ == "__main__":
    main()
