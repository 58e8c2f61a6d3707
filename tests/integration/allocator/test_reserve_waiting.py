"""Waiting over real gRPC: served when something comes free, told the place meanwhile, held to quotas, never leaked."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.common.errors import NotFoundError, ResourceExhaustedError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.wire import enum_word, seconds, to_duration
from tests.support.allocator import Client, reserve_request, running
from tests.support.fake_fleet import FakeFleet, gpu_message, node_message
from tests.support.waiting import eventually


@asynccontextmanager
async def site(
    tmp_path: Path, fleet: FakeFleet, **settings: object
) -> AsyncGenerator[tuple[Client, api.QuotaServiceStub]]:
    async with running(tmp_path, fleet, **settings) as client:
        yield client, api.QuotaServiceStub(client.channel)


async def until_waiting(quotas: api.QuotaServiceStub, count: int) -> None:
    await eventually(
        lambda: quotas.ListQuotas(api.ListQuotasRequest(), timeout=60),
        lambda found: [one.waiting_count for one in found.quotas] == [count],
    )


async def test_memory_that_an_outsider_gives_back_serves_who_waits(tmp_path: Path) -> None:
    fleet = FakeFleet(node_message("n0", gpu_message("g0", free=1000)))
    async with site(tmp_path, fleet) as (client, quotas):
        call = asyncio.create_task(client.reserve(memory=40_000, wait=to_duration(20)))
        await until_waiting(quotas, 1)
        assert not call.done()
        fleet.put(node_message("n0", gpu_message("g0", free=70_000)))
        assert (await call).gpus[0].uuid == "g0"


async def test_the_place_in_the_queue_is_told_until_the_grant(tmp_path: Path) -> None:
    async with running(tmp_path, FakeFleet(node_message("n0", count=2))) as client:
        held = [await client.reserve(ttl=60), await client.reserve(ttl=60)]
        wait = to_duration(20)
        both, single = (
            api.ReserveAndWatchRequest(reserve=reserve_request(count, memory=0, wait=wait))
            for count in (2, 1)
        )
        news = aiter(client.stub.ReserveAndWatch(both, timeout=20))
        first = (await anext(news)).waiting
        assert (first.position, enum_word(first, "reason")) == (0, "NO_CAPACITY")
        assert 50 < seconds(first.estimated_wait) <= 60
        assert "n0" in first.message
        second = client.stub.ReserveAndWatch(single, timeout=20)
        behind = aiter(second)
        waiting = (await anext(behind)).waiting
        assert waiting.position == 1
        assert 300 < seconds(waiting.estimated_wait) <= 60 + 300, "after the first, and its lease"
        await client.release(held[0])
        with pytest.raises(ResourceExhaustedError):
            await client.reserve()
        assert enum_word((await anext(behind)).waiting, "reason") == "BEHIND_OTHERS"
        await client.release(held[1])
        last = [one async for one in news][-1]
        assert len(last.reservation.gpus) == 2
        second.cancel()


async def test_quotas_hold_with_and_without_a_wait_and_through_a_restart(tmp_path: Path) -> None:
    fleet = FakeFleet(node_message("n0", count=4))
    async with site(tmp_path, fleet) as (client, quotas):
        quota = api.Quota(tenant="vision", gpu_milli_limit=2000, weight=2.0)
        told = (await quotas.SetQuota(api.SetQuotaRequest(quota=quota), timeout=60)).quota
        assert (told.gpu_milli_limit, told.weight, told.gpu_milli_held) == (2000, 2.0, 0)
    async with site(tmp_path, fleet) as (client, quotas):
        held = [await client.reserve(tenant="vision") for _ in range(2)]
        with pytest.raises(ResourceExhaustedError) as over:
            await client.reserve(tenant="vision")
        assert over.value.reason == "QUOTA_EXCEEDED"
        with pytest.raises(ResourceExhaustedError) as never:
            await client.reserve(3, tenant="vision", wait=to_duration(20))
        assert never.value.reason == "QUOTA_EXCEEDED"
        assert never.value.retry_after is None
        batch = api.BatchReserveRequest(
            requests=[reserve_request(tenant=tenant) for tenant in ("audio", "vision")]
        )
        with pytest.raises(ResourceExhaustedError), rpc_errors():
            await client.stub.BatchReserve(batch, timeout=60)
        assert len(await client.live()) == 2
        await client.reserve(tenant="audio")
        call = asyncio.create_task(client.reserve(tenant="vision", wait=to_duration(20)))
        await eventually(
            lambda: quotas.ListQuotas(api.ListQuotasRequest(), timeout=60),
            lambda found: (
                [(one.tenant, one.gpu_milli_held, one.waiting_count) for one in found.quotas]
                == [("audio", 1000, 0), ("vision", 2000, 1)]
            ),
        )
        assert not call.done()
        await client.release(held[0])
        assert (await call).tenant == "vision"
        await quotas.DeleteQuota(api.DeleteQuotaRequest(tenant="vision"), timeout=60)
        await client.reserve(tenant="vision")
        with pytest.raises(NotFoundError), rpc_errors():
            await quotas.DeleteQuota(api.DeleteQuotaRequest(tenant="vision"), timeout=60)
