"""Bearer tokens on channels without TLS (loopback and unix sockets), where gRPC's call credentials do not work."""

from typing import Any

import grpc

from gpuscale.common.rpc.wrapped_channel import SyncWrappedChannel, WrappedChannel


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
