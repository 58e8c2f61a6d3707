"""Channels around channels: with a token on each call, following the leader among several addresses, or opened anew with new files.

Channels are wrapped rather than intercepted: with gRPC's own interceptors a call is another kind of object, which behaves
differently when it is cancelled or written to, and they must be known before the channel is made. Whoever wraps makes the
four kinds of calls; underneath the types of the stubs these are `Any`. What is not a call is that of the channel inside.

Several addresses stand for one service of which one process leads and the others are ready to take over. A standby
answers what follows the leader UNAVAILABLE, reason NOT_LEADER, without having done anything, so such a call may always be made again elsewhere;
so may one that found no connection. Any other failure is the caller's: nobody knows whether the call was done. A call
with one request is made again where it was surely not executed, within its own deadline. A stream of requests is not: it
fails, and whoever opens it again, as every client of one must, reaches the next address.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from gpuscale.common.errors import DeadlineExceededError, UnavailableError
from gpuscale.common.rpc.status import DETAILS_KEY, from_rpc_error
from gpuscale.common.runtime.tasks import Backoff

MakeMethod = Callable[[str, Sequence[Any]], Any]
"""Makes a method of a stub of its kind, such as `unary_stream`, and of the methods of the channels inside."""


class _Methods(ABC):
    """The four kinds of methods of a stub, made by `_method`."""

    @abstractmethod
    def _method(self, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """A method with one request and one response."""
        return self._method("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """A method with one request and a stream of responses."""
        return self._method("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """A method with a stream of requests and one response."""
        return self._method("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """A method with a stream of requests and one of responses."""
        return self._method("stream_stream", args, kwargs)


class _AroundOthers(_Methods):
    """Makes a method of those of the channels inside."""

    _channels: Sequence[Any]
    _make: MakeMethod

    def _method(self, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        own = {**kwargs, "_registered_method": False}  # on a closed channel that kills the process
        return self._make(kind, [getattr(channel, kind)(*args, **own) for channel in self._channels])


if TYPE_CHECKING:
    _OfAio = grpc.aio.Channel
else:
    _OfAio = object  # its methods are all abstract, and it costs sync programs the import of asyncio


class _AioChannel(_Methods, _OfAio):
    """A channel of the running event loop; what is not a call is that of the channel `_inside`."""

    @abstractmethod
    def _inside(self) -> grpc.aio.Channel: ...

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

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class WrappedChannel(_AroundOthers, _AioChannel):
    """A channel of the running event loop around others; closing it closes them.

    Args:
        channels: those inside.
        make: makes the methods.
        leader: says which of the channels' connections is looked at; the first one's without it.
    """

    def __init__(
        self, channels: Sequence[grpc.aio.Channel], make: MakeMethod, leader: Leader | None = None
    ) -> None:
        self._channels: Sequence[grpc.aio.Channel] = channels
        self._make = make
        self._leader = leader

    def _inside(self) -> grpc.aio.Channel:
        return self._channels[0 if self._leader is None else self._leader.index]

    async def close(self, grace: float | None = None) -> None:
        """Close each of them."""
        await asyncio.gather(*(channel.close(grace) for channel in self._channels))


class RenewedChannel(_AioChannel):
    """A channel whose certificates are renewed: what is called after that goes over a new one.

    Calls that are under way stay where they are, for as long as a server lets a connection last. `newer` is something other than
    None where the channel has to be opened anew.
    """

    def __init__(self, open_anew: Callable[[], grpc.aio.Channel], newer: Callable[[], object]) -> None:
        self._open_anew = open_anew
        self._newer = newer
        self._old: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._current = open_anew()

    def _method(self, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        of, method = self._current, getattr(self._current, kind)(*args, **kwargs)

        def call(*words: Any, **more: Any) -> Any:
            nonlocal of, method
            channel = self._inside()
            if channel is not of:
                of, method = channel, getattr(channel, kind)(*args, **kwargs)
            return method(*words, **more)

        return call

    def _inside(self) -> grpc.aio.Channel:
        """The newest channel."""
        if self._newer() is not None:
            old, self._current = self._current, self._open_anew()
            closing = asyncio.create_task(old.close(LONGEST_CALL), name="end an old channel")
            self._old[closing] = old
            closing.add_done_callback(lambda done: self._old.pop(done, None))
        return self._current

    async def close(self, grace: float | None = None) -> None:
        """Close it, and those before it that still have calls under way."""
        old = dict(self._old)
        for closing in old:
            closing.cancel()  # it would wait for its calls
        await asyncio.gather(*old, return_exceptions=True)
        await asyncio.gather(*(channel.close(grace) for channel in (self._current, *old.values())))


class SyncWrappedChannel(_AroundOthers, grpc.Channel):
    """A channel for code without an event loop around others; closing it closes them."""

    def __init__(self, channels: Sequence[grpc.Channel], make: MakeMethod) -> None:
        self._channels: Sequence[grpc.Channel] = channels
        self._make = make

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool | None = False
    ) -> None:
        """As of every channel."""
        for channel in self._channels:
            channel.subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """As of every channel."""
        for channel in self._channels:
            channel.unsubscribe(callback)

    def close(self) -> None:
        """Close each of them."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


FOLLOWS: Final = ("gpuscale-follows", "leader")
"""Metadata of a caller that goes to the leader itself: a standby turns it away where it forwards the calls of others."""


def with_header(key: str, value: str) -> MakeMethod:
    """Sends a header with every call, such as a token: gRPC's call credentials need TLS, and a thread for each call."""
    return lambda _, methods: _HeaderMethod(methods[0], (key, value))


class StubMethod(ABC):
    """A method of a stub, called in one of three ways, of which `_call` makes what it is."""

    @abstractmethod
    def _call(self, way: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The answer, or the call where it has an event loop."""
        return self._call("__call__", args, kwargs)

    def with_call(self, *args: Any, **kwargs: Any) -> Any:
        """Without an event loop: the answer and its call."""
        return self._call("with_call", args, kwargs)

    def future(self, *args: Any, **kwargs: Any) -> Any:
        """Without an event loop: the answer to come, and its errors, as gRPC has them."""
        return self._call("future", args, kwargs)


class _HeaderMethod(StubMethod):
    """A method that sends a header along."""

    def __init__(self, method: Any, header: tuple[str, str]) -> None:
        self._method = method
        self._header = header

    def _call(self, way: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        kwargs["metadata"] = (*(kwargs.get("metadata") or ()), self._header)
        return getattr(self._method, way)(*args, **kwargs)


LONGEST_CALL: Final = 3_660.0
"""Seconds that a stream may go on over a channel that was replaced: servers let no connection last longer."""
NOT_LEADER: Final = "NOT_LEADER"
"""Reason with which a standby turns calls away; its metadata `leader` is the leader's address, where known."""
PATIENCE: Final = 10.0
"""Seconds for which a call without a deadline looks for the leader."""

_GONE: Final = (NOT_LEADER, "LEAD_LOST", "SHUTTING_DOWN", UnavailableError.default_reason)
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 1.0
_LEAST: Final = 0.5
"""Seconds for another round: one cut short would hide behind its deadline that nobody could be reached."""
# What gRPC core says of a call that it never gave to a connection. Where it says it in other words one day, the caller
# gets the error and calls again.
_NEVER_SENT: Final = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving ")


class Leader:
    """The address believed to be the leader's, at first the first one. Shared by all calls of a channel."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self.index: int = 0

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
    """The attempts of one call, from address to address.

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
        gone = isinstance(problem, UnavailableError) and problem.reason in _GONE
        silent = isinstance(problem, DeadlineExceededError) and problem.reason == problem.default_reason
        if not (gone or silent):
            return None
        self._leader.failed(self.index, problem.metadata.get("leader", ""))
        if not (self._again and (problem.reason == NOT_LEADER or never_sent(error))):
            return None
        self.index = self._leader.index
        self._refusals += 1
        # Each address is asked once without a pause; then there is no leader, until a standby has taken over.
        pause = 0.0 if self._refusals % self._leader.count else self._backoff.next()
        latest = self._patience if self._deadline is None else self._deadline
        return pause if time.monotonic() + pause + (_LEAST if pause else 0.0) < latest else None

    def pause(self, error: grpc.RpcError) -> float:
        """Seconds until the call is to be made again, as `after`.

        Raises:
            RpcError: it is not.
        """
        pause = self.after(error)
        if pause is None:
            raise error
        return pause


def never_sent(error: grpc.RpcError) -> bool:
    """Whether gRPC itself says that the call was never sent. A server that says so, with details, means its own upstream."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return False
    if any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
        return False
    return (error.details() or "").startswith(_NEVER_SENT)


def following(addresses: Sequence[str], channels: Sequence[grpc.aio.Channel]) -> grpc.aio.Channel:
    """One channel made of several, one per address in the order to try them, that follows the leader."""
    leader = Leader(addresses)

    def method(kind: str, methods: Sequence[Any]) -> Any:
        methods = [_HeaderMethod(one, FOLLOWS) for one in methods]

        def call(*args: Any, timeout: float | None = None, **kwargs: Any) -> _Call:
            trail = Trail(leader, timeout, again=kind.startswith("unary"))
            return _Call(lambda: methods[trail.index](*args, timeout=trail.timeout, **kwargs), trail)

        return call

    return WrappedChannel(channels, method, leader)


def sync_following(addresses: Sequence[str], channels: Sequence[grpc.Channel]) -> grpc.Channel:
    """`following` for code without an event loop."""
    leader = Leader(addresses)

    def method(kind: str, methods: Sequence[Any]) -> Any:
        methods = [_HeaderMethod(one, FOLLOWS) for one in methods]
        again = kind.startswith("unary")
        if kind.endswith("unary"):
            return _Unary(methods, leader, again=again)

        def stream(*args: Any, timeout: float | None = None, **kwargs: Any) -> _Stream:
            trail = Trail(leader, timeout, again=again)
            return _Stream(lambda: methods[trail.index](*args, timeout=trail.timeout, **kwargs), trail)

        return stream

    return SyncWrappedChannel(channels, method)


class _Attempts:
    """A call under way, started at once. Everything else is that of the latest attempt."""

    def __init__(self, start: Callable[[], Any], trail: Trail) -> None:
        self._start = start
        self._trail = trail
        self._call = start()
        self._cancelled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def cancel(self) -> bool:
        """End it, whichever attempt it is at; without an event loop any thread may."""
        self._cancelled = True
        ended: bool = self._call.cancel()
        return ended


class _Call(_Attempts):
    """A call of the event loop."""

    def __await__(self) -> Generator[Any, None, Any]:
        async def response() -> Any:
            while True:
                try:
                    return await self._call
                except grpc.aio.AioRpcError as error:
                    await self._again(error)

        return response().__await__()

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

    async def write(self, request: Any) -> None:
        """Send a request of a stream.

        Not by gRPC's own `write`: on a call that its server ended meanwhile, that replaces the server's status, such as
        NOT_LEADER, by an internal error, for whoever reads too.

        Raises:
            AioRpcError: the server ended the call with this status.
            InvalidStateError: it ended the call in good order.
        """
        call = self._call
        try:
            await call.wait_for_connection()
            await call._cython_call.send_serialized_message(request.SerializeToString())  # noqa: SLF001
        except grpc.aio.InternalError:
            code, details = await call.code(), await call.details()
            if code is grpc.StatusCode.OK:
                raise asyncio.InvalidStateError("the server ended the call") from None
            begun, ended = await call.initial_metadata(), await call.trailing_metadata()
            error = grpc.aio.AioRpcError(code, begun, ended, details=details)
            self._trail.after(error)
            raise error from None
        except grpc.aio.AioRpcError as error:
            self._trail.after(error)
            raise
        except asyncio.CancelledError:
            call.cancel()  # what is half sent stays so
            raise

    async def _again(self, error: grpc.aio.AioRpcError) -> None:
        """Make the call again, where that is right.

        Raises:
            AioRpcError: it is not.
            CancelledError: the call was cancelled.
        """
        await asyncio.sleep(self._trail.pause(error))
        if self._cancelled:
            raise asyncio.CancelledError
        self._call = self._start()


class _Unary(StubMethod):
    """A method with one response. A future is of the channel that is taken for the leader's: it does not follow."""

    def __init__(self, methods: Sequence[Any], leader: Leader, *, again: bool) -> None:
        self._methods = methods
        self._leader = leader
        self._again = again

    def _call(self, way: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if way == "future":
            return self._methods[self._leader.index].future(*args, **kwargs)
        trail = Trail(self._leader, kwargs.get("timeout"), again=self._again)
        while True:
            kwargs["timeout"] = trail.timeout
            try:
                return getattr(self._methods[trail.index], way)(*args, **kwargs)
            except grpc.RpcError as error:
                time.sleep(trail.pause(error))


class _Stream(_Attempts):
    """A stream of responses, without an event loop."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while True:
            try:
                response = next(self._call)
            except grpc.RpcError as error:
                time.sleep(self._trail.pause(error))
                if self._cancelled:
                    raise
                self._call = self._start()
                if self._cancelled:  # between the two
                    self._call.cancel()
            else:
                self._trail.began()
                return response
