"""Retries of calls without an answer, and waiting for an endpoint.

Only for idempotent calls: reads, and those with a request_id.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from math import inf
from typing import TYPE_CHECKING, TypeVar

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.common.errors import DeadlineExceededError, GpuscaleError, UnavailableError
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.runtime.tasks import Backoff
from gpuscale.common.sizes import to_seconds

if TYPE_CHECKING:
    from gpuscale.client.client import AsyncClient, Client


ATTEMPTS = 4
"""Most attempts. With the waits between them, they outlast a restart of a service."""
_FIRST_WAIT = 0.25
_UNANSWERED = (UnavailableError, DeadlineExceededError)

Answer = TypeVar("Answer")


def retrying(call: Callable[[], Answer], until: float = inf) -> Answer:
    """Make a call, and retry without an answer, but not after `until` (of `time.monotonic`).

    Raises GpuscaleError: the last attempt failed, or an attempt got an error as answer.
    """
    waits = Backoff(initial=_FIRST_WAIT, cap=2.0)
    for _ in range(ATTEMPTS - 1):
        try:
            return call()
        except _UNANSWERED as error:
            wait = _wait(error, waits)
            if time.monotonic() + wait >= until:
                raise
            time.sleep(wait)
    return call()


async def retrying_async(call: Callable[[], Awaitable[Answer]], until: float = inf) -> Answer:
    """`retrying` for async code, with the same errors."""
    waits = Backoff(initial=_FIRST_WAIT, cap=2.0)
    for _ in range(ATTEMPTS - 1):
        try:
            return await call()
        except _UNANSWERED as error:
            wait = _wait(error, waits)
            if time.monotonic() + wait >= until:
                raise
            await asyncio.sleep(wait)
    return await call()


def _wait(error: GpuscaleError, waits: Backoff) -> float:
    """Seconds until the next attempt: as the server says, or growing."""
    return waits.next() if error.retry_after is None else min(2.0, error.retry_after)


PERIOD = 0.5
"""Seconds between polls of an endpoint."""
_LEAST = 2.0
"""Least seconds for a poll: the last may end after the deadline, so that a slow server still tells the state."""


def wait_ready(
    client: Client, endpoint: str, *, replicas: int | None = None, timeout: float | str = 300.0
) -> autoscaler_api.Endpoint:
    """Wait until an endpoint has enough READY replicas.

    Args:
        client: client of the gateway, or of the autoscaler.
        endpoint: `endpoints/{endpoint}`.
        replicas: how many; by default as many as the endpoint desires, which may be none.
        timeout: how long to wait: seconds, or a text such as `5m`.

    Returns:
        The endpoint.

    Raises:
        DeadlineExceededError: it was not ready in time (reason NOT_READY); the message tells its state.
        GpuscaleError: the endpoint cannot be read or does not exist.
    """
    deadline = time.monotonic() + to_seconds(timeout)
    request = autoscaler_api.GetEndpointRequest(name=endpoint)
    while True:
        found = retrying(
            lambda: client.endpoints.GetEndpoint(request, timeout=_limit(deadline)), deadline
        ).endpoint
        if _is_ready(found, replicas):
            return found
        time.sleep(_pause(found, deadline))


async def wait_ready_async(
    client: AsyncClient,
    endpoint: str,
    *,
    replicas: int | None = None,
    timeout: float | str = 300.0,  # noqa: ASYNC109
) -> autoscaler_api.Endpoint:
    """`wait_ready` for async code, with the same errors."""
    deadline = time.monotonic() + to_seconds(timeout)
    request = autoscaler_api.GetEndpointRequest(name=endpoint)
    while True:
        found = (
            await retrying_async(
                lambda: client.endpoints.GetEndpoint(request, timeout=_limit(deadline)), deadline
            )
        ).endpoint
        if _is_ready(found, replicas):
            return found
        await asyncio.sleep(_pause(found, deadline))


def _limit(deadline: float) -> float | None:
    """Most seconds for one poll; None for the client's timeout, if there is time for that."""
    left = deadline - time.monotonic()
    return None if left > RPC_TIMEOUT else max(_LEAST, left)


def _is_ready(endpoint: autoscaler_api.Endpoint, replicas: int | None) -> bool:
    status = endpoint.status
    return status.ready_replicas >= (status.desired_replicas if replicas is None else replicas)


def _pause(endpoint: autoscaler_api.Endpoint, deadline: float) -> float:
    """Seconds until the next poll. Raises DeadlineExceededError: no time is left."""
    left = deadline - time.monotonic()
    if left <= 0:
        status = endpoint.status
        raise DeadlineExceededError(
            f"{endpoint.name} has {status.ready_replicas} of {status.desired_replicas} replicas ready: {status.summary}",
            reason="NOT_READY",
            metadata={"name": endpoint.name},
        )
    return min(PERIOD, left)
