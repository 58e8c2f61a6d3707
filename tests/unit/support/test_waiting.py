"""Waiting ends on success, on the deadline with the last thing seen, and at once on a fault of the test."""

import asyncio

import pytest

from tests.support.waiting import eventually, eventually_sync


@pytest.mark.looptime
async def test_returns_the_first_truthy_value_of_a_plain_check() -> None:
    answers = iter([0, None, "ready"])
    assert await eventually(lambda: next(answers)) == "ready"


@pytest.mark.looptime
async def test_awaits_an_async_check() -> None:
    answers = iter([0, 7])

    async def check() -> int:
        return next(answers)

    assert await eventually(check) == 7


@pytest.mark.looptime
async def test_the_deadline_names_the_last_value() -> None:
    started = asyncio.get_running_loop().time()
    with pytest.raises(AssertionError, match=r"within 3 s: last value 0"):
        await eventually(lambda: 0, timeout=3)
    assert 2.9 < asyncio.get_running_loop().time() - started < 3.1


@pytest.mark.looptime
async def test_the_deadline_names_the_last_exception() -> None:
    def refuse() -> bool:
        raise ConnectionRefusedError("nobody listens")

    with pytest.raises(AssertionError, match="nobody listens"):
        await eventually(refuse, timeout=1)


@pytest.mark.looptime
async def test_a_check_that_hangs_is_cancelled_at_the_deadline() -> None:
    cancelled = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(AssertionError, match="never finished"):
        await eventually(hang, timeout=1)
    assert cancelled.is_set()


async def test_an_unexpected_exception_ends_the_wait_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        await eventually(lambda: 1 / 0)


def test_the_plain_form_waits_too() -> None:
    answers = iter([0, 0, 5])
    assert eventually_sync(lambda: next(answers), interval=0.001) == 5
    with pytest.raises(AssertionError, match="last value False"):
        eventually_sync(lambda: False, timeout=0.01, interval=0.001)
