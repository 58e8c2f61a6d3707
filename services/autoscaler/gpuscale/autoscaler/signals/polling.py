"""Background polling of what signals need: beside the evaluations, never in them.

Queries that nobody needs any more are dropped. Of each query one call runs at a time, and only a few of all queries to one
server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, NoReturn, TypeVar

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.domain.signals import Sample
from gpuscale.autoscaler.domain.spec import WaitingSignal
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.tasks import Clock, wait_at_most

AT_ONCE = 4
"""Most concurrent calls to one server."""
MAX_QUESTIONS = 1_000
"""Most queries to one server."""
SHORTEST_PERIOD = 1.0
"""Least seconds between two calls for one query."""
FORGOTTEN_AFTER = 10.0
"""Periods after which a query that nobody repeated is dropped."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class NoAnswerError(Exception):
    """A query failed; the text says why, without secrets."""


@dataclass(frozen=True, slots=True)
class PollAnswer(Generic[V]):
    """The last answer."""

    value: V | None = None  # None if the last call failed, or there was none yet
    at: float | None = None  # when the last successful call was made, in seconds since boot
    problem: str = "it was not asked for yet"  # why there is no value; else empty


@dataclass(slots=True)
class _Question:
    period: float
    asked_at: float
    next_at: float = 0.0
    under_way: bool = False


class Poller(Generic[K, V]):
    """Repeats queries, each at its own period; `fetch` answers one in time, or raises `NoAnswerError`."""

    def __init__(self, fetch: Callable[[K], Awaitable[V]], clock: Clock) -> None:
        self._fetch = fetch
        self._clock = clock
        self._questions: dict[K, _Question] = {}
        self._answers: dict[K, PollAnswer[V]] = {}
        self._changed = asyncio.Event()

    def ask(self, key: K, period: float) -> PollAnswer[V]:
        """The last answer to a query, which is repeated at the shortest period requested, in seconds."""
        now, period = self._clock.now(), max(SHORTEST_PERIOD, period)
        known = self._questions.get(key)
        if known is not None:
            known.asked_at = now
            if period < known.period:
                known.period, known.next_at = period, min(known.next_at, now + period)
                self._changed.set()
        elif len(self._questions) < MAX_QUESTIONS:
            self._questions[key] = _Question(period, now)
            self._changed.set()
        else:
            return PollAnswer(problem=f"there are {MAX_QUESTIONS} questions already")
        return self._answers.get(key, PollAnswer())

    @property
    def unanswered(self) -> int:
        """How many queries had no answer when they were last made."""
        return sum(bool(one.problem) for one in self._answers.values())

    async def run(self) -> NoReturn:
        """Poll for ever."""
        some = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            while True:
                now = self._clock.now()
                for key, question in list(self._questions.items()):
                    if question.under_way:
                        continue
                    if now - question.asked_at > FORGOTTEN_AFTER * question.period:
                        del self._questions[key]
                        self._answers.pop(key, None)
                    elif question.next_at <= now:
                        question.under_way = True
                        question.next_at = now + question.period
                        group.create_task(self._answer(key, question, some))
                idle = [one.next_at for one in self._questions.values() if not one.under_way]
                self._changed.clear()
                await wait_at_most(self._changed, max(0.0, min(idle) - now) if idle else None)

    async def _answer(self, key: K, question: _Question, some: asyncio.Semaphore) -> None:
        try:
            async with some:
                at = self._clock.now()
                try:
                    answer = PollAnswer(await self._fetch(key), at, "")
                except NoAnswerError as error:
                    answer = replace(self._answers.get(key, PollAnswer()), value=None, problem=str(error))
            if self._questions.get(key) is question:  # nobody may need it any more
                self._answers[key] = answer
        finally:
            question.under_way = False
            self._changed.set()


PAGE = 1_000
MAX_PAGES = 100
"""Most pages of tenants that are read."""

Counts = Mapping[str, int]


async def waiting_requests(quotas: allocator_api.QuotaServiceAsyncStub, _question: None) -> Counts:
    """Waiting requests per tenant that has any; NoAnswerError if the allocator fails."""
    counts: dict[str, int] = {}
    request = allocator_api.ListQuotasRequest(page_size=PAGE)
    try:
        for _ in range(MAX_PAGES):
            with rpc_errors():
                found = await quotas.ListQuotas(request, timeout=RPC_TIMEOUT)
            counts |= {one.tenant: one.waiting_count for one in found.quotas if one.waiting_count}
            request.page_token = found.next_page_token
            if not request.page_token:
                return counts
    except GpuscaleError as error:
        raise NoAnswerError(f"the allocator does not answer: {error.message}") from error
    raise NoAnswerError(f"the allocator has more than {MAX_PAGES * PAGE} tenants")


def waiting_sample(source: WaitingSignal, answer: PollAnswer[Counts]) -> Sample:
    """The number of waiting requests of one tenant, or of all."""
    if answer.value is None:
        return Sample(at=answer.at, problem=answer.problem)
    count = answer.value.get(source.tenant, 0) if source.tenant else sum(answer.value.values())
    return Sample((float(count),), answer.at, proven_empty=count == 0)


async def room_for(capacity: allocator_api.CapacityServiceAsyncStub, ask: bytes) -> int:
    """How many replicas with this ask, encoded, fit at once; beyond 100 nodes, those that fit best are counted."""
    request = allocator_api.ExplainPlacementRequest(ask=allocator_api.Ask.FromString(ask))
    try:
        with rpc_errors():
            found = await capacity.ExplainPlacement(request, timeout=RPC_TIMEOUT)
    except GpuscaleError as error:
        raise NoAnswerError(f"the allocator does not answer: {error.message}") from error
    return sum(one.fitting_count // request.ask.gpu_count for one in found.nodes if not one.obstacle)
