"""Who used what: what is told of each reservation, and added up, over restarts, and who may see it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.allocator.domain.accounting import Tally
from gpuscale.allocator.servicers.usage_servicer import UsageServicer
from gpuscale.allocator.state.usage_ledger import Used
from gpuscale.api.allocator import v1 as api
from gpuscale.client import AsyncClient
from gpuscale.common.errors import InvalidArgumentError, NotFoundError
from gpuscale.common.security.auth import Principal, Role, set_principal
from tests.support.allocator import MIB, allocator_client, release, reread, reserve_request
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, gpu_message, node_message
from tests.support.waiting import eventually

GroupBy = api.QueryUsageRequest.GroupBy


def reading(uuid: str, index: int, used: float, watts: float) -> Any:
    one = gpu_message(uuid, index, utilization=used)
    one.reading.memory_used_bytes, one.reading.power_watts = 1000 * MIB, watts
    one.reading.sm_clock_mhz, one.reading.ecc_volatile_corrected_count = 1000.0 + used, 3
    one.reading.ecc_volatile_uncorrected_count = 0
    one.reading.throttle_reasons.extend(["gpu_idle"] if not used else ["sw_power_cap", "hw_slowdown"])
    return one


@asynccontextmanager
async def site(path: Path, clock: ManualClock) -> AsyncGenerator[AsyncClient]:
    shown = [reading("n0-0", 0, 80.0, 300.0), reading("n0-1", 1, 0.0, 100.0)]
    async with allocator_client(path, FakeFleet(node_message("n0", *shown)), clock=clock) as client:
        yield client


async def reserve(client: AsyncClient, gpu: str, milli: int = 1000, **fields: Any) -> api.Reservation:
    fields |= {"gpu_milli": milli, "gpus": [f"nodes/n0/gpus/{gpu}"], "max_utilization_percent": 100}
    request = reserve_request(memory=0, ttl=3600, **fields)
    return (await client.allocator.Reserve(request)).reservation


async def of(client: AsyncClient, one: api.Reservation) -> api.GetReservationUsageResponse:
    return await client.usage.GetReservationUsage(api.GetReservationUsageRequest(name=one.name))


async def test_what_was_used_is_told_of_each_reservation_and_added_up(tmp_path: Path) -> None:
    clock = ManualClock()
    async with site(tmp_path, clock) as client:
        busy = await reserve(client, "n0-0", labels={"team": "vision"})
        idle = await reserve(client, "n0-1", 500, labels={"team": "nlp"})
        clock.advance(2.0)
        [gpu] = (await of(client, busy)).gpus
        assert (gpu.granted.ToMilliseconds(), gpu.busy.ToMilliseconds()) == (2000, 2000)
        assert (gpu.mean_utilization_percent, gpu.peak_memory_bytes) == (80.0, 1000 * MIB)
        assert gpu.energy_joules == 600.0
        assert (gpu.mean_sm_clock_mhz, gpu.min_sm_clock_mhz) == (1080.0, 1080.0)
        throttled = {reason: time.ToMilliseconds() for reason, time in gpu.throttled.items()}
        assert throttled == {"sw_power_cap": 2000, "hw_slowdown": 2000}
        [half] = (await of(client, idle)).gpus
        assert (half.milli, half.idle.ToMilliseconds(), half.energy_joules) == (500, 2000, 100.0)
        assert (half.mean_sm_clock_mhz, dict(half.throttled)) == (1000.0, {})
        assert not half.HasField("ecc_corrected_count")  # by one look alone
        [half] = (await of(client, idle)).gpus
        assert (half.ecc_corrected_count, half.ecc_uncorrected_count) == (0, 0)
        clock.step_wall(-3600)
        clock.advance(0.5)
        await release(client, busy)
    async with site(tmp_path, clock) as client:
        clock.advance(0.25)
        ended = await of(client, busy)
        assert ended.end_cause == api.Reservation.END_CAUSE_RELEASED
        assert [one.granted.ToMilliseconds() for one in ended.gpus] == [2500]
        assert ended.gpus[0].mean_sm_clock_mhz == 1080.0
        assert ended.gpus[0].throttled["hw_slowdown"].ToMilliseconds() == 2500
        ask = api.QueryUsageRequest(group_by=GroupBy.GROUP_BY_LABEL, label_key="team")
        ask.since.FromDatetime(clock.wall() - timedelta(days=2))  # the step went back over midnight
        ask.until.FromDatetime(clock.wall() + timedelta(days=2))
        clock.advance(10.1)  # from the checkpoint before
        found = await client.usage.QueryUsage(ask)
        assert [
            (row.labels["team"], row.granted_gpu_microseconds, row.ended_count) for row in found.rows
        ] == [("nlp", 12_850 * 500, 0), ("vision", 2_500_000, 1)]
        assert found.total.granted_gpu_microseconds == 2_500_000 + 12_850 * 500
        for by, text, only in (
            (GroupBy.GROUP_BY_NODE, 'labels.team = "vision"', 2_500_000),
            (GroupBy.GROUP_BY_USER, 'node = "nodes/n0" AND user = "nobody"', None),
        ):
            asked = api.QueryUsageRequest(group_by=by, filter=text, since=ask.since, until=ask.until)
            rows = (await client.usage.QueryUsage(asked)).rows
            assert [row.granted_gpu_microseconds for row in rows] == ([only] if only else [])


async def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    async with site(tmp_path, ManualClock()) as client:
        for request, field in (
            (api.QueryUsageRequest(label_key="team"), "label_key"),
            (api.QueryUsageRequest(group_by=GroupBy.GROUP_BY_LABEL), "label_key"),
            (api.QueryUsageRequest(group_by=77), "group_by"),  # type: ignore[arg-type]
            (api.QueryUsageRequest(since=Timestamp(seconds=9), until=Timestamp(seconds=8)), "until"),
        ):
            with pytest.raises(InvalidArgumentError, match=field):
                await client.usage.QueryUsage(request)
        with pytest.raises(NotFoundError, match="90 days"):
            await client.usage.GetReservationUsage(api.GetReservationUsageRequest(name="reservations/rnone"))


async def test_who_is_no_admin_sees_its_own_in_any_year() -> None:
    used = [Used(owner, "", {}, "", "", Tally(granted=7), 1) for owner in ("ann", "ben")]
    days: list[object] = []

    async def query(*asked: object) -> list[Used]:
        days[:] = asked
        return used

    servicer = UsageServicer(SimpleNamespace(clock=ManualClock(), query=query))  # type: ignore[arg-type]
    first, last = Timestamp(seconds=-62_135_596_800), Timestamp(seconds=253_402_300_799)
    for role, seen, until in ((Role.ADMIN, ["ann", "ben"], last), (Role.OPERATOR, ["ann"], first)):
        set_principal(Principal("ann", role, "token"))
        request = api.QueryUsageRequest(group_by=GroupBy.GROUP_BY_USER, until=until)
        answer = await servicer.QueryUsage(request, None)  # type: ignore[arg-type]
        assert [row.user for row in answer.rows] == seen
        assert answer.total.ended_count == len(seen)
    of_days = api.QueryUsageRequest(
        group_by=GroupBy.GROUP_BY_USER, since={"seconds": 86_400}, until={"seconds": 172_800}
    )
    await servicer.QueryUsage(of_days, None)  # type: ignore[arg-type]
    assert days[:2] == [1, 3], "through the last day, also by its first moment"


async def test_how_long_reservations_lasted_is_learned_and_outlasts_a_restart(tmp_path: Path) -> None:
    clock = ManualClock()
    async with site(tmp_path, clock) as client:
        for seconds in (100.0, 200.0, 300.0, 400.0):
            one = await reserve(client, "n0-0")
            clock.advance(seconds)
            await release(client, one)
    async with site(tmp_path, clock) as client:
        await reserve(client, "n0-0", job=api.Job(title="held"))
        placed = await reserve(
            client, "n0-0", job=api.Job(title="next"), keep_place=True, wait={"seconds": 60}
        )

        async def shown() -> api.Job:
            return (await reread(client, placed.name)).job

        await eventually(shown, lambda found: found.HasField("estimated_wait_high"))
        job = await shown()
        assert 100 <= job.estimated_wait_low.seconds <= job.estimated_wait.seconds < 300
        assert 300 <= job.estimated_wait_high.seconds <= 400
        assert not job.queue_order, "past use does not count here"


async def test_what_is_shorter_than_a_look_has_the_figures_that_were_read_in_its_time(tmp_path: Path) -> None:
    clock = ManualClock()
    fleet = FakeFleet(node_message("n0", reading("n0-0", 0, 10.0, 50.0)))
    async with allocator_client(tmp_path, fleet, clock=clock) as client:
        clock.advance(1.0)
        one = await reserve(client, "n0-0")
        clock.advance(1.0)
        await release(client, one)
        [gpu] = (await of(client, one)).gpus
        assert (gpu.granted.ToMilliseconds(), gpu.unknown.ToMilliseconds()) == (1000, 1000)
        assert [gpu.HasField(name) for name in ("energy_joules", "mean_sm_clock_mhz")] == [False, False]
        one = await reserve(client, "n0-0")
        clock.advance(1.0)
        fleet.put(node_message("n0", reading("n0-0", 0, 80.0, 300.0)))

        async def arrived() -> bool:
            [node] = (await client.capacity.RankNodes(api.RankNodesRequest())).nodes
            return node.mean_utilization_percent == 80.0

        await eventually(arrived)
        clock.advance(2.0)
        await release(client, one)
        [gpu] = (await of(client, one)).gpus
        assert (gpu.granted.ToMilliseconds(), gpu.busy.ToMilliseconds()) == (3000, 3000)
        assert (gpu.mean_utilization_percent, gpu.mean_sm_clock_mhz) == (80.0, 1080.0)
        assert gpu.energy_joules == 900.0
