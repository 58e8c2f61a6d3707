"""Whose turn it is where past use counts, by the real ledger of use; and where it does not, as before."""

import asyncio
from pathlib import Path

import pytest

from gpuscale.allocator.domain.accounting import DAY, decayed
from gpuscale.allocator.usecases import accounting
from gpuscale.api.allocator import v1 as api
from gpuscale.client import AsyncClient
from gpuscale.common import wire
from tests.integration.allocator.test_bookings import HOUR, WEEK, MovedClock, fleet
from tests.support.allocator import callers, release, reserve_request
from tests.support.waiting import eventually


async def waits(client: AsyncClient) -> api.Reservation:
    request = reserve_request(wait=wire.to_duration(30))
    return (await client.allocator.Reserve(request, timeout=30)).reservation


@pytest.mark.parametrize("half_life", [0.0, 7.0])
async def test_who_held_more_waits_longer_where_the_past_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half_life: float
) -> None:
    monkeypatch.setattr(accounting, "PAST", 0.02)
    clock = MovedClock()
    async with callers(tmp_path, fleet(n0=2), clock=clock, past_use_half_life_days=half_life) as (
        ann,
        bob,
        ada,
    ):
        lease = await ann.reserve(1, **WEEK)
        clock.ahead += 2 * HOUR
        await lease.release()

        async def counts() -> bool:
            found = (await ada.quotas.ListQuotas(api.ListQuotasRequest())).quotas
            return any(one.tenant == "ann" and one.gpu_milli_past > 0 for one in found)

        held = [await ada.reserve(1, **WEEK) for _ in range(2)]
        head = asyncio.ensure_future(waits(ada))  # what is promised to the first in the line stays so
        await eventually(lambda: waiting(ada, 1))
        if half_life:
            await eventually(counts)
        first = asyncio.ensure_future(waits(ann))
        await eventually(lambda: waiting(ada, 2))
        second = asyncio.ensure_future(waits(bob))
        await eventually(lambda: waiting(ada, 3))
        assert await counts() is bool(half_life)
        await held[0].release()
        await head
        await held[1].release()
        done, later, client = (second, first, bob) if half_life else (first, second, ann)
        granted = await done
        assert not later.done()
        await release(client, granted)
        await later


async def waiting(client: AsyncClient, count: int) -> bool:
    found = (await client.quotas.ListQuotas(api.ListQuotasRequest())).quotas
    return sum(one.waiting_count for one in found) == count


def test_a_day_counts_half_after_the_half_life() -> None:
    whole = 1000 * DAY  # a GPU, all day
    always = decayed([{"a": whole}] * 30, 2.0)
    assert always["a"] == pytest.approx(1000)
    days = [{}, {}, {"then": whole}] + [{}] * 27
    assert decayed(days, 2.0)["then"] == pytest.approx(
        decayed([{"then": whole}, *[{}] * 29], 2.0)["then"] / 2
    )
