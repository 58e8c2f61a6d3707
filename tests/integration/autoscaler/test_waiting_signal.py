"""Requests that wait for GPUs at the allocator, as a signal."""

from functools import partial

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.domain.spec import WaitingSignal
from gpuscale.autoscaler.signals import polling as waiting
from gpuscale.autoscaler.signals.polling import NoAnswerError, PollAnswer, waiting_requests, waiting_sample
from gpuscale.common.errors import UnavailableError
from gpuscale.common.rpc.channel import open_channel
from tests.support.fake_allocator import FakeAllocator, serving


async def test_requests_are_counted_by_tenant_over_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator({})
    async with serving(allocator) as address, open_channel(address) as channel:
        requests = partial(waiting_requests, allocator_api.QuotaServiceStub(channel), None)
        assert await requests() == {}
        allocator.waiting = {"a": 2, "b": 0, "c": 3}
        counts = await requests()
        assert counts == {"a": 2, "c": 3}
        answer = PollAnswer(counts, 5.0, "")
        for source, count in ((WaitingSignal(), 5.0), (WaitingSignal("c"), 3.0), (WaitingSignal("x"), 0.0)):
            sample = waiting_sample(source, answer)
            assert (sample.values, sample.at, sample.proven_empty) == ((count,), 5.0, count == 0)
        monkeypatch.setattr(waiting, "MAX_PAGES", 2)
        with pytest.raises(NoAnswerError, match="more than 2000 tenants"):
            await requests()
        allocator.failure = UnavailableError("it starts")
        with pytest.raises(NoAnswerError, match="the allocator does not answer: it starts"):
            await requests()


def test_a_failure_is_a_problem_with_the_time_of_the_last_answer() -> None:
    sample = waiting_sample(WaitingSignal(), PollAnswer(None, 5.0, "it is away"))
    assert (sample.values, sample.at, sample.problem) == ((), 5.0, "it is away")
