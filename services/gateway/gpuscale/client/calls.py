"""Adds a default deadline to a client's calls, and raises GpuscaleError for failures.

Unary calls without a timeout get the client's; streams have none. If the server does not answer, the error says why, as far as
can be found out in the call's remaining time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from math import inf
from typing import Any, Self

import grpc

from gpuscale.common.errors import CancelledCallError, DeadlineExceededError, GpuscaleError, UnavailableError
from gpuscale.common.rpc.status import from_rpc_error
from gpuscale.common.rpc.wrapped_channel import StubMethod, SyncWrappedChannel, WrappedChannel

Explain = Callable[[UnavailableError, float], GpuscaleError]
"""Diagnoses an unreachable server, within so many seconds."""

_TOO_LONG = "Deadline Exceeded"
"""All that gRPC says when a deadline passes."""


class _Failing:
    """Converts the failure of one call. Its time starts now; `seconds` is None for a stream, which has no limit."""

    def __init__(self, seconds: float | None, explain: Explain) -> None:
        self._seconds = seconds
        self._began = time.monotonic()
        self._explain = explain

    @contextmanager
    def errors(self) -> Generator[None]:
        """Convert errors of the block to GpuscaleError."""
        try:
            yield
        except grpc.RpcError as error:
            found = self._found(error)
            if isinstance(found, UnavailableError):
                found = self._explain(found, self._left)
            raise found from None  # gRPC's error, which says the same at length, stays its context
        except (ValueError, grpc.aio.UsageError) as error:  # a closed channel, among others
            if "closed" not in str(error).lower():
                raise
            raise CancelledCallError("the client was closed") from error

    @asynccontextmanager
    async def errors_async(self) -> AsyncGenerator[None]:
        try:
            yield
        except grpc.RpcError as error:
            found = self._found(error)
            if isinstance(found, UnavailableError):
                found = await asyncio.to_thread(self._explain, found, self._left)
            raise found from None

    @property
    def _left(self) -> float:
        return inf if self._seconds is None else self._seconds - (time.monotonic() - self._began)

    def _found(self, error: grpc.RpcError) -> GpuscaleError:
        """The GpuscaleError; a deadline names the time waited, which gRPC leaves out."""
        found = from_rpc_error(error)
        late = isinstance(found, DeadlineExceededError) and found.message == _TOO_LONG
        if not late or self._seconds is None:
            return found
        return DeadlineExceededError(f"no answer within {self._seconds:g} s", metadata=found.metadata)


class SyncCalls(SyncWrappedChannel):
    """A channel whose calls raise GpuscaleError; unary calls without a timeout get `timeout` seconds."""

    def __init__(self, channel: grpc.Channel, timeout: float, explain: Explain) -> None:
        def method(kind: str, methods: Sequence[Any]) -> Any:
            if kind.endswith("unary"):
                return _Unary(methods[0], timeout if kind == "unary_unary" else None, explain)

            def stream(*args: Any, timeout: float | None = None, **kwargs: Any) -> _Stream:
                failing = _Failing(timeout, explain)
                with failing.errors():
                    return _Stream(methods[0](*args, timeout=timeout, **kwargs), failing)

            return stream

        super().__init__([channel], method)


class _Unary(StubMethod):
    def __init__(self, method: Any, timeout: float | None, explain: Explain) -> None:
        self._method = method
        self.timeout = timeout
        self._explain = explain

    def _call(self, way: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # gRPC allows `timeout` as a positional argument.
        request, timeout = (*args, kwargs.pop("timeout", None))[:2]
        timeout = self.timeout if timeout is None else timeout
        with nullcontext() if way == "future" else _Failing(timeout, self._explain).errors():
            return getattr(self._method, way)(request, timeout=timeout, **kwargs)


class _Wrapped:
    """A call that raises GpuscaleError where a subclass says so; behaves like the call otherwise."""

    def __init__(self, call: Any, failing: _Failing) -> None:
        self._call = call
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


class _Stream(_Wrapped):
    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._failing.errors():
            return next(self._call)


class AsyncCalls(WrappedChannel):
    """`SyncCalls` for async code."""

    def __init__(self, channel: grpc.aio.Channel, timeout: float, explain: Explain) -> None:
        def method(kind: str, methods: Sequence[Any]) -> Any:
            default = timeout if kind == "unary_unary" else None

            def begin(*args: Any, timeout: float | None = None, **kwargs: Any) -> _Call:
                timeout = default if timeout is None else timeout
                failing = _Failing(timeout, explain)
                with failing.errors():
                    return _Call(methods[0](*args, timeout=timeout, **kwargs), failing)

            return begin

        super().__init__([channel], method)


class _Call(_Wrapped):
    """An async call, which raises when it is awaited, read or written to."""

    def __await__(self) -> Generator[Any, None, Any]:
        async def response() -> Any:
            async with self._failing.errors_async():
                return await self._call

        return response().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async with self._failing.errors_async():
                async for response in self._call:
                    yield response
        finally:
            self._call.cancel()  # a reader that stops early ends the call

    async def read(self) -> Any:
        """The next response, or `grpc.aio.EOF`."""
        async with self._failing.errors_async():
            return await self._call.read()

    async def write(self, request: Any) -> None:
        async with self._failing.errors_async():
            await self._call.write(request)
