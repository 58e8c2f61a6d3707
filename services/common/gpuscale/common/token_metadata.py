"""Bearer tokens on channels without TLS (loopback and unix sockets), where gRPC's call credentials do not work.

Channels are wrapped rather than intercepted: with gRPC's own interceptors a call is another kind of object, which behaves
differently when it is cancelled or written to.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc


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
        self._channel = channel
        self._token = token

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel."""
        return _TokenCall(self._channel.unary_unary(*args, **kwargs), self._token)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel."""
        return _TokenCall(self._channel.unary_stream(*args, **kwargs), self._token)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel."""
        return _TokenCall(self._channel.stream_unary(*args, **kwargs), self._token)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As of the channel."""
        return _TokenCall(self._channel.stream_stream(*args, **kwargs), self._token)


class TokenChannel(_TokenCalls, grpc.aio.Channel):
    """An asyncio channel that sends a token with every call."""

    async def close(self, grace: float | None = None) -> None:
        """As of the channel."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As of the channel."""
        state: grpc.ChannelConnectivity = self._channel.get_state(try_to_connect)
        return state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As of the channel."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """As of the channel."""
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()


class SyncTokenChannel(_TokenCalls, grpc.Channel):
    """A channel without an event loop that sends a token with every call."""

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool | None = False
    ) -> None:
        """As of the channel."""
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """As of the channel."""
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        """As of the channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()
