"""`gpuscale.common.rpc.following_channel` for code without an event loop."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import grpc

from gpuscale.common.rpc.following import Leader, Trail
from gpuscale.common.rpc.wrapped_channel import SyncWrappedChannel


class SyncFollowingChannel(SyncWrappedChannel):
    """One channel of several; closing it closes them.

    Args:
        addresses: what the channels lead to, in the order in which they are tried.
        channels: one for each address.
    """

    def __init__(self, addresses: Sequence[str], channels: Sequence[grpc.Channel]) -> None:
        super().__init__(*channels)
        self._leader = Leader(addresses)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel of the leader."""
        methods = [one.unary_unary(*args, **kwargs) for one in self._channels]
        return _Unary(methods, self._leader, again=True)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel of the leader."""
        methods = [one.stream_unary(*args, **kwargs) for one in self._channels]
        return _Unary(methods, self._leader, again=False)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel of the leader."""
        methods = [one.unary_stream(*args, **kwargs) for one in self._channels]
        return partial(_open_stream, methods, self._leader, again=True)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel of the leader."""
        methods = [one.stream_stream(*args, **kwargs) for one in self._channels]
        return partial(_open_stream, methods, self._leader, again=False)


class _Unary:
    """A method with one response."""

    def __init__(self, methods: Sequence[Any], leader: Leader, *, again: bool) -> None:
        self._methods = methods
        self._leader = leader
        self._again = again

    def __call__(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        return self._follow(timeout, lambda method, left: method(*args, timeout=left, **kwargs))

    def with_call(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """The response and its call."""
        return self._follow(timeout, lambda method, left: method.with_call(*args, timeout=left, **kwargs))

    def future(self, *args: Any, **kwargs: Any) -> Any:
        """GRPC's own future, of the channel that is taken for the leader's: it does not follow."""
        return self._methods[self._leader.index].future(*args, **kwargs)

    def _follow(self, timeout: float | None, attempt: Callable[[Any, float | None], Any]) -> Any:
        trail = Trail(self._leader, timeout, again=self._again)
        while True:
            try:
                return attempt(self._methods[trail.index], trail.timeout)
            except grpc.RpcError as error:
                _pause(trail, error)


def _open_stream(
    methods: Sequence[Any],
    leader: Leader,
    *args: Any,
    again: bool,
    timeout: float | None = None,
    **kwargs: Any,
) -> "_Stream":
    trail = Trail(leader, timeout, again=again)
    return _Stream(lambda: methods[trail.index](*args, timeout=trail.timeout, **kwargs), trail)


class _Stream:
    """A stream of responses. What is not said here is that of the attempt made last."""

    def __init__(self, start: Callable[[], Any], trail: Trail) -> None:
        self._start = start
        self._trail = trail
        self._call = start()
        self._cancelled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while True:
            try:
                response = next(self._call)
            except grpc.RpcError as error:
                _pause(self._trail, error)
                self._again(error)
            else:
                self._trail.began()
                return response

    def cancel(self) -> bool:
        """End it, whichever attempt it is at; called by any thread."""
        self._cancelled = True
        ended: bool = self._call.cancel()
        return ended

    def _again(self, error: grpc.RpcError) -> None:
        """Make the call again, unless it was cancelled meanwhile.

        Raises:
            RpcError: it was.
        """
        if self._cancelled:
            raise error
        self._call = self._start()
        if self._cancelled:  # between the two
            self._call.cancel()


def _pause(trail: Trail, error: grpc.RpcError) -> None:
    """Wait until the call is to be made again.

    Raises:
        RpcError: it is not.
    """
    pause = trail.after(error)
    if pause is None:
        raise error
    time.sleep(pause)
