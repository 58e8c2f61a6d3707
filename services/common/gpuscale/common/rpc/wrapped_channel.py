"""Channels around channels: add a token to each call, follow the leader among several addresses, or reconnect with new files.

We wrap channels instead of using gRPC's interceptors, which replace calls by objects that behave differently on
cancellation and writes, and must be passed when a channel is created. Wrappers make all four kinds of calls, typed `Any`;
everything else is delegated to the inner channel.

Several addresses are one service, of which one process leads and the others stand by. A standby rejects calls of clients
that follow the leader with UNAVAILABLE, reason NOT_LEADER, before doing anything. A call with one request is retried
elsewhere, within its deadline, after this error or if it found no connection. Any other error is raised, as the call may
have been executed. A call with a request stream fails, and reaches the next address when its client opens it again.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partialmethod
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from gpuscale.common.errors import DeadlineExceededError, UnavailableError
from gpuscale.common.rpc.status import DETAILS_KEY, from_rpc_error
from gpuscale.common.runtime.tasks import Backoff, TaskScope

MakeMethod = Callable[[str, Sequence[Any]], Any]
"""Makes a stub method from its kind, such as `unary_stream`, and the methods of the inner channels."""


class _Methods(ABC):
    """The four kinds of stub methods, made by `_method`."""

    @abstractmethod
    def _method(self, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...

    def _make_kind(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        return self._method(kind, args, kwargs)

    unary_unary: Any = partialmethod(_make_kind, "unary_unary")
    unary_stream: Any = partialmethod(_make_kind, "unary_stream")
    stream_unary: Any = partialmethod(_make_kind, "stream_unary")
    stream_stream: Any = partialmethod(_make_kind, "stream_stream")


class _AroundOthers(_Methods):
    """Makes methods from those of the inner channels."""

    _channels: Sequence[Any]
    _make: MakeMethod

    def _method(self, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        own = {**kwargs, "_registered_method": False}  # True crashes the process on a closed channel
        return self._make(kind, [getattr(channel, kind)(*args, **own) for channel in self._channels])


if TYPE_CHECKING:
    _OfAio = grpc.aio.Channel
else:
    _OfAio = object  # only abstract methods; its import loads asyncio


class _AioChannel(_Methods, _OfAio):
    """An asyncio channel; everything but calls is delegated to `_inside`."""

    @abstractmethod
    def _inside(self) -> grpc.aio.Channel: ...

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inside().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inside().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inside().channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class WrappedChannel(_AroundOthers, _AioChannel):
    """An asyncio channel around others, which it closes. Its state is that of `leader`, or else of the first."""

    def __init__(
        self, channels: Sequence[grpc.aio.Channel], make: MakeMethod, leader: Leader | None = None
    ) -> None:
        self._channels: Sequence[grpc.aio.Channel] = channels
        self._make = make
        self._leader = leader

    def _inside(self) -> grpc.aio.Channel:
        return self._channels[0 if self._leader is None else self._leader.index]

    async def close(self, grace: float | None = None) -> None:
        """Close the inner channels."""
        await asyncio.gather(*(channel.close(grace) for channel in self._channels))


class RenewedChannel(_AioChannel):
    """A channel with renewable certificates: new calls use a new channel once `newer` returns something other than None.

    Open calls keep the old channel, for as long as servers keep a connection.
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
        if self._newer() is not None:
            old, self._current = self._current, self._open_anew()
            closing = asyncio.create_task(old.close(LONGEST_CALL), name="end an old channel")
            self._old[closing] = old
            closing.add_done_callback(lambda done: self._old.pop(done, None))
        return self._current

    async def close(self, grace: float | None = None) -> None:
        """Close the current channel and old ones with open calls."""
        old = dict(self._old)
        for closing in old:
            closing.cancel()  # it waits for calls
        await asyncio.gather(*old, return_exceptions=True)
        await asyncio.gather(*(channel.close(grace) for channel in (self._current, *old.values())))


class SyncWrappedChannel(_AroundOthers, grpc.Channel):
    """A sync channel around others; closing it closes them."""

    def __init__(self, channels: Sequence[grpc.Channel], make: MakeMethod) -> None:
        self._channels: Sequence[grpc.Channel] = channels
        self._make = make

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool | None = False
    ) -> None:
        """As the inner channels."""
        for channel in self._channels:
            channel.subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """As the inner channels."""
        for channel in self._channels:
            channel.unsubscribe(callback)

    def close(self) -> None:
        """Close the inner channels."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


FOLLOWS: Final = ("gpuscale-follows", "leader")
"""Metadata of a client that follows the leader itself; a standby rejects its calls instead of forwarding them."""


def with_header(key: str, value: str) -> MakeMethod:
    """Add a header, such as a token, to every call; unlike gRPC's call credentials it needs no TLS and no thread."""
    return lambda _, methods: _HeaderMethod(methods[0], (key, value))


class StubMethod(ABC):
    """A stub method; its three ways of calling are implemented by `_call`."""

    @abstractmethod
    def _call(self, way: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The response; for asyncio, the call."""
        return self._call("__call__", args, kwargs)

    def with_call(self, *args: Any, **kwargs: Any) -> Any:
        """Sync only: the response and its call."""
        return self._call("with_call", args, kwargs)

    def future(self, *args: Any, **kwargs: Any) -> Any:
        """Sync only: a future of the response, with gRPC's errors."""
        return self._call("future", args, kwargs)


class _HeaderMethod(StubMethod):
    def __init__(self, method: Any, header: tuple[str, str]) -> None:
        self._method = method
        self._header = header

    def _call(self, way: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        kwargs["metadata"] = (*(kwargs.get("metadata") or ()), self._header)
        return getattr(self._method, way)(*args, **kwargs)


LONGEST_CALL: Final = 3_660.0
"""Seconds that streams may stay on a replaced channel; servers keep no connection longer."""
NOT_LEADER: Final = "NOT_LEADER"
"""Reason of a standby's rejection; its metadata `leader` has the leader's address if known."""
PATIENCE: Final = 30.0
"""Most seconds to look for the leader: a call that may wait for an hour tells earlier that nobody leads."""

_GONE: Final = (NOT_LEADER, "LEAD_LOST", "SHUTTING_DOWN", UnavailableError.default_reason)
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 1.0
_LEAST: Final = 0.5
"""Seconds for another round: one cut short would hide behind its deadline that nobody could be reached."""
_TOO_MANY: Final = "Too many pings"
"""Message of gRPC core for a call that was cut by a server of the first release, which permits one ping each 10 s."""
NEVER_SENT: Final = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving ")
"""Starts of gRPC core's messages for a call that was never sent. If they change, callers get the error instead of a retry."""


class Leader:
    """The address of the presumed leader, initially the first. Shared by all calls of a channel."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses: tuple[str, ...] = tuple(addresses)
        self.index: int = 0
        self.calm: dict[int, float] = {}
        """Until when addresses are not to be pinged each second, by index; a later release may be there then."""

    def is_calm(self, index: int) -> bool:
        """Whether the address at `index` is not to be pinged each second."""
        return time.monotonic() < self.calm.get(index, 0.0)

    def failed(self, index: int, hint: str = "") -> None:
        """Note that the address at `index` does not lead: switch to `hint` if known, else to the next.

        Does nothing if another call has already switched.
        """
        if index != self.index:
            return
        known = hint in self.addresses and self.addresses.index(hint) != index
        self.index = self.addresses.index(hint) if known else (index + 1) % len(self.addresses)


class Trail:
    """The attempts of one call, with the caller's timeout in seconds; a request stream is not sent `again`."""

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
        """Remaining seconds of the caller's timeout, or None."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def began(self) -> None:
        """Note a response: no more retries."""
        self._again = False

    def after(self, error: grpc.RpcError) -> float | None:
        """Seconds until a retry at `index`; None if the error must be raised.

        If this address does not lead or answer, later calls also use another one.
        """
        problem = from_rpc_error(error)
        gone = isinstance(problem, UnavailableError) and problem.reason in _GONE
        silent = isinstance(problem, DeadlineExceededError) and problem.reason == problem.default_reason
        if not (gone or silent):
            return None
        if problem.message == _TOO_MANY:
            self._leader.calm[self.index] = time.monotonic() + LONGEST_CALL
        elif problem.reason != problem.default_reason:  # it stands by or stops, perhaps for another release
            self._leader.calm.pop(self.index, None)
        self._leader.failed(self.index, problem.metadata.get("leader", ""))
        if not (self._again and (problem.reason == NOT_LEADER or never_sent(error))):
            return None
        self.index = self._leader.index
        self._refusals += 1
        # Try each address once without a pause. After that there is no leader until a standby takes over.
        pause = 0.0 if self._refusals % len(self._leader.addresses) else self._backoff.next()
        latest = min(self._patience, self._deadline or self._patience)
        return pause if time.monotonic() + pause + (_LEAST if pause else 0.0) < latest else None

    def cancelled(self) -> None:
        """Note a cancelled call. If its time is up its address is silent: a gateway's caller cancels just before the deadline."""
        if self.timeout is not None and self.timeout < _LEAST:
            self._leader.failed(self.index)

    def pause(self, error: grpc.RpcError) -> float:
        """As `after`, but raises `error` instead of returning None."""
        pause = self.after(error)
        if pause is None:
            raise error
        return pause


def never_sent(error: grpc.RpcError) -> bool:
    """Whether gRPC reports that the call was never sent. With error details, a server reports that of its own upstream."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return False
    if any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
        return False
    return (error.details() or "").startswith(NEVER_SENT)


def following(addresses: Sequence[str], open_one: Callable[..., grpc.aio.Channel]) -> grpc.aio.Channel:
    """Combine channels, one for each address in the order to try, into one that follows the leader."""
    leader = Leader(addresses)

    def paced(index: int, address: str) -> grpc.aio.Channel:
        """A channel that pings each second, or for a time as others do once the server has called that too many."""
        calm = False

        def open_anew() -> grpc.aio.Channel:
            nonlocal calm
            now = leader.is_calm(index)
            channel = open_one(address, follows=not now)
            calm = now
            return channel

        return RenewedChannel(open_anew, lambda: address if calm != leader.is_calm(index) else None)

    channels = [paced(index, address) for index, address in enumerate(addresses)]

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
    """A call, started at once; delegates to its latest attempt."""

    def __init__(self, start: Callable[[], Any], trail: Trail) -> None:
        self._start = start
        self._trail = trail
        self._call = start()
        self._cancelled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def cancel(self) -> bool:
        """Cancel the call at any attempt; a sync call from any thread."""
        self._cancelled = True
        ended: bool = self._call.cancel()
        return ended


class _Call(_Attempts):
    def __await__(self) -> Generator[Any, None, Any]:
        async def response() -> Any:
            while True:
                try:
                    return await self._call
                except grpc.aio.AioRpcError as error:
                    await self._again(error)
                except asyncio.CancelledError:
                    self._trail.cancelled()
                    raise

        return response().__await__()

    async def __aiter__(self) -> AsyncGenerator[Any]:
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
        """Send a request of a stream by `send`, and note an address that does not lead."""
        try:
            await send(self._call, request)
        except grpc.aio.AioRpcError as error:
            self._trail.after(error)
            raise

    async def _again(self, error: grpc.aio.AioRpcError) -> None:
        """Retry the call, or raise the error.

        Raises:
            AioRpcError: no retry.
            CancelledError: the call was cancelled.
        """
        await asyncio.sleep(self._trail.pause(error))
        if self._cancelled:
            raise asyncio.CancelledError
        self._call = self._start()


async def send(call: Any, request: Any) -> None:
    """Send a request of an asyncio stream: a message, or bytes.

    Not with gRPC's `write`: if the server has ended the call, that replaces its status, such as NOT_LEADER, by an internal
    error, for readers too. So does gRPC's task for a call that is given an iterator; see `sending`.

    Raises:
        AioRpcError: the server ended the call with this status.
        InvalidStateError: the server ended the call with OK.
    """
    encoded = request if isinstance(request, bytes) else request.SerializeToString()
    try:
        await call.wait_for_connection()
        await call._cython_call.send_serialized_message(encoded)  # noqa: SLF001
    except grpc.aio.InternalError:
        code, details = await call.code(), await call.details()
        if code is grpc.StatusCode.OK:
            raise asyncio.InvalidStateError("the server ended the call") from None
        begun, ended = await call.initial_metadata(), await call.trailing_metadata()
        raise grpc.aio.AioRpcError(code, begun, ended, details=details) from None
    except asyncio.CancelledError:
        call.cancel()  # the request may be partially sent
        raise


@asynccontextmanager
async def sending(call: Any, requests: AsyncIterable[Any]) -> AsyncGenerator[None]:
    """Send all requests of an asyncio stream during the block; those who read the call learn how it ends."""

    async def send_all() -> None:
        with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            async for request in requests:
                await send(call, request)
            await call.done_writing()

    async with TaskScope() as scope:
        scope.start("send requests", send_all())
        yield


class _Unary(StubMethod):
    """A sync method with one response. A future uses the presumed leader without retries."""

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
