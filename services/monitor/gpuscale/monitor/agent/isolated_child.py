"""The program that reads the driver for an agent: `python -m gpuscale.monitor.agent.isolated_child FD PID`.

It receives lanes over the socket FD, and exits when that closes or its parent, process PID, dies. It imports only what reading
needs.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from gpuscale.monitor.agent.nvml import NvmlSource
from gpuscale.monitor.agent.sources import GpuSource, GpuSourceError

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve lanes until the parent is gone."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    # The kernel kills this process when its parent dies, which may already have happened.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):  # the parent ends this program
        signal.signal(sent_to_all, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as control:
        serve(control, NvmlSource())
    os._exit(0)  # threads may be stuck in the driver


def serve(control: socket.socket, source: GpuSource) -> None:
    """Serve each lane that comes over a socket, with one byte, in a thread, until the socket closes."""
    descriptors: list[int] = []
    with contextlib.suppress(OSError):
        while descriptors := socket.recv_fds(control, 1, 1)[1]:
            threading.Thread(
                target=_serve_lane, args=(Connection(descriptors[0]), source), daemon=True
            ).start()


def _serve_lane(lane: Connection, source: GpuSource) -> None:
    calls: dict[str, Callable[[Any], object]] = {
        "open": lambda _: source.open(),
        "read": lambda uuid: (source.read(uuid), source.outdated),
        "probe": source.probe,
        "wait_event": source.wait_event,
    }
    with lane:
        while True:
            try:
                method, argument = lane.recv()
                try:
                    answer = calls[method](argument)
                except GpuSourceError as error:
                    answer = error
                lane.send(answer)
            except (EOFError, OSError):
                return  # the caller is gone


if __name__ == "__main__":
    main()
