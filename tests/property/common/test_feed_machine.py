"""Whatever changes and whenever a reader loses its stream: with its token it ends with what there is."""

import asyncio
from collections.abc import AsyncGenerator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from gpuscale.common.rpc.feed import FeedView, ResourceFeed
from tests.support.watched import Thing, WatchReader, WatchThingsRequest, WatchThingsResponse

NAMES = st.sets(st.sampled_from("abc"), min_size=1).map(sorted)
TEAMS = st.sampled_from(["red", "blue"])


class FeedMachine(RuleBasedStateMachine):
    """One feed and one reader, who sees all or one team and comes back with its token whenever it lost its stream."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.feed = self._new_feed()
        self.truth: dict[str, str] = {}
        self.reader = WatchReader()
        self.stream: AsyncGenerator[bytes] | None = None
        self.team = ""

    @initialize(team=st.sampled_from(["", "red"]))
    def choose(self, team: str) -> None:
        self.team = team

    @rule(names=NAMES, team=TEAMS)
    def put(self, names: list[str], team: str) -> None:
        for name in names:
            self.feed.put(name, (name, team), wakes=self.truth.get(name) != team)
            self.truth[name] = team

    @rule(names=NAMES, told=st.booleans())
    def remove(self, names: list[str], told: bool) -> None:
        for name in names:
            team = self.truth.pop(name, None)
            self.feed.remove(name, (name, f"{team} ended") if told and team else None)

    @rule()
    def restart(self) -> None:
        self.feed = self._new_feed()
        for name, team in self.truth.items():
            self.feed.put(name, (name, team))
        self.lose()

    def lose(self) -> None:
        if self.stream is not None:
            self.loop.run_until_complete(self.stream.aclose())
        self.stream = None

    @rule(loses=st.booleans())
    def read(self, loses: bool) -> None:
        """Read until nothing comes; then the reader has what there is. Afterwards it may lose its stream."""
        self.loop.run_until_complete(self._read())
        believed = {name: one.team for name, one in self.reader.has.items() if "ended" not in one.team}
        assert believed == {name: team for name, team in self.truth.items() if self.team in {"", team}}
        if loses:
            self.lose()

    def teardown(self) -> None:
        self.lose()
        self.loop.close()

    def _new_feed(self) -> ResourceFeed[tuple[str, str]]:
        return ResourceFeed(WatchThingsResponse, lambda value, _: Thing(name=value[0], team=value[1]), kept=1)

    async def _read(self) -> None:
        if self.stream is None:
            view: FeedView[tuple[str, str]] = FeedView(
                matches=lambda one: getattr(one, "team", "").startswith(self.team)
            )
            request = WatchThingsRequest(resume_token=self.reader.token)
            self.stream = self.feed.stream(request, view if self.team else None)
            await self.reader.follow(self.stream)
        # A last thing that everybody sees, and its end, stand for the wait until nothing comes.
        self.feed.put("last", ("last", self.team))
        while "last" not in self.reader.has:
            self.reader.take(await asyncio.wait_for(anext(self.stream), 60))
        self.feed.remove("last")
        while "last" in self.reader.has:
            self.reader.take(await asyncio.wait_for(anext(self.stream), 60))


FeedMachine.TestCase.settings = settings(stateful_step_count=30, deadline=None)
TestFeed = FeedMachine.TestCase
