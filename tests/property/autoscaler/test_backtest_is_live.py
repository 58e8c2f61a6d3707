"""A backtest decides what the live autoscaler decides: the same policy and readings come to the same counts, tick by tick."""

import asyncio
import random
from datetime import UTC, datetime
from unittest.mock import patch

import pytest

from gpuscale.autoscaler.backtest.simulate import Replay
from gpuscale.autoscaler.backtest.world import Setting
from gpuscale.autoscaler.domain.engine import Question, Result, asked
from gpuscale.autoscaler.domain.rules import rule
from gpuscale.autoscaler.domain.rules.targets import PanicRule, TargetRule
from gpuscale.autoscaler.domain.signals import QueueReading, QueueState, Sample, queue_sample
from gpuscale.autoscaler.domain.spec import (
    Combine,
    EndpointSpec,
    Pace,
    QueueCount,
    QueueSignal,
    RateLimit,
    ReplicaTemplate,
    Signal,
)
from gpuscale.autoscaler.loop import reconciler
from gpuscale.client.traces import Request
from tests.property.autoscaler.scaling_world import World, seeded
from tests.property.autoscaler.virtual_time import run

TICKS = 15
TICK = 4.7
"""Seconds: no window or cooldown below is a multiple, so that no moment is a boundary on one side only."""
SOURCE = QueueSignal("jobs", QueueCount.TOTAL)


def reading(depth: int | None, now: float) -> QueueReading:
    """What a watcher shows of a queue; None: it cannot be read."""
    if depth is None:
        return QueueReading(QueueState.UNREACHABLE, message="the broker is stopped")
    return QueueReading(QueueState.OK, depth, 0, 1, now)


def some_policy(dice: random.Random) -> EndpointSpec:
    kinds = (
        TargetRule(dice.choice([1.0, 7.0])),
        rule.StepRule(rule.Comparator(">"), 10.0, 2),
        rule.BandRule(2.0, 20.0, 1, 2),
        rule.RatioRule(10.0, 1.0, proportional_down=dice.random() < 0.5, guarded=dice.random() < 0.5),
        rule.ThresholdRule(15.0, 3.0, 2),
        PanicRule(8.0, stable_window=31.0, panic_window=7.0),
    )
    chosen = dice.sample(kinds, dice.randrange(1, 4))
    rules = [
        rule.Rule(
            f"r{place}", "depth", kind, priority=dice.randrange(2), cooldown=dice.choice([0.0, 7.0, 13.0])
        )
        for place, kind in enumerate(chosen)
    ]
    return EndpointSpec(
        low := dice.randrange(3),
        low + dice.choice([3, 12]),
        template=ReplicaTemplate("worker"),
        signals=(Signal("depth", SOURCE, window=dice.choice([None, 11.0])),),
        rules=tuple(rules),
        tick=TICK,
        combine=dice.choice(list(Combine)),
        up=Pace(limits=dice.choice([(), (RateLimit(11.0, 2),)])),
        down=Pace(stabilization=dice.choice([None, 0.0, 12.0])),
    )


class Fed(Replay):
    """A backtest that is shown given readings in place of those of its own queue."""

    depth: int | None = 0

    def _sample(self, signal: Signal) -> Sample:
        return queue_sample(SOURCE, reading(self.depth, self.world.now))


def in_a_backtest(spec: EndpointSpec, depths: list[int | None]) -> list[int]:
    replay = Fed(spec, [Request(0.0, 1.0)], Setting(1, lambda _: 0.0, None), datetime(2026, 1, 1, tzinfo=UTC))
    wanted: list[int] = []
    for place, replay.depth in enumerate(depths):
        replay.tick(place * TICK)
        wanted.append(replay.world.wanted)
    return wanted


async def live(spec: EndpointSpec, depths: list[int | None]) -> list[int]:
    world, wanted, begin = World(1, {}, [{"name": "a"}]), list[int](), list[float]()

    def reads(_: str) -> QueueReading:
        """The reading of this tick, the same one again at looks between two ticks."""
        place = int((world.clock.now() - begin[0]) / TICK + 0.01) if begin else 0
        return reading(depths[min(place, TICKS - 1)], begin[0] + place * TICK if begin else 0.0)

    def noted(question: Question) -> Result:
        result = asked(question)
        wanted.append(result.evaluation.wanted)
        return result

    world.reading = reads  # type: ignore[method-assign]
    with seeded(world), patch.object(reconciler, "asked", noted):
        tasks = [asyncio.create_task(one) for one in (world.live(), world.adapters[0].stay(world))]
        await world._born.wait()
        await asyncio.sleep(2)
        begin.append(world.clock.now())
        assert not await world.create("e", spec)
        await asyncio.sleep(TICKS * TICK)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return wanted[: len(depths)]


@pytest.mark.parametrize("seed", range(5))
def test_the_same_readings_come_to_the_same_counts_tick_by_tick(seed: int) -> None:
    dice = random.Random(seed)
    spec = some_policy(dice)
    depths = [dice.choice([None, 0, 0, 1, 6, 15, 40, 90]) for _ in range(TICKS)]
    assert run(live(spec, depths)) == in_a_backtest(spec, depths)
