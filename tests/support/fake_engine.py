"""An engine in memory: it keeps what it was told to start, can be deaf, late, and lose things."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from gpuscale.autoscaler.adapters import engine


class FakeEngine:
    """An engine.

    Attributes:
        has: what it would show.
        hidden: names that it does not show although it has them.
        away: why it does not answer; empty while it does.
        refuses: why it starts nothing; empty while it does.
        stuck: why steps of these replicas fail, by name.
        taken: every step it took, in order.
        starts: how often each replica was newly made.
    """

    def __init__(self) -> None:
        self.has: dict[str, engine.Sighting] = {}
        self.hidden: set[str] = set()
        self.away = ""
        self.refuses = ""
        self.stuck: dict[str, str] = {}
        self.taken: list[engine.Step] = []
        self.starts: Counter[str] = Counter()
        self.changed = asyncio.Event()

    def of(self, kind: type[engine.Step]) -> list[engine.Step]:
        """The steps of one kind that it took."""
        return [step for step in self.taken if isinstance(step, kind)]

    def show(self, name: str, sighting: engine.Sighting | None) -> None:
        """Something happened to a replica; None: it is gone."""
        if sighting is None:
            self.has.pop(name, None)
        else:
            self.has[name] = sighting
        self.changed.set()

    async def observe(self) -> Mapping[str, engine.Sighting]:
        self._answer()
        return {name: one for name, one in self.has.items() if name not in self.hidden}

    async def apply(self, steps: Sequence[engine.Step]) -> Mapping[str, str]:
        """As `Engine.apply`; a replica that is asked to finish goes on until the test ends it."""
        self._answer()
        refused: dict[str, str] = {}
        failed = {step.replica: self.stuck[step.replica] for step in steps if step.replica in self.stuck}
        for step in steps:
            self.taken.append(step)
            match step:
                case _ if step.replica in failed:
                    pass
                case engine.Start(order) if self.refuses:
                    refused[order.replica] = self.refuses
                case engine.Start(order) if order.replica not in self.has:
                    self.starts[order.replica] += 1
                    self.has[order.replica] = engine.Sighting(engine.WorkerLife.STARTING)
                case engine.Kill(replica) if replica in self.has:
                    self.has[replica] = engine.Sighting(engine.WorkerLife.ENDED, -9)
                case engine.Remove(replica):
                    self.has.pop(replica, None)
                case engine.Start() | engine.Finish() | engine.Kill():
                    pass
        if failed:
            raise engine.StepsFailedError(failed, refused)
        return refused

    async def watch(self) -> None:
        self._answer()
        try:
            async with asyncio.timeout(1.0):
                await self.changed.wait()
        except TimeoutError:
            pass
        self.changed.clear()

    def _answer(self) -> None:
        if self.away:
            raise engine.EngineUnavailableError(self.away)
