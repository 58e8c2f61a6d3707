"""What every call of a sync client gets: a deadline where it has none, and errors of the tree."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Self

import grpc

from gpuscale.common.errors import CancelledCallError, GpuscaleError, UnavailableError
from gpuscale.common.status import rpc_errors
from gpuscale.common.wrapped_channel import SyncWrappedChannel

Explain = Callable[[UnavailableError], GpuscaleError]
"""Finds out more about why nothing answers."""


@contextmanager
def _errors(explain: Explain) -> Generator[None]:
    """Errors of the tree, and why nothing answers where that can be found out."""
    try:
        with rpc_errors():
            yield
    except UnavailableError as error:
        raise explain(error) from error.__cause__
    except ValueError as error:  # what gRPC raises for a channel that was closed, among others
        if "closed" not in str(error).lower():
            raise
        raise CancelledCallError("the client was closed") from error


class SyncCalls(SyncWrappedChannel):
    """A channel whose calls raise errors of the tree; `timeout` seconds for a unary call that names none. Streams last."""

    def __init__(self, channel: grpc.Channel, timeout: float, explain: Explain) -> None:
        super().__init__(channel)
        self._channel = channel
        self._timeout = timeout
        self._explain = explain

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel, with a deadline."""
        return _Unary(self._channel.unary_unary(*args, **kwargs), self._timeout, self._explain)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel."""
        return _Unary(self._channel.stream_unary(*args, **kwargs), None, self._explain)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel."""
        return _Streaming(self._channel.unary_stream(*args, **kwargs), self._explain)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel."""
        return _Streaming(self._channel.stream_stream(*args, **kwargs), self._explain)


class _Unary:
    """A method with one response."""

    def __init__(self, method: Any, timeout: float | None, explain: Explain) -> None:
        self._method = method
        self._timeout = timeout
        self._explain = explain

    def __call__(self, request: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        with _errors(self._explain):
            return self._method(request, timeout=self._timeout if timeout is None else timeout, **kwargs)

    def with_call(self, request: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """The response and its call."""
        with _errors(self._explain):
            return self._method.with_call(
                request, timeout=self._timeout if timeout is None else timeout, **kwargs
            )

    def future(self, request: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """GRPC's own future; its errors are gRPC's own too."""
        return self._method.future(request, timeout=self._timeout if timeout is None else timeout, **kwargs)


class _Streaming:
    """A method with a stream of responses."""

    def __init__(self, method: Any, explain: Explain) -> None:
        self._method = method
        self._explain = explain

    def __call__(self, *args: Any, **kwargs: Any) -> "_Stream":
        with _errors(self._explain):
            return _Stream(self._method(*args, **kwargs), self._explain)


class _Stream:
    """A stream of responses that raises errors of the tree. All else is the call's own."""

    def __init__(self, call: Any, explain: Explain) -> None:
        self._call = call
        self._explain = explain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with _errors(self._explain):
            return next(self._call)
