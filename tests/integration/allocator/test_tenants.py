"""Whose quotas a caller may use, and up to which priority, over real gRPC with a real tokens file and certificates."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.client import AsyncClient, PermissionDeniedError
from gpuscale.common.wire import enum_word
from tests.support.allocator import callers, release, reserve_request
from tests.support.fake_fleet import FakeFleet, node_message


def fleet() -> FakeFleet:
    return FakeFleet(node_message("n0", count=8))


async def reserve(client: AsyncClient, request: api.ReserveRequest) -> api.Reservation:
    return (await client.allocator.Reserve(request)).reservation


async def batch(client: AsyncClient, request: api.ReserveRequest) -> api.Reservation:
    answer = await client.allocator.BatchReserve(
        api.BatchReserveRequest(requests=[reserve_request(), request])
    )
    return answer.reservations[1]


async def watch(client: AsyncClient, request: api.ReserveRequest) -> api.Reservation:
    stream = client.allocator.ReserveAndWatch(api.ReserveAndWatchRequest(reserve=request))
    return [one async for one in stream][-1].reservation


Way = Callable[[AsyncClient, api.ReserveRequest], Coroutine[Any, Any, api.Reservation]]


@pytest.mark.parametrize(("way", "path"), [(reserve, ""), (batch, "requests[1]."), (watch, "reserve.")])
async def test_a_caller_uses_its_own_quota_and_no_other(tmp_path: Path, way: Way, path: str) -> None:
    async with callers(tmp_path, fleet(), "ann", "ml", "ada") as (ann, ml, ada):
        assert (await way(ann, reserve_request())).tenant == "ann"
        assert (await way(ada, reserve_request(tenant="whatever", priority=1000))).tenant == "whatever"
        assert (await way(ml, reserve_request(tenant="vision", priority=10))).tenant == "vision"
        for client, tenant in ((ann, "ml"), (ann, "whatever"), (ml, "ann"), (ann, "Ann")):
            with pytest.raises(PermissionDeniedError) as caught:
                await way(client, reserve_request(tenant=tenant, priority=1000))  # as an admin did
            assert caught.value.reason == "OTHER_TENANT"
            assert caught.value.metadata["field"] == f"{path}tenant"
            assert caught.value.message.startswith(f"{path}tenant: ")
        for client, priority in ((ann, 1), (ann, 1000), (ml, 11)):
            with pytest.raises(PermissionDeniedError) as caught:
                await way(client, reserve_request(priority=priority))
            assert caught.value.reason == "PRIORITY_TOO_HIGH"
            assert caught.value.metadata["field"] == f"{path}priority"


async def test_a_quota_holds_whoever_tries_to_leave_it(tmp_path: Path) -> None:
    async with callers(tmp_path, fleet(), "ann", "ml", "ada") as (ann, ml, ada):
        await ada.quotas.SetQuota(api.SetQuotaRequest(quota=api.Quota(tenant="ml", gpu_milli_limit=1000)))
        assert (await reserve(ml, reserve_request(priority=-1000))).tenant == "ml", "the first of its tenants"
        assert (await reserve(ann, reserve_request(tenant="ann"))).tenant == "ann"
        held = {
            one.tenant: one.gpu_milli_held
            for one in (await ada.quotas.ListQuotas(api.ListQuotasRequest())).quotas
        }
        assert held == {"ann": 1000, "ml": 1000}
        answer = await ml.capacity.CheckAvailability(api.CheckAvailabilityRequest(ask=api.Ask(gpu_count=1)))
        assert (answer.available, enum_word(answer, "reason")) == (False, "QUOTA_EXCEEDED")


async def test_a_reservation_for_another_is_of_both_after_a_restart(tmp_path: Path) -> None:
    """Of whom it was made for, and of who made it; anybody else may neither change it nor reserve for another."""
    request = reserve_request(owner="ann", tenant="ann")
    async with callers(tmp_path, fleet(), "scaler") as (scaler,):
        one = await reserve(scaler, request)
        assert (one.owner, one.fence > 0) == ("ann", True)
    async with callers(tmp_path, fleet(), "scaler", "ann", "ml") as (scaler, ann, ml):
        assert (await reserve(scaler, request)).name == one.name
        with pytest.raises(PermissionDeniedError, match="belongs to ann"):
            await ml.allocator.ReleaseReservation(api.ReleaseReservationRequest(name=one.name))
        with pytest.raises(PermissionDeniedError) as refused:
            await batch(ml, reserve_request(owner="ann"))
        assert (refused.value.reason, refused.value.metadata["field"]) == ("OTHER_OWNER", "requests[1].owner")
        renewed = api.RenewReservationRequest(name=one.name, fence=one.fence)
        for client in (scaler, ann):
            await client.allocator.RenewReservation(renewed)
        await release(ann, one)
