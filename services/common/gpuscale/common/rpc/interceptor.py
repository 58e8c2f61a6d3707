"""The outermost interceptor of every server: what holds for every RPC, whatever its service does.

In this order: the caller is authenticated and its role checked against the contract; a call whose deadline has passed is
not begun; unary calls beyond the limit are turned away; the request is decoded and, where it is one message, validated;
a unary call without a deadline gets one. Whatever goes wrong then ends in a status with details, never in UNKNOWN and
never with the text of an exception.

Messages of request streams are decoded and not validated: see `gpuscale.common.rpc.validation`. Handlers without a request
deserializer (a gateway's, which forwards) get bytes as they came; all the rest holds for them too.

The handler that reaches gRPC is of the coroutine kind even for streams, so that whatever interrupts a stream, even while
it writes, is answered here and the servicer's generator is closed at once. Interceptors that iterate over what a stream
handler returns (as OpenTelemetry's does) must therefore stand inside of this one.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from gpuscale.common.rpc.guard import Guard, GuardSettings, Handler
from gpuscale.common.security.methods import find_method


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each handler in a `Guard`, once for each method that has a role."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._guarded: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The guarded handler of a method; None for a method that is not served (gRPC answers UNIMPLEMENTED)."""
        path = handler_call_details.method
        guarded = self._guarded.get(path)
        if guarded is not None:
            return guarded
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        info = find_method(path)
        guard = Guard(path, info, handler, self._settings)
        if info is not None:  # only methods that we know are kept: others may be any number
            self._guarded[path] = guard.handler
        return guard.handler
