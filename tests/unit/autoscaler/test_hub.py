"""Followers of endpoints hear of their changes alone, and questions for logs end and outlive nobody."""

import asyncio
from dataclasses import replace
from unittest.mock import AsyncMock, Mock

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.planning import AdapterFacts
from gpuscale.autoscaler.domain.replicas import MOST_AT_ONCE, LogPart, ReplicaState
from gpuscale.autoscaler.domain.spec import ReplicaTemplate
from gpuscale.autoscaler.loop.hub import RESEND, AdapterSession, Followers, LogQuestion, Wake
from gpuscale.autoscaler.loop.leases import Actor
from gpuscale.autoscaler.servicers.endpoint_servicer import DEFAULT_BYTES, EndpointServicer
from gpuscale.common.errors import ResourceExhaustedError, UnavailableError
from tests.support.autoscaler_values import endpoint, replica


async def test_no_look_comes_before_its_time_where_timers_are_rounded_to_milliseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, set_for = asyncio.get_running_loop(), list[float]()
    later = loop.call_later
    monkeypatch.setattr(
        loop, "call_later", lambda seconds, call: (set_for.append(seconds), later(0, call))[1]
    )
    for seconds in (0.0, 0.0014, 12.4996):
        await Wake().wait(seconds)
    assert set_for[0] == 0.0
    assert all(round(one, 3) >= due for one, due in zip(set_for[1:], (0.0014, 12.4996), strict=True))


def test_all_who_follow_an_endpoint_hear_of_it_and_no_others() -> None:
    followers = Followers()
    with followers.follow("a") as one, followers.follow("a") as two, followers.follow("b") as other:
        followers.tell("a")
        followers.tell("a")
        assert (one.is_set(), two.is_set(), other.is_set()) == (True, True, False)


def test_who_leaves_is_told_no_more_and_takes_nobody_along() -> None:
    followers = Followers()
    with followers.follow("a") as stays:
        with followers.follow("a") as leaves:
            pass
        followers.tell("a")
        assert (stays.is_set(), leaves.is_set()) == (True, False)


def test_nothing_is_kept_of_endpoints_that_nobody_follows() -> None:
    followers = Followers()
    for number in range(100):
        with followers.follow(f"e{number}"):
            pass
    followers.tell("e1")
    assert followers.looked_at == {"e1"}
    followers.looked_at.clear()
    followers.some = (new := Followers()).some
    assert vars(followers) == vars(new)


NAME = "endpoints/e/replicas/r"
FACTS = AdapterFacts("a", "process", "n", frozenset({"worker"}), 0, live=False)


async def test_who_gives_up_leaves_nothing_to_be_sent() -> None:
    """Over a stream that takes nothing, callers who come and go must not fill the memory."""
    session = AdapterSession(FACTS, lambda: 1)
    for _ in range(100):
        asking = asyncio.create_task(session.read_log(NAME, None, 10))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
    asking = asyncio.create_task(session.read_log(NAME, None, 10))
    await asyncio.sleep(0)
    updates = session.updates()
    assert await anext(updates) == LogQuestion(101, NAME, None, 10)
    session.answer(1, LogPart(b"late"))
    session.answer(101, LogPart(b"in time"))
    session.answer(101, LogPart(b"twice"))
    assert (await asking).content == b"in time"
    session.close()
    assert [update async for update in updates] == []


async def test_no_more_than_some_wait_and_all_hear_of_the_end() -> None:
    session = AdapterSession(FACTS, lambda: 1)
    waiting = [asyncio.create_task(session.read_log(NAME, None, 10)) for _ in range(MOST_AT_ONCE)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError):
        await session.read_log(NAME, None, 10)
    session.close()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [getattr(end, "reason", end) for end in ends] == ["ADAPTER_DISCONNECTED"] * MOST_AT_ONCE


async def test_no_number_of_questions_holds_up_the_state() -> None:
    """One whose caller gave up while those before it were sent is not sent."""
    session = AdapterSession(FACTS, lambda: 7)
    session.tell([])
    asking = [asyncio.create_task(session.read_log(NAME, None, 10)) for _ in range(3)]
    await asyncio.sleep(0)
    updates, sent = session.updates(), list[object]()
    for _ in range(3):
        sent.append(await anext(updates))
        asking.append(asyncio.create_task(session.read_log(NAME, None, 10)))
        asking[2].cancel()
        await asyncio.sleep(0)
    assert [getattr(one, "number", one) for one in sent] == [1, 2, (7, [])]
    session.close()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_a_connection_that_has_ended_is_not_asked() -> None:
    """Else each call would wait for an answer that cannot come."""
    session = AdapterSession(FACTS, lambda: 1)
    session.close()
    with pytest.raises(UnavailableError) as refused:
        await session.read_log(NAME, None, 10)
    assert refused.value.reason == "ADAPTER_DISCONNECTED"


async def test_a_caller_gets_no_more_than_it_asked_for_whatever_an_adapter_answers() -> None:
    deps = AsyncMock()
    deps.store.read.return_value = replica(state=ReplicaState.READY, adapter="a")
    deps.hub.read_log.return_value = LogPart(b"x" * 100_000, 7)
    servicer = EndpointServicer(Mock(), deps, Mock())
    request = api.ReadReplicaLogRequest(name=NAME, offset=7, max_bytes=10)
    read = await servicer.ReadReplicaLog(request, Mock())
    assert read == api.ReadReplicaLogResponse(content=b"x" * 10, offset=7, next_offset=17)
    request.max_bytes = 0
    assert len((await servicer.ReadReplicaLog(request, Mock())).content) == DEFAULT_BYTES


@pytest.mark.looptime
async def test_the_desired_state_is_sent_again_until_it_is_acknowledged() -> None:
    session = AdapterSession(FACTS, lambda: 7)
    updates = session.updates()
    session.tell([])
    assert [await anext(updates) for _ in range(3)] == [(7, [])] * 3
    assert asyncio.get_running_loop().time() == pytest.approx(2 * RESEND)
    session.heard(7, {})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(updates), 60)


async def test_an_adapter_that_connects_while_others_are_looked_through_is_not_said_to_be_full() -> None:
    hub, store = AsyncMock(), AsyncMock()
    hub.facts = Mock(side_effect=[[], [replace(FACTS, live=True)]])
    store.read.return_value = []
    actor = Actor(store, Mock(now=lambda: 0.0), hub, Mock())
    refusal = await actor.act([replica(template=ReplicaTemplate("worker", gpu_count=1))], endpoint())
    assert refusal
    assert refusal.text == "no adapter is connected"
