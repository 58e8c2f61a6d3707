"""What every call of a sync client gets: a deadline where it has none, and errors of the tree."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, Self

import grpc

from gpuscale.common.errors import CancelledCallError, DeadlineExceededError, GpuscaleError, UnavailableError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.rpc.wrapped_channel import SyncWrappedChannel

Explain = Callable[[UnavailableError, float], GpuscaleError]
"""Finds out more about why nothing answers, within so many seconds."""

_TOO_LONG = "Deadline Exceeded"
"""All that gRPC says."""


class Limit:
    """The time of one call, counted from now; None for a stream, which has all the time."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._began = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds that are left of it."""
        return inf if self._seconds is None else self._seconds - (time.monotonic() - self._began)

    def over(self, error: DeadlineExceededError) -> DeadlineExceededError:
        """The error, which says how long it was waited where gRPC only says that it was too long."""
        if error.message != _TOO_LONG or self._seconds is None:
            return error
        return DeadlineExceededError(f"no answer within {self._seconds:g} s", metadata=error.metadata)


@contextmanager
def _errors(explain: Explain, limit: Limit) -> Generator[None]:
    """Errors of the tree, and why nothing answers where that can be found out in the time of the call."""
    try:
        with rpc_errors():
            yield
    except UnavailableError as error:
        raise explain(error, limit.left) from error.__cause__
    except DeadlineExceededError as error:
        raise limit.over(error) from error.__cause__
    except ValueError as error:  # what gRPC raises for a channel that was closed, among others
        if "closed" not in str(error).lower():
            raise
        raise CancelledCallError("the client was closed") from error


class SyncCalls(SyncWrappedChannel):
    """A channel whose calls raise errors of the tree; `timeout` seconds for a unary call that names none. Streams last."""

    def __init__(self, channel: grpc.Channel, timeout: float, explain: Explain) -> None:
        def method(kind: str, methods: Sequence[Any]) -> "_Unary | _Streaming":
            if kind.endswith("stream"):
                return _Streaming(methods[0], explain)
            return _Unary(methods[0], timeout if kind == "unary_unary" else None, explain)

        super().__init__([channel], method)


class _Unary:
    """A method with one response."""

    def __init__(self, method: Any, timeout: float | None, explain: Explain) -> None:
        self._method = method
        self._timeout = timeout
        self._explain = explain

    def __call__(self, request: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        timeout = self._timeout if timeout is None else timeout
        with _errors(self._explain, Limit(timeout)):
            return self._method(request, timeout=timeout, **kwargs)

    def with_call(self, request: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """The response and its call."""
        timeout = self._timeout if timeout is None else timeout
        with _errors(self._explain, Limit(timeout)):
            return self._method.with_call(request, timeout=timeout, **kwargs)

    def future(self, request: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """GRPC's own future; its errors are gRPC's own too."""
        return self._method.future(request, timeout=self._timeout if timeout is None else timeout, **kwargs)


class _Streaming:
    """A method with a stream of responses."""

    def __init__(self, method: Any, explain: Explain) -> None:
        self._method = method
        self._explain = explain

    def __call__(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> "_Stream":
        limit = Limit(timeout)
        with _errors(self._explain, limit):
            return _Stream(self._method(*args, timeout=timeout, **kwargs), self._explain, limit)


class _Stream:
    """A stream of responses that raises errors of the tree. All else is the call's own."""

    def __init__(self, call: Any, explain: Explain, limit: Limit) -> None:
        self._call = call
        self._explain = explain
        self._limit = limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with _errors(self._explain, self._limit):
            return next(self._call)
