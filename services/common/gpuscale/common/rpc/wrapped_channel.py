"""Channels around channels: with a token on each call, or following the leader among several addresses.

Channels are wrapped rather than intercepted: with gRPC's own interceptors a call is another kind of object, which behaves
differently when it is cancelled or written to, and they must be known before the channel is made. Whoever wraps makes the
four kinds of calls; underneath the types of the stubs these are `Any`. What is not a call is that of the channel inside.

Several addresses stand for one service of which one process leads and the others are ready to take over. A standby
answers UNAVAILABLE, reason NOT_LEADER, without having done anything, so such a call may always be made again elsewhere;
so may one that found no connection. Any other failure is the caller's: nobody knows whether the call was done. A call
with one request is made again where it was surely not executed, within its own deadline. A stream of requests is not: it
fails, and whoever opens it again, as every client of one must, reaches the next address.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import grpc

from gpuscale.common.errors import (
    DeadlineExceededError,
    GpuscaleError,
    InvalidArgumentError,
    UnavailableError,
)
from gpuscale.common.rpc.status import DETAILS_KEY, from_rpc_error
from gpuscale.common.runtime.tasks import Backoff


class WrappedChannel(grpc.aio.Channel):
    """A channel of the running event loop, around another."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def _inside(self) -> grpc.aio.Channel:
        """The channel that is asked."""
        return self._channel

    async def close(self, grace: float | None = None) -> None:
        """As of the channel."""
        await self._inside().close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As of the channel."""
        return self._inside().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As of the channel."""
        await self._inside().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """As of the channel."""
        await self._inside().channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()


class SyncWrappedChannel(grpc.Channel):
    """A channel for code without an event loop, around one or several that do the same."""

    def __init__(self, *channels: grpc.Channel) -> None:
        self._channels = channels

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool | None = False
    ) -> None:
        """As of every channel."""
        for one in self._channels:
            one.subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """As of every channel."""
        for one in self._channels:
            one.unsubscribe(callback)

    def close(self) -> None:
        """Close each of them."""
        for one in self._channels:
            one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()


class _TokenCall:
    """A multi-callable that sends a token along."""

    def __init__(self, call: Any, token: str) -> None:
        self._call = call
        self._header = ("authorization", f"Bearer {token}")

    def __call__(self, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        return self._call(*args, metadata=self._with_token(metadata), **kwargs)

    def with_call(self, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        """Of channels without an event loop: the answer and its call."""
        return self._call.with_call(*args, metadata=self._with_token(metadata), **kwargs)

    def future(self, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        """Of channels without an event loop: the answer to come."""
        return self._call.future(*args, metadata=self._with_token(metadata), **kwargs)

    def _with_token(self, metadata: Any) -> tuple[Any, ...]:
        return (*(metadata or ()), self._header)


class _TokenCalls:
    """The four kinds of calls of a channel, with a token."""

    def __init__(self, channel: Any, token: str) -> None:
        self._calls = channel
        self._token = token

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel."""
        return _TokenCall(self._calls.unary_unary(*args, **kwargs), self._token)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel."""
        return _TokenCall(self._calls.unary_stream(*args, **kwargs), self._token)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel."""
        return _TokenCall(self._calls.stream_unary(*args, **kwargs), self._token)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel."""
        return _TokenCall(self._calls.stream_stream(*args, **kwargs), self._token)


class TokenChannel(_TokenCalls, WrappedChannel):
    """An asyncio channel that sends a token with every call."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        WrappedChannel.__init__(self, channel)
        _TokenCalls.__init__(self, channel, token)


class SyncTokenChannel(_TokenCalls, SyncWrappedChannel):
    """A channel without an event loop that sends a token with every call."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        SyncWrappedChannel.__init__(self, channel)
        _TokenCalls.__init__(self, channel, token)


NOT_LEADER: Final = "NOT_LEADER"
"""Reason with which a standby turns calls away; its metadata `leader` is the leader's address, where known."""
PATIENCE: Final = 10.0
"""Seconds for which a call without a deadline looks for the leader."""

_OTHER_WAYS: Final = ("unix:", "unix-abstract:", "dns:///", "ipv4:", "ipv6:")
_USUAL_PORT: Final = 7070
_HIGHEST_PORT: Final = 65_535
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 1.0
# What gRPC core says of a call that it never gave to a connection. Where it says it in other words one day, the caller
# gets the error and calls again.
_NEVER_SENT: Final = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving ")


def split_addresses(text: str) -> tuple[str, ...]:
    """The addresses of `HOST:PORT,HOST:PORT`; of a single one, that one.

    Raises:
        InvalidArgumentError: one is no address, or of several one is empty or stands there twice.
    """
    addresses = tuple(one.strip() for one in text.split(","))
    if len(addresses) > 1 and ("" in addresses or len(set(addresses)) < len(addresses)):
        raise InvalidArgumentError(
            f"{text!r} must name different addresses, with commas between", field="address"
        )
    for one in addresses:
        problem = _problem(one)
        if problem:
            raise InvalidArgumentError(f"the address {one!r} {problem}")
    return addresses


def _problem(address: str) -> str:
    """What is wrong with an address to connect to; empty where nothing is."""
    if address.startswith(_OTHER_WAYS):
        return ""
    scheme, found, rest = address.partition("://")
    if found:
        return f"has {scheme}:// before it: write {rest.rstrip('/')}"
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        return f"has no port: write HOST:PORT, such as {address or '127.0.0.1'}:{_USUAL_PORT}"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return f"is ambiguous: write an IPv6 address in brackets, such as [::1]:{_USUAL_PORT}"
    if not (port.isascii() and port.isdecimal() and 0 < int(port) <= _HIGHEST_PORT):
        return f"has the port {port!r}: a port is a number from 1 to {_HIGHEST_PORT}"
    return "" if host else f"has no host: write HOST:PORT, such as 127.0.0.1:{port}"


class Leader:
    """Which of the addresses is taken for the leader's; the first to begin with. Shared by all calls of a channel."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self.index = 0

    @property
    def count(self) -> int:
        """How many addresses there are."""
        return len(self._addresses)

    def failed(self, index: int, hint: str = "") -> None:
        """The address at `index` does not lead: go on to the one that `hint` names, or to the next.

        A failure at an address that was left meanwhile, as of a call that took long, changes nothing.
        """
        if index != self.index:
            return
        known = hint in self._addresses and self._addresses.index(hint) != index
        self.index = self._addresses.index(hint) if known else (index + 1) % len(self._addresses)


class Trail:
    """The way of one call from address to address.

    Args:
        leader: of the channel.
        timeout: seconds that the caller gives the call; None for any time.
        again: whether it can be made again: not where a stream of requests was used up.
    """

    def __init__(self, leader: Leader, timeout: float | None, *, again: bool) -> None:
        self._leader = leader
        self._again = again
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._patience = time.monotonic() + PATIENCE
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._refusals = 0
        self.index = leader.index

    @property
    def timeout(self) -> float | None:
        """Seconds left of the caller's; None for any time."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def began(self) -> None:
        """A response came: from now on the call is not made again."""
        self._again = False

    def after(self, error: grpc.RpcError) -> float | None:
        """Seconds until the call is to be made again, at `index`; None where the error is the caller's.

        Later calls go elsewhere too, where the error shows that this address does not lead or does not answer.
        """
        problem = from_rpc_error(error)
        if not _lost(problem):
            return None
        self._leader.failed(self.index, problem.metadata.get("leader", ""))
        if not (self._again and (problem.reason == NOT_LEADER or _never_sent(error))):
            return None
        self.index = self._leader.index
        self._refusals += 1
        # Each address is asked once without a pause; then there is no leader, until a standby has taken over.
        pause = 0.0 if self._refusals % self._leader.count else self._backoff.next()
        latest = self._patience if self._deadline is None else self._deadline
        return pause if time.monotonic() + pause < latest else None


def _lost(problem: GpuscaleError) -> bool:
    """Whether later calls should go elsewhere."""
    if isinstance(problem, UnavailableError):
        return problem.reason in (NOT_LEADER, "LEAD_LOST", "SHUTTING_DOWN", UnavailableError.default_reason)
    return isinstance(problem, DeadlineExceededError) and problem.reason == problem.default_reason


def _never_sent(error: grpc.RpcError) -> bool:
    """Whether gRPC itself says that the call went nowhere. A server that says so, with details, tells of its own upstream."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return False
    if any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
        return False
    return (error.details() or "").startswith(_NEVER_SENT)


class FollowingChannel(WrappedChannel):
    """One channel of several; closing it closes them.

    Args:
        addresses: what the channels lead to, in the order in which they are tried.
        channels: one for each address.
    """

    def __init__(self, addresses: Sequence[str], channels: Sequence[grpc.aio.Channel]) -> None:
        super().__init__(channels[0])
        self._leader = Leader(addresses)
        self._channels = tuple(channels)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel of the leader."""
        return self._method([one.unary_unary(*args, **kwargs) for one in self._channels], again=True)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel of the leader."""
        return self._method([one.unary_stream(*args, **kwargs) for one in self._channels], again=True)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel of the leader."""
        return self._method([one.stream_unary(*args, **kwargs) for one in self._channels], again=False)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel of the leader."""
        return self._method([one.stream_stream(*args, **kwargs) for one in self._channels], again=False)

    def _method(self, methods: Sequence[Any], *, again: bool) -> Callable[..., "_Call"]:
        def call(*args: Any, timeout: float | None = None, **kwargs: Any) -> _Call:
            trail = Trail(self._leader, timeout, again=again)
            return _Call(lambda: methods[trail.index](*args, timeout=trail.timeout, **kwargs), trail)

        return call

    async def close(self, grace: float | None = None) -> None:
        """Close each of them."""
        await asyncio.gather(*(one.close(grace) for one in self._channels))

    def _inside(self) -> grpc.aio.Channel:
        """The channel of the leader."""
        return self._channels[self._leader.index]


class _Call:
    """A call under way, begun at once. What is not said here is that of the attempt made last."""

    def __init__(self, start: Callable[[], Any], trail: Trail) -> None:
        self._start = start
        self._trail = trail
        self._call = start()
        self._cancelled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._response().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            try:
                async for response in self._call:
                    self._trail.began()
                    yield response
            except grpc.aio.AioRpcError as error:
                await self._again(error)
            else:
                return

    async def read(self) -> Any:
        """The next response, or `grpc.aio.EOF`."""
        while True:
            try:
                response = await self._call.read()
            except grpc.aio.AioRpcError as error:
                await self._again(error)
            else:
                self._trail.began()
                return response

    def cancel(self) -> bool:
        """End it, whichever attempt it is at."""
        self._cancelled = True
        ended: bool = self._call.cancel()
        return ended

    async def _response(self) -> Any:
        while True:
            try:
                return await self._call
            except grpc.aio.AioRpcError as error:
                await self._again(error)

    async def _again(self, error: grpc.aio.AioRpcError) -> None:
        """Make the call again, where that is right.

        Raises:
            AioRpcError: it is not.
            CancelledError: the call was cancelled.
        """
        pause = self._trail.after(error)
        if pause is None:
            raise error
        await asyncio.sleep(pause)
        if self._cancelled:
            raise asyncio.CancelledError
        self._call = self._start()


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
