"""Calls without an answer are made again, and not for longer than whoever waits for them wants."""

from __future__ import annotations

import socket
import time
from unittest.mock import AsyncMock, Mock

import pytest

from gpuscale.client import UnavailableError
from gpuscale.client.retries import ATTEMPTS, retrying, retrying_async
from gpuscale.common.rpc.diagnosis import PATIENCE, STEPS, explained

AWAY = UnavailableError("nobody there", retry_after=0.001)


def test_a_call_without_an_answer_is_made_again() -> None:
    call = Mock(side_effect=AWAY)
    with pytest.raises(UnavailableError):
        retrying(call)
    assert call.call_count == ATTEMPTS


async def test_but_not_when_the_time_is_over_nor_in_an_event_loop() -> None:
    call, awaited = Mock(side_effect=AWAY), AsyncMock(side_effect=AWAY)
    with pytest.raises(UnavailableError):
        retrying(call, time.monotonic())
    with pytest.raises(UnavailableError):
        await retrying_async(awaited, time.monotonic())
    assert (call.call_count, awaited.call_count) == (1, 1)


@pytest.mark.parametrize(
    ("address", "limit", "expected"),
    [
        ("127.0.0.1:1", float("inf"), [PATIENCE]),
        ("127.0.0.1:1", 0.6, [0.6 / STEPS]),
        ("127.0.0.1:1,127.0.0.1:2", 1.2, [0.6 / STEPS] * 2),
        ("127.0.0.1:1", 0.0, []),
    ],
)
def test_why_nothing_answers_is_found_out_in_the_time_of_the_call(
    address: str, limit: float, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The renewal of a lease must not take so long that its loss is told too late."""
    waited: list[float] = []

    def connect(_: tuple[str, int], timeout: float) -> socket.socket:
        waited.append(timeout)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    error = UnavailableError("nobody there")
    assert explained(address, None, error, limit) is error
    assert waited == pytest.approx(expected)
