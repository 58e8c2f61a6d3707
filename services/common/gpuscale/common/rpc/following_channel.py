"""A channel to several addresses that follows the leader among them, for the running event loop.

A call with one request is made again where it was surely not executed, within its own deadline. A stream of requests is
not: it fails, and whoever opens it again, as every client of one must, reaches the next address.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Any

import grpc

from gpuscale.common.rpc.following import Leader, Trail
from gpuscale.common.rpc.wrapped_channel import WrappedChannel


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
