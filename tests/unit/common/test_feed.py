"""Who watches is told what is there, what changed and what is gone, also after having been away."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.rpc import feed as feeds
from gpuscale.common.rpc.feed import FeedView, ResourceFeed
from tests.support.watched import Thing, WatchReader, WatchThingsRequest, WatchThingsResponse


class Shown:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, value: tuple[str, str], kind: str) -> Any:
        self.count += 1
        name, team = value
        return Thing(name=name, team=team if kind == "" else f"{kind} of {team}")


def feed_of(shown: Callable[..., Any] | None = None, **options: Any) -> ResourceFeed[tuple[str, str]]:
    return ResourceFeed(WatchThingsResponse, shown or Shown(), **options)


def put(feed: ResourceFeed[tuple[str, str]], name: str, team: str = "", *, wakes: bool = True) -> None:
    feed.put(name, (name, team), wakes=wakes)


def of(team: str) -> FeedView[tuple[str, str]]:
    return FeedView(matches=lambda message: getattr(message, "team", "") == team)


def watch(
    feed: ResourceFeed[Any], token: str = "", view: FeedView[Any] | None = None
) -> aclosing[AsyncGenerator[bytes]]:
    return aclosing(feed.stream(WatchThingsRequest(resume_token=token), view))


async def told(stream: AsyncGenerator[bytes]) -> Any:
    return WatchThingsResponse.FromString(await asyncio.wait_for(anext(stream), 30))


async def test_who_comes_back_is_told_only_what_changed_meanwhile() -> None:
    feed = feed_of()
    for name in "abc":
        put(feed, name)
    async with watch(feed) as stream:
        token = (await told(stream)).resume_token
    put(feed, "b", "red")
    feed.remove("c")
    put(feed, "d")
    feed.remove("a")
    put(feed, "a")  # gone and there again: it is not told as removed
    async with watch(feed, token) as stream:
        first = await told(stream)
        assert [one.name for one in first.things] == ["b", "d", "a"]
        assert list(first.removed) == ["c"]
        assert first.full
        assert not first.reset
    assert not feed.watched


async def test_a_token_is_refused_where_it_is_none_or_another_watchs() -> None:
    feed = feed_of()
    async with watch(feed) as stream:
        token = (await told(stream)).resume_token
    for request in (
        WatchThingsRequest(resume_token=token, filter='team = "red"'),
        WatchThingsRequest(resume_token="nonsense"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            await anext(feed.stream(request))
        assert [one.field for one in caught.value.violations] == ["resume_token"]


async def test_what_does_not_match_any_more_is_removed_and_what_never_did_is_not_told() -> None:
    feed = feed_of()
    put(feed, "a", "red")
    put(feed, "b", "blue")
    async with watch(feed, view=of("red")) as stream:
        first = await told(stream)
        assert [one.name for one in first.things] == ["a"]
        put(feed, "b", "green")
        feed.remove("b")
        put(feed, "a", "blue")
        assert list((await told(stream)).removed) == ["a"]
        put(feed, "a", "red")
        assert [one.name for one in (await told(stream)).things] == ["a"]
    put(feed, "a", "blue")
    async with watch(feed, first.resume_token, of("red")) as stream:
        assert set((await told(stream)).removed) == {"a", "b"}


async def test_what_ended_is_told_as_it_is_to_who_followed_and_is_no_part_of_a_first_round() -> None:
    feed = feed_of()
    put(feed, "a", "runs")
    async with watch(feed) as stream:
        token = (await told(stream)).resume_token
        feed.remove("a", ("a", "ended"))
        assert [one.team for one in (await told(stream)).things] == ["ended"]
    async with watch(feed, token) as stream:
        assert [one.team for one in (await told(stream)).things] == ["ended"]
    async with watch(feed) as stream:
        assert not (await told(stream)).things


async def test_a_change_that_wakes_nobody_is_told_with_the_next_that_does() -> None:
    feed = feed_of()
    put(feed, "a", "1")
    async with watch(feed) as stream:
        await told(stream)
        waiting = asyncio.ensure_future(anext(stream))
        put(feed, "a", "2", wakes=False)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        put(feed, "b")
        assert [one.name for one in WatchThingsResponse.FromString(await waiting).things] == ["b"]
    async with watch(feed) as stream:
        assert [one.team for one in (await told(stream)).things] == ["2", ""]


async def test_an_empty_message_with_a_newer_token_comes_where_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds, "HEARTBEAT", 0.01)
    feed = feed_of()
    async with watch(feed, view=of("red")) as stream:
        first = await told(stream)
        put(feed, "b", "blue")
        beat = await told(stream)
        assert beat == WatchThingsResponse(resume_token=beat.resume_token)
        assert beat.resume_token not in {"", first.resume_token}


async def test_a_thing_is_made_into_a_message_once_for_all_and_only_when_somebody_reads() -> None:
    shown = Shown()
    feed = feed_of(shown)
    put(feed, "a")
    assert shown.count == 0
    for _ in range(3):
        async with watch(feed) as stream, watch(feed, view=of("")) as judging:
            await told(stream)
            await told(judging)
    assert shown.count == 2  # one is not kept, since nobody judged it
    async with watch(feed, view=FeedView(kind=lambda _: "owner")) as stream:
        assert [one.team for one in (await told(stream)).things] == ["owner of "]


async def test_a_message_that_tells_ages_is_made_anew_once_it_is_old() -> None:
    shown = Shown()
    feed = feed_of(shown, shared=0.0)
    put(feed, "a")
    for _ in range(2):
        async with watch(feed) as stream:
            await told(stream)
            await asyncio.sleep(0.001)
    assert shown.count == 2


async def test_much_is_told_in_several_messages_and_the_last_alone_has_the_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds, "MESSAGE_BYTES", 100)
    feed = feed_of()
    for index in range(50):
        put(feed, f"thing-{index}")
    reader = WatchReader()
    sizes: list[int] = []
    async with watch(feed) as stream:
        while not (message := reader.take(await anext(stream))).full:
            assert not message.resume_token
            sizes.append(message.ByteSize())
    assert len(reader.has) == 50
    assert max(sizes) < 200
    assert len(sizes) > 4


async def test_a_reader_that_does_not_read_is_told_of_each_thing_once_and_the_newest() -> None:
    feed = feed_of()
    put(feed, "a")
    async with watch(feed) as stream:
        await told(stream)
        for index in range(1000):
            put(feed, "a", str(index))
        assert [one.team for one in (await told(stream)).things] == ["999"]
