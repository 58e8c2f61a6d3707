"""Runs several endpoints beside each other on GPUs that they share. Pure.

All worlds go on together, from one happening of any of them to the next, so that a GPU that one gives back is another's at
that very moment. Endpoints that come first are served first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from gpuscale.autoscaler.backtest.report import Report
from gpuscale.autoscaler.backtest.simulate import Replay, StoppedError
from gpuscale.autoscaler.backtest.trace import Request
from gpuscale.autoscaler.backtest.world import Pool, Setting
from gpuscale.autoscaler.domain.model import EndpointSpec


@dataclass(frozen=True, slots=True)
class Part:
    """One endpoint of a run: its spec, its requests in the order of arrival (not none), and what its replicas are like."""

    spec: EndpointSpec
    requests: Sequence[Request]
    setting: Setting


def run_shared(
    parts: Sequence[Part],
    *,
    goal: float,
    begin: datetime,
    most: int | None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Report]:
    """What becomes of endpoints that share GPUs; each goes on until the last of them is done.

    Args:
        parts: the endpoints.
        goal: seconds that a request may wait.
        begin: the time of day at the first second.
        most: GPUs that there are; None for no bound.
        stopped: asked again and again whether the run is to stop.

    Raises:
        StoppedError: it was told to.
    """
    pool = Pool(most)
    replays = [Replay(part.spec, part.requests, part.setting, begin, pool) for part in parts]
    while not all(replay.over for replay in replays):
        if stopped():
            raise StoppedError
        moment = min(min(replay.due, replay.world.next_event) for replay in replays)
        for replay in replays:
            replay.world.wait(moment)
        for replay in replays:
            replay.world.advance(moment)
        for replay in replays:
            while replay.due <= moment:
                replay.step()
    return [replay.report(goal) for replay in replays]
