"""A GPU source in a process of its own, which can be killed where a thread that is stuck in a driver cannot.

The parent never loads the driver's library. Each of its threads that calls the source has a connection of its own to the
child (a lane), which a thread there serves: what is stuck holds up nobody but who asked. When the child is killed, all
who wait for it are told at once. It dies with its parent, whatever way that goes (`isolated_child`).

Values go as JSON, fields by their places: both ends are the same program of the same version.
"""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import fields
from typing import Any
from weakref import WeakSet, finalize

from gpuscale.monitor.agent.sources import GpuSourceError
from gpuscale.monitor.model.readings import (
    Absent,
    DriverEvent,
    GpuEventKind,
    GpuIdentity,
    GpuProcess,
    GpuReading,
    GpuSample,
    GpuState,
    Inventory,
    MissingGpu,
    ProcessKey,
    ReadingStatus,
    RecoveryAction,
)

# What `json.loads` gives; every use below says what it takes it for.
Json = Any

_PROCESSES = GpuReading._fields.index("processes")
_RECOVERY = GpuReading._fields.index("recovery_action")
_IDENTITY = tuple(field.name for field in fields(GpuIdentity))
_PROCESS = tuple(field.name for field in fields(GpuProcess))
_LINEAGE = _PROCESS.index("lineage")
_NVLINKS = _IDENTITY.index("nvlinks")
_ABSENT = GpuReading._fields.index("absent")


def encode(value: object) -> bytes:
    """A value of lists, texts and numbers."""
    return json.dumps(value, separators=(",", ":")).encode("utf-8")


def decode(data: bytes) -> Json:
    """What `encode` was given; tuples are lists."""
    return json.loads(data)


def inventory_out(inventory: Inventory) -> Json:
    """What was found when the source was opened."""
    gpus = [[getattr(gpu, name) for name in _IDENTITY] for gpu in inventory.gpus]
    return [
        gpus,
        inventory.driver_version,
        inventory.problem,
        inventory.has_events,
        [[one.index, one.pci_bus_id, one.problem] for one in inventory.missing],
    ]


def inventory_in(data: Json) -> Inventory:
    """The inventory that went out."""
    gpus, version, problem, has_events, missing = data
    lost = tuple(MissingGpu(*values) for values in missing)
    return Inventory([_identity(values) for values in gpus], version, problem, has_events, lost)


def sample_out(sample: GpuSample) -> Json:
    """A reading of one GPU."""
    reading: list[object] = list(sample.reading)
    processes, recovery = sample.reading.processes, sample.reading.recovery_action
    if processes is not None:
        reading[_PROCESSES] = [_process_out(process) for process in processes]
    reading[_RECOVERY] = None if recovery is None else recovery.name
    reading[_ABSENT] = [[one.field, one.status.name, one.detail] for one in sample.reading.absent]
    return [sample.state.name, reading, sample.link_ends, sample.calls, sample.refusals]


def sample_in(data: Json) -> GpuSample:
    """The sample that went out."""
    state, reading, ends, calls, refusals = data
    if reading[_PROCESSES] is not None:
        reading[_PROCESSES] = tuple(_process_in(values) for values in reading[_PROCESSES])
    if reading[_RECOVERY] is not None:
        reading[_RECOVERY] = RecoveryAction[reading[_RECOVERY]]
    reading[_ABSENT] = tuple(
        Absent(field, ReadingStatus[status], detail) for field, status, detail in reading[_ABSENT]
    )
    return GpuSample(GpuState[state], GpuReading(*reading), tuple(ends), calls, refusals)


def event_out(event: DriverEvent | None) -> Json:
    """What a driver said has happened; None for nothing."""
    return None if event is None else [event.uuid, event.kind.name, event.xid]


def event_in(data: Json) -> DriverEvent | None:
    """The event that went out."""
    if data is None:
        return None
    uuid, kind, xid = data
    return DriverEvent(uuid, GpuEventKind[kind], xid)


def _identity(values: Json) -> GpuIdentity:
    values[_NVLINKS] = tuple((uuid, count) for uuid, count in values[_NVLINKS])
    return GpuIdentity(*values)


def _process_out(process: GpuProcess) -> Json:
    values: list[object] = [getattr(process, name) for name in _PROCESS]
    values[_LINEAGE] = [[key.pid, key.started] for key in process.lineage]
    return values


def _process_in(values: Json) -> GpuProcess:
    values[_LINEAGE] = tuple(ProcessKey(pid, started) for pid, started in values[_LINEAGE])
    return GpuProcess(*values)


_LENGTH = struct.Struct("!I")


def send(lane: socket.socket, message: Json) -> None:
    """Send a message.

    Raises:
        OSError: the other end is gone.
    """
    data = encode(message)
    lane.sendall(_LENGTH.pack(len(data)) + data)


def receive(lane: socket.socket) -> Json:
    """Wait for a message.

    Raises:
        EOFError: the other end is gone.
        OSError: likewise.
    """
    return decode(_exactly(lane, *_LENGTH.unpack(_exactly(lane, _LENGTH.size))))


def _exactly(lane: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = lane.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


MODULE = "gpuscale.monitor.agent.isolated_child"
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
