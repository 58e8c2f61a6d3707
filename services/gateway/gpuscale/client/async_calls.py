"""What every call of an async client gets: a deadline where it has none, and errors of the tree."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from gpuscale.client.sync_calls import Explain, Limit
from gpuscale.common.errors import CancelledCallError, DeadlineExceededError, UnavailableError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.rpc.wrapped_channel import WrappedChannel


@asynccontextmanager
async def _errors(explain: Explain, limit: Limit) -> AsyncGenerator[None]:
    """Errors of the tree, and why nothing answers where that can be found out in the time of the call."""
    try:
        with rpc_errors():
            yield
    except UnavailableError as error:
        raise await asyncio.to_thread(explain, error, limit.left) from error.__cause__
    except DeadlineExceededError as error:
        raise limit.over(error) from error.__cause__


class AsyncCalls(WrappedChannel):
    """A channel whose calls raise errors of the tree; `timeout` seconds for a unary call that names none. Streams last."""

    def __init__(self, channel: grpc.aio.Channel, timeout: float, explain: Explain) -> None:
        def method(kind: str, methods: Sequence[Any]) -> _Method:
            return _Method(methods[0], timeout if kind == "unary_unary" else None, explain)

        super().__init__([channel], method)


class _Method:
    """A method of a stub."""

    def __init__(self, method: Any, timeout: float | None, explain: Explain) -> None:
        self._method = method
        self._timeout = timeout
        self._explain = explain

    def __call__(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> "_Call":
        timeout = self._timeout if timeout is None else timeout
        limit = Limit(timeout)
        try:
            call = self._method(*args, timeout=timeout, **kwargs)
        except grpc.aio.UsageError as error:
            if "closed" not in str(error).lower():
                raise
            raise CancelledCallError("the client was closed") from error
        return _Call(call, self._explain, limit)


class _Call:
    """A call under way: awaited, read or written to, it raises errors of the tree. All else is the call's own."""

    def __init__(self, call: Any, explain: Explain, limit: Limit) -> None:
        self._call = call
        self._explain = explain
        self._limit = limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._response().__await__()

    async def _response(self) -> Any:
        async with _errors(self._explain, self._limit):
            return await self._call

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async with _errors(self._explain, self._limit):
                async for response in self._call:
                    yield response
        finally:
            self._call.cancel()  # a reader that leaves early does not leave the call behind

    async def read(self) -> Any:
        """The next response, or `grpc.aio.EOF`."""
        async with _errors(self._explain, self._limit):
            return await self._call.read()

    async def write(self, request: Any) -> None:
        """Send a request of the stream."""
        async with _errors(self._explain, self._limit):
            await self._call.write(request)
