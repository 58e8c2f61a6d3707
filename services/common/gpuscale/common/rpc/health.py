"""The standard health service (grpc.health.v1): one status for the server, and one for each of its services."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final

import grpc

# grpcio-health-checking has no types.
_health: Final[Any] = import_module("grpc_health.v1.health")
_pb2: Final[Any] = import_module("grpc_health.v1.health_pb2")
_pb2_grpc: Final[Any] = import_module("grpc_health.v1.health_pb2_grpc")

SERVICE: Final[str] = _health.SERVICE_NAME


class Health:
    """Answers health checks: what `report` says, and NOT_SERVING from `stop` on. The server itself is SERVING until then."""

    def __init__(self) -> None:
        self._servicer: Any = _health.aio.HealthServicer()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the health service to a server."""
        _pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def report(self, services: Iterable[str], *, serving: bool) -> None:
        """Report services as SERVING or NOT_SERVING."""
        status = _pb2.HealthCheckResponse
        for service in services:
            await self._servicer.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self) -> None:
        """Report everything as NOT_SERVING, for ever."""
        await self._servicer.enter_graceful_shutdown()
