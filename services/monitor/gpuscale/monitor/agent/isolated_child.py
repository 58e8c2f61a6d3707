"""The program that reads the driver on behalf of an agent: `python -m gpuscale.monitor.agent.isolated_child FD PID`.

It imports nothing that only the agent needs. Lanes come over the socket FD; its end is the end of this program, and so is
that of process PID, its parent.
"""

import array
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

from gpuscale.monitor.agent.isolated import Json, event_out, inventory_out, receive, sample_out, send
from gpuscale.monitor.agent.nvml import NvmlSource
from gpuscale.monitor.agent.sources import GpuSource, GpuSourceError

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve lanes until the parent is gone."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):  # the parent says when this ends
        signal.signal(sent_to_all, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as control:
        serve(control, NvmlSource())
    os._exit(0)  # threads may be stuck in the driver for ever


def serve(control: socket.socket, source: GpuSource) -> None:
    """Serve each lane that comes over a socket in a thread, until the socket ends."""
    while (descriptor := _next_lane(control)) is not None:
        lane = socket.socket(fileno=descriptor)
        threading.Thread(target=_serve_lane, args=(lane, source), daemon=True).start()


def _serve_lane(lane: socket.socket, source: GpuSource) -> None:
    calls: dict[str, Callable[[Json], Json]] = {
        "open": lambda _: inventory_out(source.open()),
        "read": lambda uuid: [sample_out(source.read(uuid)), source.outdated],
        "probe": source.probe,
        "wait_event": lambda timeout: event_out(source.wait_event(timeout)),
    }
    with lane:
        while True:
            try:
                method, argument = receive(lane)
                send(lane, _answer(calls[method], argument))
            except (EOFError, OSError):
                return  # who asked is gone


def _answer(call: Callable[[Json], Json], argument: Json) -> Json:
    """The value and no error, or the error."""
    try:
        return [call(argument), None]
    except GpuSourceError as error:
        return [None, [error.problem, error.no_driver]]


def _next_lane(control: socket.socket) -> int | None:
    """The descriptor of a lane that the parent sends with one byte; None at the end."""
    descriptors = array.array("i")
    try:
        data, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(descriptors.itemsize))
    except OSError:
        return None
    for _, _, content in ancillary:
        descriptors.frombytes(content[: descriptors.itemsize])
    return descriptors[0] if data and descriptors else None


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL; at once where it has already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    main()
