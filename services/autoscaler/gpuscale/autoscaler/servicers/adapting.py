"""Adaptive endpoints: their policy is chosen by their goal, on past arrivals, in shadow, and never by a single look.

A look is a backtest of the current policy and of the candidates of `gpuscalectl tune`, on the arrivals since the previous look,
so that no request counts twice. The best replaces the current policy if it saves enough in two looks in a row. Looks are
backtests created by the endpoint: their reports hold everything that must survive a restart.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final
from uuid import uuid4

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.planning import startup_seconds
from gpuscale.autoscaler.domain.replicas import Moment
from gpuscale.autoscaler.domain.spec import Adaptive, Endpoint
from gpuscale.autoscaler.loop.reconciler import Dependencies
from gpuscale.autoscaler.servicers.backtest_jobs import DEFAULT_COLD_START, DEFAULT_GOAL
from gpuscale.autoscaler.servicers.backtests import Backtests
from gpuscale.autoscaler.servicers.endpoints import Endpoints
from gpuscale.autoscaler.state import store
from gpuscale.autoscaler.wire.specs import spec_from_wire, spec_to_wire
from gpuscale.client.traces import Request
from gpuscale.client.tuning import AS_IT_IS, Trial, Window, candidates, choose
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.names import endpoint_name, watcher_name
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.wire import to_duration

LOOKED_AFTER: Final = 300.0
"""Seconds between rounds over all endpoints."""
LEAST_REQUESTS: Final = 1_000
"""Least requests of a look: fewer prove nothing."""
MOST_REQUESTS: Final = 50_000
"""Most requests of a look, the newest: bounds its work, to about 35 us of a core for each of them and each candidate."""
_log = get_logger(__name__)


@dataclass
class Adapting:
    """Looks at endpoints that are `adaptive`, and replaces policies by better ones."""

    deps: Dependencies
    endpoints: Endpoints
    backtests: Backtests
    judged: dict[str, str] = field(default_factory=dict[str, str])
    """The last look read of each endpoint."""

    async def run(self) -> None:
        """Never ends."""
        while True:
            await asyncio.sleep(LOOKED_AFTER)
            try:
                found = await self.deps.store.read(store.endpoints)
            except GpuscaleError as error:
                _log.warning("cannot read endpoints", error=error.message)
                continue
            for endpoint in found:
                try:
                    await self.attend(endpoint)
                except GpuscaleError as error:
                    _log.debug("cannot tune an endpoint", endpoint=endpoint.id, error=error.message)

    async def attend(self, endpoint: Endpoint) -> None:
        """Judge the last look, and begin the next when it is time; raises like `Backtests.create`."""
        wish, name = endpoint.spec.adaptive, endpoint_name(endpoint.id)
        if wish is None or endpoint.deleting or endpoint.spec.paused:
            return
        looks = [one for one in self.backtests.every() if one.creator == name]
        looks.sort(key=lambda one: one.create_time.ToNanoseconds(), reverse=True)
        if not looks:
            await self._look(endpoint, wish, None)
            return
        if not looks[0].HasField("end_time"):
            return
        if self.judged.get(endpoint.id) != looks[0].name:
            await self._judge(endpoint, wish, looks[:2])
            self.judged[endpoint.id] = looks[0].name
            for one in looks[2:]:
                await self.backtests.delete(one.name)
        age = self.deps.clock.wall().timestamp() - looks[0].create_time.ToNanoseconds() / 1e9
        if age >= wish.period:
            await self._look(endpoint, wish, age)

    async def _look(self, endpoint: Endpoint, wish: Adaptive, last: float | None) -> None:
        """Begin a backtest on the arrivals of the `last` seconds."""
        name, spec = endpoint_name(endpoint.id), endpoint.spec
        came = await self.backtests.history(api.BacktestSpec(endpoint=name))
        since = came[-1].arrival - last if last is not None else 0.0
        came = [one for one in came[-MOST_REQUESTS:] if one.arrival >= since]
        if len(came) < LEAST_REQUESTS:
            return
        own = await self.deps.store.read(partial(store.replicas_of, endpoint=endpoint.id))
        at = Moment(self.deps.clock.now(), self.deps.clock.wall())
        start = to_duration(startup_seconds(own, at) or DEFAULT_COLD_START)
        wait, slots = wish.wait or DEFAULT_GOAL, wish.slots or 1
        asked = api.BacktestSpec(goal=to_duration(wait), slots=slots, min_cold_start=start)
        asked.policies.add(name=AS_IT_IS, spec=spec_to_wire(replace(spec, adaptive=None)))
        [watcher] = spec.watchers
        for one, preset, parameters in candidates(wait, slots):
            made = api.PresetWish(
                preset=preset,
                watcher=watcher_name(watcher),
                min_replicas=spec.min_replicas,
                max_replicas=spec.max_replicas,
                template=asked.policies[0].spec.template,
                parameters=parameters,
            )
            asked.policies.add(name=one, preset=made)
        await self.backtests.create(_request(asked, came), name)

    async def _judge(self, endpoint: Endpoint, wish: Adaptive, looks: Sequence[api.Backtest]) -> None:
        """Adopt the choice of the last look if it beats the current policy in both looks."""
        goal, now = wish.chosen_by, spec_to_wire(replace(endpoint.spec, adaptive=None))
        found: list[Mapping[str, Trial]] = []
        specs: dict[str, api.EndpointSpec] = {}
        for one in looks:
            reports = {report.name: report async for report in self.backtests.reports(one.name)}
            succeeded = one.state == api.Backtest.STATE_SUCCEEDED
            if not succeeded or AS_IT_IS not in reports or reports[AS_IT_IS].spec != now:
                return
            trials = dict[str, Trial]()
            for name, report in reports.items():
                parts = [Window(one.request_count, one.late_count, one.gpu_hours) for one in report.windows]
                trials[name] = Trial(name, parts)
            found.append(trials)
            specs = specs or {name: report.spec for name, report in reports.items()}
        choice = choose(list(found[0].values()), goal)
        name = choice.chosen.name
        enough = all(name in one and one[name].beats(one[AS_IT_IS], goal) for one in found)
        if len(found) < 2 or not enough:
            return
        had = found[0][AS_IT_IS]
        why = (
            f"{choice.why(goal)}; {had.late:.2f}% late, {had.hours:.2f} GPU hours before,"
            f" and better in {looks[1].name} too"
        )
        better = spec_from_wire(specs[name])
        await self.endpoints.update(
            endpoint.id, lambda spec: spec.scaled_as(better), etag=endpoint.etag, why=why
        )
        _log.info("a better policy was chosen", endpoint=endpoint.id, policy=name)


async def _request(
    spec: api.BacktestSpec, came: Sequence[Request]
) -> AsyncGenerator[api.CreateBacktestRequest]:
    workload = api.Workload(
        arrivals=[one.arrival - came[0].arrival for one in came],
        service_seconds=[one.service for one in came],
    )
    yield api.CreateBacktestRequest(spec=spec, request_id=str(uuid4()), workload=workload)
