"""For programs that gpuscale starts as replicas: their GPUs, when to stop, and how to report readiness.

    with Worker() as worker:
        worker.admit()
        worker.ready()
        while not worker.draining.is_set():
            do_one_piece_of_work()

To stop a replica, gpuscale sends SIGTERM: it should take no more work, finish what it has, and exit with 0.
"""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Self, TypeAlias

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client.connection import connect
from gpuscale.client.this_host import AGENT_VARIABLE
from gpuscale.common.runtime.tasks import pid_namespace

READY_VARIABLE = "GPUSCALE_READY_FILE"
"""Names a file to create once the worker is ready, for a probe."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class Worker:
    """This process as a replica, or as started by `gpuscalectl run` or with `Lease.env`.

    In its block, SIGTERM and SIGINT only set `draining`. Enter it in the main thread.

    Attributes:
        replica: name of the replica; empty if it is none.
        endpoint: name of its endpoint; empty if it has none.
        reservation: name of its reservation; empty if unknown.
        gpu_uuids: its GPUs.
        fence: fence of the reservation; None without one.
        draining: set once it should take no more work.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: the process's by default. Raises ValueError: GPUSCALE_FENCE is not a number."""
        found = os.environ if environment is None else environment
        self.replica: str = found.get("GPUSCALE_REPLICA", "")
        self.endpoint: str = found.get("GPUSCALE_ENDPOINT", "")
        self.reservation: str = found.get("GPUSCALE_RESERVATION", "")
        self.gpu_uuids: list[str] = [uuid for uuid in found.get("GPUSCALE_GPU_UUIDS", "").split(",") if uuid]
        fence = found.get("GPUSCALE_FENCE", "")
        self.fence: int | None = int(fence) if fence else None
        self.draining: threading.Event = threading.Event()
        self._agent = found.get(AGENT_VARIABLE, "")
        self._ready_file = found.get(READY_VARIABLE, "")
        self._before: dict[signal.Signals, _Handler] = {}

    def admit(self, agent: str | None = None, *, lease_token: str = "") -> None:
        """Admit this process with this host's agent for its reservation, before it touches a GPU.

        Args:
            agent: address of the agent; GPUSCALE_WORK_ADDRESS by default. Does nothing without either, without GPUs or
                without a reservation.
            lease_token: token of the grant; admins and callers of this host's `up` need none.

        Raises:
            FailedPreconditionError: the reservation is over (reason RESERVATION_ENDED or FENCE_TOO_LOW): exit without
                touching the GPUs.
            PermissionDeniedError: the token is missing or wrong.
            GpuscaleError: the agent does not answer, or does not know the GPUs.
        """
        address = agent or self._agent
        if not address or self.fence is None or not self.reservation or not self.gpu_uuids:
            return
        request = monitor_api.AdmitWorkRequest(
            gpu_uuids=self.gpu_uuids,
            fence=self.fence,
            reservation=self.reservation,
            lease_token=lease_token,
            pid=os.getpid(),
            pid_namespace=pid_namespace(),
        )
        with connect(address) as client:
            client.work.AdmitWork(request)

    def ready(self) -> None:
        """Report readiness: creates the file named by GPUSCALE_READY_FILE. Raises OSError: the file cannot be created."""
        if self._ready_file:
            Path(self._ready_file).touch(mode=0o600)

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, lambda _number, _frame: self.draining.set())
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._ready_file:
            Path(self._ready_file).unlink(missing_ok=True)
