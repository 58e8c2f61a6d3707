"""What is asked for elsewhere is asked again at its period, never twice at a time, and not for nobody."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest

from gpuscale.autoscaler.signals import polling
from gpuscale.autoscaler.signals.polling import NoAnswerError, PollAnswer, Poller
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime


class Place:
    """Answers with the count of calls, after `delay` seconds; `problem` fails them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.delay = 0.0
        self.problem = ""

    async def fetch(self, key: str) -> int:
        self.calls.append(key)
        number = len(self.calls)
        await asyncio.sleep(self.delay)
        if self.problem:
            raise NoAnswerError(self.problem)
        return number


@asynccontextmanager
async def polling_of(place: Place) -> AsyncGenerator[Poller[str, int]]:
    poller = Poller(place.fetch, LoopClock())
    task = asyncio.create_task(poller.run())
    try:
        yield poller
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def keep_asking(ask: Callable[[], PollAnswer[int]], seconds: float) -> None:
    """Ask every second, as an endpoint's ticks do."""
    for _ in range(round(seconds)):
        ask()
        await asyncio.sleep(1.0)


async def test_a_question_is_answered_soon_and_then_at_its_period() -> None:
    place = Place()
    async with polling_of(place) as poller:
        first = poller.ask("q", 5.0)
        assert (first.value, first.problem) == (None, "it was not asked for yet")
        await asyncio.sleep(0.1)
        second = poller.ask("q", 5.0)
        assert (second.value, second.problem) == (1, "")
        assert second.at is not None
        await keep_asking(lambda: poller.ask("q", 5.0), 20)
        assert len(place.calls) == 5


async def test_the_shortest_period_holds_and_never_less_than_the_least() -> None:
    place = Place()
    async with polling_of(place) as poller:
        for period in (60.0, 0.001):
            poller.ask("q", period)
        await keep_asking(lambda: poller.ask("q", 60.0), 9.5)
        assert len(place.calls) == 10


async def test_a_failure_takes_the_value_and_keeps_the_time_of_the_last_success() -> None:
    place = Place()
    async with polling_of(place) as poller:
        poller.ask("q", 5.0)
        await asyncio.sleep(0.1)
        good = poller.ask("q", 5.0)
        place.problem = "it is gone"
        await asyncio.sleep(5.0)
        bad = poller.ask("q", 5.0)
        assert (bad.value, bad.at, bad.problem, poller.unanswered) == (None, good.at, "it is gone", 1)
        place.problem = ""
        await asyncio.sleep(5.0)
        assert poller.ask("q", 5.0).value is not None
        assert poller.unanswered == 0


async def test_a_slow_answer_is_waited_for_and_holds_up_no_other_question() -> None:
    place = Place()
    place.delay = 30.0
    async with polling_of(place) as poller:
        await keep_asking(lambda: poller.ask("slow", 1.0), 5)
        place.delay = 0.0
        await keep_asking(lambda: (poller.ask("slow", 1.0), poller.ask("quick", 1.0))[1], 10)
        assert place.calls.count("slow") == 1
        assert place.calls.count("quick") == 10


async def test_so_many_calls_are_under_way_at_a_time() -> None:
    place = Place()
    place.delay = 1.0
    async with polling_of(place) as poller:
        for number in range(10):
            poller.ask(f"q{number}", 60.0)
        await asyncio.sleep(0.5)
        assert len(place.calls) == polling.AT_ONCE
        await asyncio.sleep(3.0)
        assert len(place.calls) == 10


async def test_what_nobody_asks_for_any_more_is_dropped() -> None:
    place = Place()
    async with polling_of(place) as poller:
        poller.ask("q", 1.0)
        await asyncio.sleep(60.0)
        assert len(place.calls) <= polling.FORGOTTEN_AFTER + 1
        assert poller.ask("q", 1.0).problem == "it was not asked for yet"


async def test_so_many_questions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "MAX_QUESTIONS", 1)
    async with polling_of(Place()) as poller:
        poller.ask("q", 1.0)
        assert "1 questions already" in poller.ask("other", 1.0).problem


async def test_a_question_that_is_to_be_asked_more_often_is_asked_so_from_now_on() -> None:
    """As when the tick of an endpoint is made shorter; not when the long period that it had is over."""
    place = Place()
    async with polling_of(place) as poller:
        poller.ask("q", 1800.0)
        await asyncio.sleep(10)
        await keep_asking(lambda: poller.ask("q", 2.0), 10)
        assert len(place.calls) == 5
        poller.ask("q", 1800.0)
        await asyncio.sleep(3)
        assert len(place.calls) == 7, "who asks less often does not make it less often for others"
