"""Endpoints whose policy is chosen for them, on what arrived, by two looks in a row, and with a decision that tells why."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from unittest.mock import patch

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.spec import Endpoint
from gpuscale.autoscaler.servicers import adapting
from gpuscale.autoscaler.signals.sources import Histories
from gpuscale.client.traces import Request
from gpuscale.client.tuning import candidates
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.wire import enum_word, to_duration
from tests.support.asking_autoscaler import Asking, asking
from tests.support.autoscaler_app import TIMEOUT, running
from tests.support.cli import run_cli
from tests.support.waiting import eventually

EVERY = 600.0
WISH = api.Adaptive(goal="late<=20%", wait=to_duration(5.0), slots=2, every=to_duration(EVERY))


class LaterClock(SystemClock):
    """The time of day, and what a test adds to it."""

    later = 0.0

    def wall(self) -> datetime:
        return super().wall() + timedelta(seconds=self.later)


@asynccontextmanager
async def adaptive(folder: Path) -> AsyncGenerator[tuple[Asking, LaterClock, set[str]]]:
    """An autoscaler that looks often, with few candidates; a request of 4 s came each second since ten minutes before it began.

    The set has the etags of the endpoints that it attended to.
    """
    clock, attended, attend = LaterClock(), set[str](), adapting.Adapting.attend

    async def workload(_self: object, _endpoint: str, _service: object, _wall: object) -> list[Request]:
        return [Request(float(second), 4.0) for second in range(int(EVERY + clock.later))]

    async def noted(self: adapting.Adapting, endpoint: Endpoint) -> None:
        attended.add(endpoint.etag)
        await attend(self, endpoint)

    some = [one for one in candidates(5.0, 2) if one[1] in {"gpuscale", "hpa"}][:6]
    with (
        patch.object(Histories, "workload", workload),
        patch.object(adapting.Adapting, "attend", noted),
        patch.multiple(adapting, candidates=lambda *_: some, LOOKED_AFTER=0.05, LEAST_REQUESTS=300),
    ):
        async with running(folder, "127.0.0.1:1", clock=clock) as autoscaler:
            yield Asking(autoscaler), clock, attended


async def looks(asked: Asking) -> list[api.Backtest]:
    """Those of the endpoint that have ended, newest first."""
    request = api.ListBacktestsRequest(filter='creator = "endpoints/e"')
    found = await asked.backtests.ListBacktests(request, timeout=TIMEOUT)
    return [one for one in found.backtests if one.HasField("end_time")]


async def late(asked: Asking) -> api.Endpoint:
    """An endpoint whose policy is late all the time."""
    spec = await asked.render("keda", parameters={"value": 1000})
    spec.warm_spares = 1
    spec.adaptive.CopyFrom(WISH)
    return await asked.autoscaler.create(api.Endpoint(name="endpoints/e", spec=spec))


async def looked(asked: Asking, last: str = "") -> api.Backtest:
    """The first look that has ended, or the one after the `last`."""
    return await eventually(
        lambda: looks(asked), lambda found: found[0] if found and found[0].name != last else None
    )


async def test_a_better_policy_is_taken_after_two_looks_and_says_why(tmp_path: Path) -> None:
    async with adaptive(tmp_path) as (asked, clock, attended):
        made = await late(asked)
        newest = await looked(asked)
        arguments = ("--address", asked.autoscaler.address, "explain", "endpoint", "e")
        shown = await asyncio.to_thread(run_cli, *arguments)
        assert "it would save enough: changes if the next run agrees" in shown.out
        made.spec.max_replicas = 9
        made = await asked.autoscaler.update(made, "spec.max_replicas")
        second = newest
        while made.etag not in attended:  # a round that is under way would begin a look at what was before
            await asyncio.sleep(0.01)
        for _ in range(2):  # the first look was at what was changed since, and counts no more
            assert (await asked.autoscaler.get()).etag == made.etag
            clock.later += EVERY
            second, newest = newest, await looked(asked, newest.name)
            assert newest.request_count == pytest.approx(EVERY, abs=60), "only what came since the last look"
        after = await eventually(
            asked.autoscaler.get, lambda found: found if found.etag != made.etag else None
        )
        assert len(await looks(asked)) <= 3, "older ones are forgotten"
        assert after.spec.rules != made.spec.rules
        assert (after.spec.warm_spares, after.spec.max_replicas, after.spec.adaptive) == (1, 9, WISH)
        history = await asked.autoscaler.history()
        [told] = [one for one in history if enum_word(one.steps[0], "code") == "TUNED"]
        assert (told.before, told.etag) == (told.wanted, after.etag)
        assert "the cheapest that meets late<=20%" in told.summary
        assert f"GPU hours before, and better in {second.name} too" in told.summary


async def test_a_goal_that_is_none_and_an_endpoint_without_a_history_to_choose_by_are_refused(
    tmp_path: Path,
) -> None:
    """Only a queue has a history."""
    async with asking(tmp_path) as asked:
        for goal, wish, says in (
            ("late<1%", {}, "endpoint.spec.adaptive.goal cannot be read"),
            ("soon", {}, "endpoint.spec.adaptive.goal cannot be read"),
            ("late<=1%", {"watcher": "", "metric": "work"}, "endpoint.spec.adaptive needs one queue watcher"),
        ):
            spec = await asked.render("keda", **wish)
            spec.adaptive.goal = goal
            with pytest.raises(grpc.aio.AioRpcError, match=says) as refused:
                await asked.autoscaler.create(api.Endpoint(name="endpoints/e", spec=spec))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
