"""Channels around a channel: what is not a call is that of the one inside.

Channels are wrapped rather than intercepted: with gRPC's own interceptors a call is another kind of object, which behaves
differently when it is cancelled or written to, and they must be known before the channel is made. Whoever wraps makes the
four kinds of calls; underneath the types of the stubs these are `Any`.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc


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
