"""Calls without an answer are made again, and not for longer than whoever waits for them wants."""

from __future__ import annotations

import socket
import time

import pytest

from gpuscale.client import UnavailableError
from gpuscale.client.retries import ATTEMPTS, retrying, retrying_async
from gpuscale.common.rpc.diagnosis import PATIENCE, STEPS, explained

AWAY = UnavailableError("nobody there", retry_after=0.001)


def test_a_call_without_an_answer_is_made_again() -> None:
    tried: list[int] = []

    def call() -> None:
        tried.append(1)
        raise AWAY

    with pytest.raises(UnavailableError):
        retrying(call)
    assert len(tried) == ATTEMPTS


def test_but_not_when_the_time_is_over() -> None:
    tried: list[int] = []

    def call() -> None:
        tried.append(1)
        raise AWAY

    with pytest.raises(UnavailableError):
        retrying(call, time.monotonic())
    assert len(tried) == 1


async def test_and_so_it_is_in_an_event_loop() -> None:
    tried: list[int] = []

    async def call() -> None:
        tried.append(1)
        raise AWAY

    with pytest.raises(UnavailableError):
        await retrying_async(call, time.monotonic())
    assert len(tried) == 1


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
