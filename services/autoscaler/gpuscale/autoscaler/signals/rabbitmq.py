"""RabbitMQ over AMQP: the only file that imports aio-pika.

A passive declare returns the current ready messages and consumers of a queue; it does not return unacknowledged messages (a
queue with five of them reports zero). Measured against RabbitMQ 3.10 and aio-pika 10:

- A missing queue closes the channel, which is then replaced. Robust channels of aio-pika would reopen themselves, one
  more with every poll (kedacore/keda#6266 reached ten thousand connections that way), and its plain ones leave a
  callback on the connection, 3 KiB with every read: so channels are those of aiormq, below it.
- A frozen broker keeps the connection open and answers nothing. Every wait here has its own timeout, and a connection
  that hits it is given up, which takes two more seconds.
- A robust connection retries exactly every five seconds; here the next sweep retries, with back-off and jitter.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import aio_pika
from aio_pika.abc import AbstractConnection
from aio_pika.connection import make_url
from aio_pika.exceptions import (
    AMQPError,
    AuthenticationError,
    ChannelClosed,
    ChannelNotFoundEntity,
    ProbableAuthenticationError,
    ProtocolSyntaxError,
)
from aiormq.abc import AbstractChannel
from aiormq.exceptions import ChannelAccessRefused
from pamqp.common import FieldTable

from gpuscale.autoscaler.domain.queues import Declared, QueueFailure, QueueState
from gpuscale.autoscaler.signals.brokers import Broker, RetryGate, VirtualHostError

TIMEOUT = 5.0
# The broker counts as gone after three missed heartbeats, 33 s, instead of the default 183 s.
HEARTBEAT = 10
_PORTS = {"amqp": 5672, "amqps": 5671}
# aiormq raises RuntimeError, and ChannelInvalidStateError below it, for closed connections.
_LOST = (AMQPError, OSError, RuntimeError)


class AmqpSession:
    """At most one connection with at most one channel, to one virtual host of one broker.

    It connects on first use, and again, after a growing wait, when the connection was lost. One caller at a time.
    """

    def __init__(self, broker: Broker, virtual_host: str) -> None:
        self._broker = broker
        self._virtual_host = virtual_host
        self._connection: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None
        self._gate = RetryGate()
        # It logs each failed attempt as an error, with a stack; the sweep reports it once.
        logging.getLogger("aiormq").setLevel(logging.CRITICAL)

    async def declare(self, queue: str) -> Declared | QueueFailure:
        """The counts of one queue, or why it alone cannot be read; VirtualHostError if none can be read now."""
        channel = await self._open_channel()
        async with self._limits():
            try:
                found = await channel.queue_declare(queue, passive=True)
            except ChannelClosed as error:
                self._channel = None
                match error:
                    case ChannelNotFoundEntity() if "no queue" in str(error):
                        return QueueFailure(QueueState.NOT_FOUND, f"there is no queue {queue!r}")
                    case ChannelAccessRefused():
                        return QueueFailure(QueueState.AUTH_FAILED, f"the user may not read queue {queue!r}")
                    case _:  # a queue whose node is down, or one that is exclusive to another connection
                        text = f"queue {queue!r} cannot be read: {type(error).__name__}"
                        return QueueFailure(QueueState.ERROR, text)
        return Declared(ready=found.message_count or 0, consumers=found.consumer_count or 0)

    async def close(self) -> None:
        """Close the connection, cleanly if the broker answers in time."""
        connection, self._connection, self._channel = self._connection, None, None
        if connection is None:
            return
        try:
            async with asyncio.timeout(TIMEOUT):
                with _asked_for_cancellations():
                    await connection.close()
        except _LOST:
            pass  # it is already closed, or its broker is frozen

    async def _open_channel(self) -> AbstractChannel:
        if self._connection is None or not self._connection.connected.is_set():
            await self.close()
            await self._connect()
        transport = self._connection.transport if self._connection else None
        if transport is None:
            raise RuntimeError("a session has one caller at a time")
        if self._channel is None or self._channel.is_closed:
            async with self._limits():
                self._channel = await transport.connection.channel(publisher_confirms=False)
        return self._channel

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        self._gate.check(loop.time())
        url = self._broker.amqp
        where = make_url(
            host=url.host,
            port=url.port or _PORTS[url.scheme],
            login=url.username.get_secret_value(),
            password=url.password.get_secret_value(),
            virtualhost=self._virtual_host,
            ssl=url.scheme == "amqps",
            heartbeat=HEARTBEAT,
        )
        named: FieldTable = {"connection_name": "gpuscale queue watcher"}
        connection = aio_pika.Connection(where, ssl_context=self._broker.tls, client_properties=named)
        # Kept even while it fails: aio-pika starts to close unclosed connections on garbage collection.
        self._connection = connection
        try:
            async with self._limits():
                await connection.connect()
        except VirtualHostError as error:
            self._gate.failed(error.failure, loop.time())
            raise
        self._gate.succeeded()

    @asynccontextmanager
    async def _limits(self) -> AsyncGenerator[None]:
        """Around every call of aio-pika: a timeout, and one error for everything that costs the connection."""
        try:
            async with asyncio.timeout(TIMEOUT):
                with _asked_for_cancellations():
                    yield
        except _LOST as error:
            await self.close()
            raise VirtualHostError(self._connection_failure(error)) from error

    def _connection_failure(self, error: Exception) -> QueueFailure:
        broker, host = self._broker.name, self._virtual_host
        match error:
            case TimeoutError():
                state, text = QueueState.TIMEOUT, f"does not answer within {TIMEOUT:g} s over AMQP"
            case AuthenticationError() | ProbableAuthenticationError():
                state, text = QueueState.AUTH_FAILED, "refuses the user or password over AMQP"
            case ProtocolSyntaxError() if "Connection.Close" in str(error):
                # aiormq drops the broker's words; only in these two cases does the handshake end this way.
                state, text = (
                    QueueState.NOT_FOUND,
                    f"has no virtual host {host!r}, or the user may not use it",
                )
            case OSError() | RuntimeError():
                state, text = QueueState.UNREACHABLE, "cannot be reached over AMQP"
            case _:
                state, text = QueueState.ERROR, f"broke off over AMQP: {type(error).__name__}"
        return QueueFailure(state, f"broker {broker} {text}")


@contextmanager
def _asked_for_cancellations() -> Generator[None]:
    """Tells a lost connection from a cancellation: aiormq ends its waits with cancellations that nobody requested."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ConnectionError("the connection closed") from None
