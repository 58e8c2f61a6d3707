"""What services are added to."""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import grpc

from gpuscale.common.rpc import health


class HandlerCollector(grpc.aio.Server):
    """What services are added to: passes their handlers on as generic ones.

    Generated code registers every method a second time with gRPC core. A grpc.aio server then waits for as many calls as
    there are methods, which costs a fifth of its throughput with forty of them (measured with grpcio 1.85.1).
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Add handlers of whole services."""
        self._server.add_generic_rpc_handlers(tuple(generic_rpc_handlers))

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        """Nothing: the generic handlers do."""

    def add_insecure_port(self, address: str) -> int:
        """As of the server."""
        return self._server.add_insecure_port(address)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """As of the server."""
        return self._server.add_secure_port(address, server_credentials)

    async def start(self) -> None:
        """As of the server."""
        await self._server.start()

    async def stop(self, grace: float | None) -> None:
        """As of the server."""
        await self._server.stop(grace)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109
        """As of the server."""
        return await self._server.wait_for_termination(timeout)


class HandlerList(grpc.aio.Server):
    """What services are added to that somebody else serves: keeps their handlers by path."""

    def __init__(self) -> None:
        self.handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Nothing: each method comes by itself too."""

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        """Keep them."""
        for name, handler in method_handlers.items():
            self.handlers[f"/{service_name}/{name}"] = handler

    def add_insecure_port(self, address: str) -> int:
        """Refused: nobody listens here."""
        raise RuntimeError(f"handlers that are only kept cannot be served at {address}")

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:  # noqa: ARG002
        """Refused: nobody listens here."""
        raise RuntimeError(f"handlers that are only kept cannot be served at {address}")

    async def start(self) -> None:
        """Nothing."""

    async def stop(self, grace: float | None) -> None:
        """Nothing."""

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ARG002, ASYNC109
        """Nothing runs."""
        return True


def add_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Add the reflection service, which tells tools the contract of `services`."""
    reflection: Any = import_module("grpc_reflection.v1alpha.reflection")  # has no types
    names = [*services, health.SERVICE, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
