"""Whose quotas a caller may use, and up to which priority, over real gRPC with a real tokens file and certificates."""

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.client import AsyncClient, PermissionDeniedError, UnavailableError, connect_async
from gpuscale.common.security.auth import Authenticator
from gpuscale.common.wire import enum_word
from tests.support.allocator import allocator, release, reserve_request
from tests.support.fake_fleet import FakeFleet, node_message, serving
from tests.support.tokens import token, write_tokens
from tests.support.waiting import eventually


@asynccontextmanager
async def serving_callers(folder: Path, *names: str) -> AsyncGenerator[list[AsyncClient]]:
    """Clients of an allocator with eight GPUs: `oli` has a token and no more, `ml` may use two tenants, `scaler` all; `ada` is admin."""
    tokens = write_tokens(folder / "tokens.toml", oli="operator", ada="admin", ml="operator")
    tokens.write_text(tokens.read_text() + 'tenants = ["ml", "vision"]\nmax_priority = 10\n')
    write_tokens(folder / "more.toml", scaler="operator")
    more = (folder / "more.toml").read_text() + 'tenants = ["*"]\n'
    tokens.write_text(tokens.read_text() + more)
    authenticator = Authenticator(tokens_file=tokens)
    async with (
        serving(FakeFleet(node_message("n0", count=8))) as fleet,
        allocator(folder, fleet, authenticator=authenticator) as address,
        connect_async(address, token=token("ada")) as ready,
    ):
        await eventually(lambda: ready.reserve(1, "first"), retry_on=(UnavailableError,))
        clients = [connect_async(address, token=token(name)) for name in names]
        yield clients
        for client in clients:
            await client.close()


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
    async with serving_callers(tmp_path, "oli", "ml", "ada") as (oli, ml, ada):
        assert (await way(oli, reserve_request())).tenant == "oli"
        assert (await way(ada, reserve_request(tenant="whatever", priority=1000))).tenant == "whatever"
        assert (await way(ml, reserve_request(tenant="vision", priority=10))).tenant == "vision"
        for client, tenant in ((oli, "ml"), (oli, "whatever"), (ml, "oli"), (oli, "Oli")):
            with pytest.raises(PermissionDeniedError) as caught:
                await way(client, reserve_request(tenant=tenant, priority=1000))  # as an admin did
            assert caught.value.reason == "OTHER_TENANT"
            assert caught.value.metadata["field"] == f"{path}tenant"
            assert caught.value.message.startswith(f"{path}tenant: ")
        for client, priority in ((oli, 1), (oli, 1000), (ml, 11)):
            with pytest.raises(PermissionDeniedError) as caught:
                await way(client, reserve_request(priority=priority))
            assert caught.value.reason == "PRIORITY_TOO_HIGH"
            assert caught.value.metadata["field"] == f"{path}priority"


async def test_a_quota_holds_whoever_tries_to_leave_it(tmp_path: Path) -> None:
    async with serving_callers(tmp_path, "oli", "ml", "ada") as (oli, ml, ada):
        await ada.quotas.SetQuota(api.SetQuotaRequest(quota=api.Quota(tenant="ml", gpu_milli_limit=1000)))
        assert (await reserve(ml, reserve_request(priority=-1000))).tenant == "ml", "the first of its tenants"
        assert (await reserve(oli, reserve_request(tenant="oli"))).tenant == "oli"
        held = {
            one.tenant: one.gpu_milli_held
            for one in (await ada.quotas.ListQuotas(api.ListQuotasRequest())).quotas
        }
        assert held == {"ada": 1000, "ml": 1000, "oli": 1000}
        answer = await ml.capacity.CheckAvailability(api.CheckAvailabilityRequest(ask=api.Ask(gpu_count=1)))
        assert (answer.available, enum_word(answer, "reason")) == (False, "QUOTA_EXCEEDED")


async def test_a_reservation_for_another_is_of_both_after_a_restart(tmp_path: Path) -> None:
    """Of whom it was made for, and of who made it; anybody else may neither change it nor reserve for another."""
    request = reserve_request(owner="oli", tenant="oli")
    async with serving_callers(tmp_path, "scaler") as (scaler,):
        one = await reserve(scaler, request)
        assert (one.owner, one.fence > 0) == ("oli", True)
    async with serving_callers(tmp_path, "scaler", "oli", "ml") as (scaler, oli, ml):
        assert (await reserve(scaler, request)).name == one.name
        with pytest.raises(PermissionDeniedError, match="belongs to oli"):
            await ml.allocator.ReleaseReservation(api.ReleaseReservationRequest(name=one.name))
        with pytest.raises(PermissionDeniedError) as refused:
            await batch(ml, reserve_request(owner="oli"))
        assert (refused.value.reason, refused.value.metadata["field"]) == ("OTHER_OWNER", "requests[1].owner")
        renewed = api.RenewReservationRequest(name=one.name, fence=one.fence)
        for client in (scaler, oli):
            await client.allocator.RenewReservation(renewed)
        await release(oli, one)
