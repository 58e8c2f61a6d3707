"""Quotas and cordons as resources: names, get, filters, masks, etags, and what a watcher sees of them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from gpuscale import client as library
from gpuscale.allocator.usecases import accounting
from gpuscale.api.allocator import v1 as api
from gpuscale.common.rpc import feed
from tests.integration.allocator.test_bookings import DAY, HOUR, WEEK, MovedClock, book, fleet
from tests.integration.allocator.test_fair_share import waiting
from tests.support.allocator import allocator_client, callers
from tests.support.fake_fleet import FakeFleet, node_message
from tests.support.waiting import eventually

Message = TypeVar("Message")


async def put(client: library.AsyncClient, mask: str = "", **fields: Any) -> api.Quota:
    paths = FieldMask(paths=[mask]) if mask else None
    quota = api.Quota(**fields)
    return (await client.quotas.SetQuota(api.SetQuotaRequest(quota=quota, update_mask=paths))).quota


async def test_a_quota_has_a_name_a_mask_and_an_etag(tmp_path: Path) -> None:
    async with allocator_client(tmp_path, FakeFleet(node_message("n0", count=2))) as client:
        first = await put(client, name="quotas/vision team", gpu_milli_limit=2000, weight=3)
        assert (first.name, first.tenant) == ("quotas/vision team", "vision team")
        masked = await put(client, "weight", tenant="vision team", weight=2)
        assert (masked.gpu_milli_limit, masked.weight) == (2000, 2)
        assert (await client.quotas.GetQuota(api.GetQuotaRequest(name=first.name))).quota == masked
        with pytest.raises(library.AbortedError) as aborted:
            await put(client, name=first.name, etag=first.etag)
        assert aborted.value.reason == "ETAG_MISMATCH"
        assert (await put(client, name=first.name, etag=masked.etag)).HasField("gpu_milli_limit") is False
        await client.quotas.DeleteQuota(api.DeleteQuotaRequest(name=first.name))
        with pytest.raises(library.NotFoundError):
            await client.quotas.GetQuota(api.GetQuotaRequest(name=first.name))


async def test_a_quota_of_no_name_is_refused(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, str], str, str]] = [
        ({}, "", "quota.name"), ({"name": "vision"}, "", "quota.name"), ({"name": "quotas/"}, "", "quota.name"),
        ({"name": "quotas/a", "tenant": "b"}, "", "quota.name"), ({"name": "quotas/ a"}, "", "tenant"),
        ({"name": "quotas/a"}, "tenant", "update_mask"),
    ]  # fmt: skip
    async with allocator_client(tmp_path, FakeFleet(node_message("n0"))) as client:
        for fields, mask, field in wrong:
            with pytest.raises(library.InvalidArgumentError) as caught:
                await put(client, mask, **fields)
            assert [one.field for one in caught.value.violations] == [field]


async def test_a_cordon_has_a_name_a_target_and_a_state(tmp_path: Path) -> None:
    async with allocator_client(
        tmp_path, FakeFleet(node_message("n0", count=2), node_message("n1"))
    ) as client:
        held = await client.reserve(1, "me", nodes=["nodes/n0"])
        asked = api.CordonNodeRequest(name="nodes/n0/cordon", reason="fan")
        cordon = (await client.nodes.CordonNode(asked)).cordon
        assert (cordon.name, cordon.target, cordon.state) == (
            "nodes/n0/cordon",
            "nodes/n0",
            cordon.STATE_CORDONED,
        )
        await client.nodes.DrainNode(api.DrainNodeRequest(name="nodes/n1"))
        await client.nodes.DrainNode(api.DrainNodeRequest(name=held.gpus[0].name))

        async def states(text: str = "") -> list[tuple[str, str]]:
            page = await client.nodes.ListCordons(api.ListCordonsRequest(filter=text, order_by="name desc"))
            return [(one.target, api.Cordon.State.Name(one.state)) for one in page.cordons]

        assert await states() == [
            ("nodes/n1", "STATE_DRAINED"),
            (held.gpus[0].name, "STATE_DRAINING"),
            ("nodes/n0", "STATE_CORDONED"),
        ]
        assert await states(f"reservations:{held.name} AND state = draining") == [
            (held.gpus[0].name, "STATE_DRAINING")
        ]
        page = await client.nodes.ListCordons(api.ListCordonsRequest(page_size=2))
        rest = api.ListCordonsRequest(page_size=2, page_token=page.next_page_token)
        pages = [*page.cordons, *(await client.nodes.ListCordons(rest)).cordons]
        assert [one.target for one in pages] == ["nodes/n0", held.gpus[0].name, "nodes/n1"], "by name"
        name = f"{held.gpus[0].name}/cordon"
        assert (await client.nodes.GetCordon(api.GetCordonRequest(name=name))).cordon.name == name
        await client.nodes.UncordonNode(api.UncordonNodeRequest(name=name))
        with pytest.raises(library.NotFoundError):
            await client.nodes.GetCordon(api.GetCordonRequest(name=name))


async def test_watchers_are_told_what_becomes_of_cordons_and_quotas_and_go_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "PERIOD", 0.02)
    async with allocator_client(tmp_path, FakeFleet(node_message("n0", count=2))) as client:
        held = await client.reserve(1, "me")
        await client.nodes.DrainNode(api.DrainNodeRequest(name="nodes/n0"))
        draining = api.WatchCordonsRequest(filter="state = DRAINING")
        async with aclosing(messages(client.nodes.WatchCordons(draining))) as watch:
            first = await anext(watch)
            assert (first.full, [one.target for one in first.cordons]) == (True, ["nodes/n0"])
            await held.release()
            assert list((await anext(watch)).removed) == ["nodes/n0/cordon"]
        async with aclosing(messages(client.quotas.WatchQuotas(api.WatchQuotasRequest()))) as quotas:
            seen = await anext(quotas)
            assert (seen.full, len(seen.quotas)) == (True, 0)
            await put(client, name="quotas/a", weight=2)
            seen = await anext(quotas)
            assert [one.name for one in seen.quotas] == ["quotas/a"]
        await put(client, name="quotas/b")
        await client.quotas.DeleteQuota(api.DeleteQuotaRequest(name="quotas/a"))
        resumed = api.WatchQuotasRequest(resume_token=seen.resume_token)
        async with aclosing(messages(client.quotas.WatchQuotas(resumed))) as quotas:
            seen = await anext(quotas)
            told = ([one.name for one in seen.quotas], list(seen.removed), seen.full, seen.reset)
            assert told == (["quotas/b"], ["quotas/a"], True, False)


async def messages(call: AsyncIterator[Message]) -> AsyncGenerator[Message]:
    async for message in call:
        yield message


async def test_hours_of_the_month_outlast_a_restart_and_let_nobody_in_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "LOOK", 0.02)
    clock = MovedClock()
    now = clock.wall()
    clock.set_by = (now.replace(day=15, hour=12, minute=0) - now).total_seconds()
    async with callers(tmp_path, fleet(n0=4), clock=clock) as (ann, bob, ada):
        await put(ada, name="quotas/ann", gpu_hours_per_month=10)
        lease = await ann.reserve(2, **WEEK)
        booked = await book(ann, clock, at=DAY, hours=2)
        with pytest.raises(
            library.ResourceExhaustedError,
            match=r"10 GPU-hours .* used 0\.0 and booked 2\.0 .* asks for 9\.0",
        ):
            await book(ann, clock, at=2 * DAY, hours=9)
        clock.ahead += 4 * HOUR
        await lease.release()
    async with callers(tmp_path, fleet(n0=4), clock=clock) as (ann, bob, ada):
        quota = (await ada.quotas.GetQuota(api.GetQuotaRequest(name="quotas/ann"))).quota
        assert (round(quota.gpu_hours_used, 2), quota.gpu_hours_booked, quota.gpu_hours_per_month) == (
            8,
            2,
            10,
        )
        with pytest.raises(library.ResourceExhaustedError) as refused:
            await ann.reserve(1)
        assert refused.value.reason == "QUOTA_EXCEEDED"
        assert 0 < (refused.value.retry_after or 0) < DAY, "a booking may be cancelled"
        assert "tenant ann has used 8.0 and booked 2.0 of the 10 GPU-hours" in refused.value.message
        await (await bob.reserve(1)).release()
        # Nothing but the month is to end from here on.
        await put(ada, "gpu_hours_per_month", name="quotas/ann", gpu_hours_per_month=8)
        await ann.bookings.CancelBooking(api.CancelBookingRequest(name=booked.name))
        with pytest.raises(library.ResourceExhaustedError) as refused:
            await ann.reserve(1)
        assert 13 * DAY < (refused.value.retry_after or 0) < 17 * DAY, "as long as the month lasts"
        waits = asyncio.ensure_future(ann.reserve(1, wait=30))
        await eventually(lambda: waiting(ada, 1))
        clock.ahead += 20 * DAY  # into the next month, in which nothing is used
        assert (await asyncio.wait_for(waits, 60)).gpus
