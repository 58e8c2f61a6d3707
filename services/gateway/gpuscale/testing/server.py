"""The fake server: a fleet, an allocator and endpoints behind one address, with threads and without state on disk."""

from concurrent import futures
from types import TracebackType
from typing import Self

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.client import AsyncClient, Client, connect, connect_async
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.sizes import parse_size
from gpuscale.testing.allocator_servicer import FakeAllocator
from gpuscale.testing.endpoint_servicer import FakeEndpoints
from gpuscale.testing.handlers import Faults, Handlers
from gpuscale.testing.inventory import Inventory
from gpuscale.testing.ledger import Ledger
from gpuscale.testing.monitor_servicers import FakeFleet, FakeWork

_THREADS = 32
_State = allocator_api.Reservation.State


class FakeServer:
    """Serves on a free port of 127.0.0.1 while its block runs.

    What it does: reserve (whole GPUs, shares, gangs, waiting), renew, release, expire, list and watch; nodes; AdmitWork;
    endpoints with replicas that are ready at once. What it does not: quotas, priorities, scores, rules, queues. Requests
    are checked by the rules of the contract, as everywhere.

    Args:
        gpus: GPUs of each node.
        nodes: how many nodes: `node-0`, which is this host, `node-1` and so on.
        memory: memory of each GPU, such as `80GiB`.
        model: product name of each GPU.
    """

    def __init__(self, gpus: int = 4, nodes: int = 1, memory: str = "80GiB", model: str = "Fake GPU") -> None:
        self._inventory = Inventory()
        for number in range(nodes):
            self._inventory.add(f"node-{number}", gpus, parse_size(memory), model)
        self._ledger = Ledger(self._inventory)
        self._faults = Faults()
        self._endpoints = FakeEndpoints()
        self._pool = futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="fake server")
        self._server = grpc.server(self._pool)
        self._server.add_generic_rpc_handlers(
            (
                Handlers(
                    self._faults,
                    FakeAllocator(self._ledger),
                    FakeFleet(self._inventory, self._ledger),
                    FakeWork(self._inventory, self._ledger),
                    self._endpoints,
                ),
            )
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        """Where it listens."""

    def connect(self) -> Client:
        """A sync client of it."""
        return connect(self.address)

    def connect_async(self) -> AsyncClient:
        """An async client of it."""
        return connect_async(self.address)

    @property
    def reservations(self) -> list[allocator_api.Reservation]:
        """Every reservation there was, oldest first."""
        return self._ledger.all(ended=True)

    def expire(self, name: str) -> None:
        """A lease runs out now, as if nobody had renewed it.

        Raises:
            NotFoundError: there is no such reservation.
        """
        self._ledger.end(name, _State.STATE_EXPIRED, "not renewed in time")

    def cancel(self, name: str, reason: str = "taken away by an admin") -> None:
        """A reservation is taken away.

        Raises:
            NotFoundError: there is no such reservation.
        """
        self._ledger.end(name, _State.STATE_CANCELLED, reason)

    def lose(self, name: str) -> None:
        """The first GPU of a reservation vanishes from its node, and the reservation with it.

        Raises:
            NotFoundError: there is no such reservation.
        """
        with self._ledger.changed:
            uuid = self._ledger.shown(name).gpus[0].uuid
            self._inventory.remove(uuid)
            self._ledger.end(name, _State.STATE_LOST, f"{uuid} vanished from its node")

    def fail(self, method: str, error: GpuscaleError, times: int = 1) -> None:
        """The next calls of a method, such as `Reserve`, are answered with an error."""
        self._faults.plan(method, error, times)

    def hold_back_replicas(self) -> None:
        """From now on replicas that are desired are not ready until `set_ready` says so."""
        self._endpoints.ready_at_once = False

    def set_ready(self, endpoint: str, replicas: int) -> None:
        """So many replicas of an endpoint are READY.

        Raises:
            NotFoundError: there is no such endpoint.
        """
        self._endpoints.set_ready(endpoint, replicas)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait()
        self._pool.shutdown()
