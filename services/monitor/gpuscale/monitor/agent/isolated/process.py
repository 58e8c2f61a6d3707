"""The child process as the parent holds it: lanes to it, and an end to it."""

import os
import socket
import subprocess
import sys
import threading
from weakref import WeakSet, finalize

from gpuscale.monitor.agent.isolated.codec import Json
from gpuscale.monitor.agent.isolated.lane import receive, send
from gpuscale.monitor.agent.ports import GpuSourceError

MODULE = "gpuscale.monitor.agent.isolated.child"
# Twice that is longer than a release waits: a child that the kernel cannot end is one that still holds the driver.
END_SECONDS = 1.5


class _Lane:
    """The connection of one thread; closed when the thread has ended."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        finalize(self, end.close)

    def shut(self) -> None:
        """Tell the thread that waits here that nothing comes any more."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was faster


class ChildProcess:
    """A running child. Its calls block; `kill` does not, and ends them all."""

    def __init__(self) -> None:
        """Start it.

        PR_SET_PDEATHSIG goes by threads: the child dies with the thread that makes this call, too.

        Raises:
            GpuSourceError: it cannot be started.
        """
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

    def call(self, method: str, argument: Json = None) -> Json:
        """Have the source of the child do something, over the lane of this thread.

        Raises:
            GpuSourceError: the source says so, or the child has ended.
        """
        try:
            lane = self._lane()
            send(lane.socket, [method, argument])
            value, error = receive(lane.socket)
        except (EOFError, OSError) as error:
            how = "did not answer and was killed" if self._killed else "has ended"
            raise GpuSourceError(f"the process that reads the driver {how}") from error
        if error is not None:
            problem, no_driver = error
            raise GpuSourceError(problem, no_driver=no_driver)
        return value

    def kill(self) -> None:
        """Kill it, and tell those who wait for it even if the kernel cannot end it."""
        with self._lock:
            self._killed = True
            self._process.kill()
            for lane in self._lanes:
                lane.shut()

    def end(self) -> bool:
        """End it, while no call is out; whether it is gone, which it is not while it is stuck in the kernel."""
        with self._lock:
            self._control.close()
            for lane in self._lanes:
                lane.socket.close()
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
