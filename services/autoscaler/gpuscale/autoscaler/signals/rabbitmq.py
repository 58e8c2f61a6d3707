"""RabbitMQ over AMQP and by its management API: the only file that imports aio-pika.

A passive declare returns the current ready messages and consumers of a queue; it does not return unacknowledged messages (a
queue with five of them reports zero). Measured against RabbitMQ 3.10 and aio-pika 10:

- A missing queue closes the channel, which is then replaced. Robust channels of aio-pika would reopen themselves, one
  more with every poll (kedacore/keda#6266 reached ten thousand connections that way), and its plain ones leave a
  callback on the connection, 3 KiB with every read: so channels are those of aiormq, below it.
- A frozen broker keeps the connection open and answers nothing. Every wait here has its own timeout, and a connection
  that hits it is given up, which takes two more seconds.
- A robust connection retries exactly every five seconds; here the next sweep retries, with back-off and jitter.

The management API returns the ready and unacknowledged messages of all queues of a virtual host in one request. With statistics
disabled and totals requested, it asks the queues themselves: the counts are milliseconds old, while its usual statistics are
seconds old. With only these three columns the broker works a fifth less for a thousand queues, and its answer is a third as
long (`python -m bench queues`). For a single queue it returns no counts in this mode (rabbitmq/rabbitmq-server#10314), so the
whole list is read.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeVar
from urllib.parse import quote

import aio_pika
import httpx
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
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from gpuscale.autoscaler.domain.signals import LARGEST_COUNT, QueueFailure, QueueState, Rates, countable
from gpuscale.autoscaler.signals.brokers import Broker, RetryGate, VirtualHostError
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.secrets import SecretUrl

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

    async def declare(self, queue: str) -> tuple[int, int] | QueueFailure:
        """The ready messages and consumers of one queue, or why it alone cannot be read; VirtualHostError if none can be read now."""
        if self._connection is None or not self._connection.connected.is_set():
            await self.close()
            await self._connect()
        transport = self._connection.transport if self._connection else None
        if transport is None:
            raise RuntimeError("a session has one caller at a time")
        if self._channel is None or self._channel.is_closed:
            async with self._limits():
                self._channel = await transport.connection.channel(publisher_confirms=False)
        channel = self._channel
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
        return found.message_count or 0, found.consumer_count or 0

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
            match error:
                case TimeoutError():
                    state, text = QueueState.TIMEOUT, f"does not answer within {TIMEOUT:g} s over AMQP"
                case AuthenticationError() | ProbableAuthenticationError():
                    state, text = QueueState.AUTH_FAILED, "refuses the user or password over AMQP"
                case ProtocolSyntaxError() if "Connection.Close" in str(error):
                    # aiormq drops the broker's words; only in these two cases does the handshake end this way.
                    text = f"has no virtual host {self._virtual_host!r}, or the user may not use it"
                    state = QueueState.NOT_FOUND
                case OSError() | RuntimeError():
                    state, text = QueueState.UNREACHABLE, "cannot be reached over AMQP"
                case _:
                    state, text = QueueState.ERROR, f"broke off over AMQP: {type(error).__name__}"
            raise VirtualHostError(QueueFailure(state, f"broker {self._broker.name} {text}")) from error


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


MAX_ANSWER_BYTES = 64 * 1024 * 1024
_DOTS = frozenset({".", ".."})
"""In a path these mean another directory, in any encoding."""


_Count = Annotated[int | None, AfterValidator(countable)]


@dataclass(frozen=True, slots=True)
class Counted:
    """A queue in the API's list, with the API's field names; a queue whose node is down has no counts."""

    name: str
    messages_ready: _Count = None
    messages_unacknowledged: _Count = None


@dataclass(frozen=True, slots=True)
class _Rate:
    rate: Annotated[float, Field(allow_inf_nan=False)] = 0.0


_NO_RATE = _Rate()


@dataclass(frozen=True, slots=True)
class _Stats:
    """A queue that was not used for a while, or ever, has no details: its rates are 0."""

    publish_details: _Rate = _NO_RATE
    deliver_get_details: _Rate = _NO_RATE


_NO_STATS = _Stats()


@dataclass(frozen=True, slots=True)
class _QueueStatistics:
    """A queue with its statistics; if the broker collects none, even the count of messages is missing."""

    name: str
    messages: int | None = None
    consumers: Annotated[int, Field(le=LARGEST_COUNT)] = 0
    message_stats: _Stats = _NO_STATS
    head_message_timestamp: int | str | None = None
    """Seconds since 1970; null or empty if no message waits, or the first has no timestamp."""


_QUEUES = TypeAdapter(list[Counted])
_MEASURED = TypeAdapter(list[_QueueStatistics])
_TOTALS = {
    "disable_stats": "true",
    "enable_queue_totals": "true",
    "columns": "name,messages_ready,messages_unacknowledged",
}
_STATISTICS = {
    "columns": (
        "name,messages,consumers,message_stats.publish_details.rate,message_stats.deliver_get_details.rate,"
        "head_message_timestamp"
    )
}
_PLAIN = {"Accept-Encoding": "identity"}
"""A few bytes could expand to gigabytes before anybody counts them; and it is less work at both ends."""
T = TypeVar("T")


class Measured(NamedTuple):
    """A queue's consumers, messages per second in and out, and the timestamp of its first message."""

    consumers: int
    published: float
    delivered: float
    head_timestamp: int | None


class ManagementClient:
    """The management API of one broker; one HTTP client with at most `CONNECTIONS` connections."""

    CONNECTIONS = 4

    def __init__(self, broker: Broker, url: SecretUrl) -> None:
        self._name = broker.name
        port = "" if url.port is None else f":{url.port}"
        host = f"[{url.host}]" if ":" in url.host else url.host
        self._client = httpx.AsyncClient(
            base_url=f"{url.scheme}://{host}{port}{url.path.rstrip('/')}/api/",
            auth=httpx.BasicAuth(url.username.get_secret_value(), url.password.get_secret_value()),
            verify=broker.tls or False,  # there is always one if the URL is https://
            timeout=TIMEOUT,
            limits=httpx.Limits(max_connections=self.CONNECTIONS),
            follow_redirects=False,
            trust_env=False,
        )

    async def totals(self, virtual_host: str) -> dict[str, Counted]:
        """The counts of every queue by name. Raises VirtualHostError if the API fails."""
        return {queue.name: queue for queue in await self._list(virtual_host, _TOTALS, _QUEUES)}

    async def statistics(self, virtual_host: str) -> dict[str, Measured]:
        """The broker's statistics of each queue by name; some seconds old, and possibly incomplete."""
        return {
            queue.name: Measured(
                queue.consumers,
                queue.message_stats.publish_details.rate,
                queue.message_stats.deliver_get_details.rate,
                None if isinstance(head := queue.head_message_timestamp, str) else head,
            )
            for queue in await self._list(virtual_host, _STATISTICS, _MEASURED)
            if queue.messages is not None
        }

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def _list(
        self, virtual_host: str, params: Mapping[str, str], kind: TypeAdapter[list[T]]
    ) -> list[T]:
        if virtual_host in _DOTS:
            raise self._error(QueueState.NOT_FOUND, f"cannot be asked for a virtual host {virtual_host!r}")
        try:
            async with asyncio.timeout(TIMEOUT):
                answer = await self._get(f"queues/{quote(virtual_host, safe='')}", params)
        except (TimeoutError, httpx.TimeoutException):
            raise self._error(QueueState.TIMEOUT, f"does not answer within {TIMEOUT:g} s") from None
        except httpx.RequestError as error:
            raise self._error(QueueState.UNREACHABLE, "cannot be reached") from error
        try:
            return kind.validate_json(answer)
        except ValidationError:
            raise self._error(QueueState.ERROR, "answers something that is not a list of queues") from None

    async def _get(self, path: str, params: Mapping[str, str]) -> bytes:
        async with self._client.stream("GET", path, params=params, headers=_PLAIN) as response:
            match response.status_code:
                case httpx.codes.OK:
                    body = bytearray()
                    async for chunk in response.aiter_raw():
                        body += chunk
                        if len(body) > MAX_ANSWER_BYTES:
                            text = f"answers with more than {MAX_ANSWER_BYTES} bytes"
                            raise self._error(QueueState.ERROR, text)
                    return bytes(body)
                case httpx.codes.UNAUTHORIZED | httpx.codes.FORBIDDEN:
                    text = "refuses the user, its password, or its access to the virtual host"
                    raise self._error(QueueState.AUTH_FAILED, text)
                case httpx.codes.NOT_FOUND:
                    raise self._error(QueueState.NOT_FOUND, "has no such virtual host")
                case code:
                    raise self._error(QueueState.ERROR, f"answers with HTTP status {code}")

    def _error(self, state: QueueState, what: str) -> VirtualHostError:
        return VirtualHostError(QueueFailure(state, f"the management API of broker {self._name} {what}"))


STATISTICS_PERIOD = 5.0
"""Seconds between requests; the broker's own statistics are no fresher."""
CONSUMERS_PERIOD = 30.0
"""Seconds between requests while nobody reads rates."""


class QueueStatistics:
    """The statistics of all queues of a virtual host; one caller at a time."""

    def __init__(self, management: ManagementClient, virtual_host: str, clock: Clock) -> None:
        self._management = management
        self._virtual_host = virtual_host
        self._clock = clock
        self._measured: Mapping[str, Measured] = {}
        self._at, self._wall = 0.0, 0.0
        self._asked = -math.inf
        self._failure: QueueFailure | None = None

    def consumers(self, queue: str) -> int | str:
        """The consumers of a queue, or why they are unknown."""
        found = self._measured.get(queue)
        if found is not None:
            return found.consumers
        why = f": {self._failure.message}" if self._failure else " yet"
        return f"consumers unknown{why}"

    def rates(self, queue: str) -> Rates | None:
        """The rates of a queue; None if unknown.

        A timestamp ahead of our clock comes from another clock: it gives no age.
        """
        found = self._measured.get(queue)
        if found is None:
            return None
        age = None if found.head_timestamp is None else self._wall - found.head_timestamp
        known = age if age is not None and age >= 0 else None
        return Rates(found.published, found.delivered, self._at, known)

    async def refresh(self, rates: bool) -> QueueFailure | None:
        """Read them again if it is time; returns why that fails, if so: nothing is known of them then.

        `rates`: whether anybody reads rates.
        """
        now = asyncio.get_running_loop().time()
        if now < self._asked + (STATISTICS_PERIOD if rates else CONSUMERS_PERIOD):
            return self._failure
        self._asked = now
        at, wall = self._clock.now(), self._clock.wall().timestamp()
        try:
            measured, failure = await self._management.statistics(self._virtual_host), None
        except VirtualHostError as error:
            measured, failure = dict[str, Measured](), error.failure
        self._measured, self._failure, self._at, self._wall = measured, failure, at, wall
        return self._failure
