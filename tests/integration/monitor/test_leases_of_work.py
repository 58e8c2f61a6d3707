"""Who may admit work: a real agent, fleet and allocator behind one address, and callers with tokens of their own.

Only the holder, or who was handed the lease token, or an admin admits, and only what the allocator granted.
"""

import asyncio
import stat
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest
from pydantic import SecretStr

from gpuscale.allocator.app import open_allocator
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common import errors
from gpuscale.common.names import LEASE_KEY, gpu_name
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import Registration, Server, ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.security.auth import Authenticator, Principal, Role
from gpuscale.monitor.agent.sources import simulated_uuid
from gpuscale.monitor.agent.work import TIMEOUT, LeaseChecks
from gpuscale.monitor.app.agent import open_agent
from gpuscale.monitor.app.fleet import open_fleet
from gpuscale.monitor.app.settings import AgentSettings, FleetSettings
from tests.support.monitor import serve
from tests.support.tokens import bearer, token, write_tokens
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("reports_stay_fresh")
FIRST, SECOND = simulated_uuid("alpha", 0), simulated_uuid("alpha", 1)
HUGE = 2**62


class Site:
    """One address behind which everything runs, and calls to it under several names."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.allocator: Any = allocator_api.AllocatorServiceStub(channel)
        self.policies: Any = allocator_api.PolicyServiceStub(channel)
        self.work: Any = monitor_api.WorkServiceStub(channel)

    async def reserve(self, who: str, request_id: str = "", **ask: Any) -> allocator_api.ReserveResponse:
        request = allocator_api.ReserveRequest(
            request_id=request_id or str(uuid4()), holder=who, ask=allocator_api.Ask(gpu_count=1, **ask)
        )
        with rpc_errors():
            return await self.allocator.Reserve(request, metadata=bearer(who), timeout=30)

    async def admit(self, who: str, one: allocator_api.ReserveResponse, **other: Any) -> None:
        """Admit the work of a grant with its token; `other` fields instead of the grant's."""
        held = one.reservation
        fields: dict[str, Any] = {
            "reservation": held.name,
            "fence": held.fence,
            "gpu_uuids": [gpu.uuid for gpu in held.gpus],
            "lease_token": one.lease_token,
        }
        request = monitor_api.AdmitWorkRequest(**(fields | other))
        with rpc_errors():
            await self.work.AdmitWork(request, metadata=bearer(who), timeout=30)

    async def refused(self, who: str, one: allocator_api.ReserveResponse, **other: Any) -> str:
        with pytest.raises(errors.GpuscaleError) as error:
            await self.admit(who, one, **other)
        return error.value.reason

    async def reset(self, who: str, *uuids: str) -> None:
        with rpc_errors():
            await self.work.ResetFences(
                monitor_api.ResetFencesRequest(gpu_uuids=uuids), metadata=bearer(who), timeout=30
            )


@asynccontextmanager
async def site(folder: Path, *, checks: bool = True, fences_above: int = 0) -> AsyncGenerator[Site]:
    """Agent `alpha` with four simulated GPUs; its own token is of role agent. Without `checks` it knows no allocator."""
    tokens = folder / "tokens.toml"
    write_tokens(
        tokens, ann="operator", bob="operator", root="admin", eve="viewer", alpha="agent", hub="operator"
    )
    clock = SystemClock()
    server = Server(
        ServerOptions(socket=folder / "agent.sock"), Authenticator(tokens_file=tokens, socket_role=Role.AGENT)
    )
    address = server.bind()
    async with AsyncExitStack() as stack:

        async def channel(name: str | None) -> grpc.aio.Channel:
            secret = None if name is None else SecretStr(token(name))
            return await stack.enter_async_context(open_channel(address, token=secret))

        agent = AgentSettings(
            node="alpha",
            source="simulated",
            simulated_gpu_count=4,
            period_seconds=0.2,
            state_dir=folder / "agent",
        )
        allocator = AllocatorSettings(data_dir=folder / "allocator", fences_above=fences_above)
        allocator.data_dir.mkdir(exist_ok=True)
        own, hub = await channel("alpha"), await channel("hub")
        server.add(
            *await stack.enter_async_context(open_fleet(FleetSettings(), clock=clock)),
            *await stack.enter_async_context(
                open_agent(agent, fleet=own, allocator=own if checks else None, clock=clock)
            ),
            *await stack.enter_async_context(open_allocator(allocator, fleet=hub, clock=clock)),
        )
        await stack.enter_async_context(server)
        there = Site(await channel(None))

        async def serves() -> bool:
            one = (await there.reserve("root", models=["Simulated GPU 80GB"])).reservation
            request = allocator_api.ReleaseReservationRequest(name=one.name, fence=one.fence)
            await there.allocator.ReleaseReservation(request, metadata=bearer("root"), timeout=30)
            return True

        await eventually(
            serves,
            timeout=60,
            retry_on=(errors.UnavailableError, errors.FailedPreconditionError, errors.GpuscaleError),
        )
        yield there


async def test_an_agent_asks_about_leases_and_orders_of_its_own_node_only(tmp_path: Path) -> None:
    async with site(tmp_path) as there:
        mine = (await there.reserve("ann", gpus=[gpu_name("alpha", FIRST)])).reservation
        check = allocator_api.CheckLeaseRequest(
            name=mine.name, fence=mine.fence, node="alpha", gpu_uuids=[FIRST]
        )
        await there.allocator.CheckLease(check, metadata=bearer("alpha"), timeout=30)
        check.node = "beta"
        for who, reason in (("alpha", "OTHER_NODE"), ("eve", "ROLE_TOO_LOW")):
            with pytest.raises(errors.PermissionDeniedError) as other, rpc_errors():
                await there.allocator.CheckLease(check, metadata=bearer(who), timeout=30)
            assert other.value.reason == reason
        for who, node in (("alpha", "nodes/beta"), ("ann", "nodes/alpha")):
            with pytest.raises(errors.GpuscaleError) as error, rpc_errors():
                await there.policies.TakeKillOrders(
                    allocator_api.TakeKillOrdersRequest(node=node), metadata=bearer(who), timeout=30
                )
            assert error.value.reason == "NOT_YOUR_NODE"

        async def known() -> bool:
            request = allocator_api.TakeKillOrdersRequest(node="nodes/alpha")
            with suppress(errors.NotFoundError), rpc_errors():
                return not (
                    await there.policies.TakeKillOrders(request, metadata=bearer("alpha"), timeout=30)
                ).orders
            return False

        await eventually(known)


async def test_on_the_agents_socket_the_lease_token_alone_decides(tmp_path: Path) -> None:
    """Every process of the host may ask there, and do nothing else that changes anything."""
    path = tmp_path / "agent.sock"
    async with site(tmp_path) as here, open_channel(f"unix:{path}") as channel:
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        mine, other = await here.reserve("ann"), await here.reserve("bob")
        here.work = monitor_api.WorkServiceStub(channel)
        await here.admit("nobody", mine)
        assert await here.refused("root", mine, lease_token="") == "LEASE_TOKEN_MISSING"
        assert await here.refused("root", mine, lease_token=other.lease_token) == "LEASE_TOKEN_INVALID"
        with pytest.raises(errors.PermissionDeniedError, match="needs role admin; local has agent"):
            await here.reset("root", FIRST)
    assert not path.exists()


async def test_who_has_no_credentials_may_admit_work_by_the_lease_token(tmp_path: Path) -> None:
    """As the supervisor of `gpuscalectl run` under `up`, which has no socket for work."""
    async with site(tmp_path) as here:
        mine, other = await here.reserve("ann"), await here.reserve("bob")
        call = here.work.AdmitWork
        here.work.AdmitWork = lambda request, timeout, **_: call(
            request, timeout=timeout, metadata=((LEASE_KEY, mine.lease_token),)
        )
        await here.admit("nobody", mine)
        assert await here.refused("nobody", mine, lease_token="") == "LEASE_TOKEN_MISSING"
        assert await here.refused("nobody", mine, lease_token=other.lease_token) == "LEASE_TOKEN_INVALID"


async def test_what_was_granted_is_admitted_for_its_holder_and_whom_it_hands_the_token_to_until_it_ends(
    tmp_path: Path,
) -> None:
    """Else a GPU could be kept from everybody for ever: by a fence invented, another's, or one for a GPU nobody holds."""
    async with site(tmp_path) as here:
        mine = await here.reserve("ann", gpus=[gpu_name("alpha", FIRST)])
        for who in ("ann", "root"):
            assert await here.refused(who, mine, fence=HUGE) == "FENCE_MISMATCH"
            assert await here.refused(who, mine, gpu_uuids=[SECOND]) == "GPU_NOT_HELD"
            assert await here.refused(who, mine, gpu_uuids=[FIRST, SECOND]) == "GPU_NOT_HELD"
            assert await here.refused(who, mine, reservation="reservations/none") == "NOT_FOUND"
        other = await here.reserve("bob", gpus=[gpu_name("alpha", SECOND)])
        for who in ("ann", "root"):
            assert await here.refused(who, mine, fence=other.reservation.fence) == "FENCE_MISMATCH"
        await here.admit("ann", mine)
        await here.admit("bob", other)
        await here.admit("bob", mine)  # an adapter, which has the token of its order
        assert await here.refused("bob", mine, lease_token="") == "LEASE_TOKEN_MISSING"
        assert await here.refused("bob", mine, lease_token=other.lease_token) == "LEASE_TOKEN_INVALID"
        assert await here.refused("eve", mine) == "ROLE_TOO_LOW"
        await here.admit("root", mine, lease_token="")
        request = allocator_api.ReleaseReservationRequest(
            name=mine.reservation.name, fence=mine.reservation.fence
        )
        await here.allocator.ReleaseReservation(request, metadata=bearer("ann"), timeout=30)
        assert await here.refused("ann", mine) == "RESERVATION_ENDED"


async def test_shares_of_one_gpu_are_admitted_in_any_order_and_again(tmp_path: Path) -> None:
    """The younger one first; the older one is not over for that, and may start more."""
    async with site(tmp_path) as here:
        share = {"gpus": [gpu_name("alpha", FIRST)], "gpu_milli": 250}
        older, younger = await here.reserve("ann", **share), await here.reserve("bob", **share)
        await here.admit("bob", younger)
        await here.admit("ann", older)
        await here.admit("ann", older)


async def test_an_admin_resets_a_fence_that_is_too_high_and_nobody_else_does(tmp_path: Path) -> None:
    """As after the loss of the allocator's state, where it begins to count anew."""
    async with site(tmp_path, fences_above=1000) as here:
        await here.admit("ann", await here.reserve("ann", gpus=[gpu_name("alpha", FIRST)]))
    (tmp_path / "allocator").rename(tmp_path / "lost")
    async with site(tmp_path) as here:
        mine = await here.reserve("ann", gpus=[gpu_name("alpha", FIRST)])
        assert await here.refused("ann", mine) == "FENCE_TOO_LOW"
        with pytest.raises(errors.PermissionDeniedError):
            await here.reset("ann", FIRST)
        with pytest.raises(errors.NotFoundError):
            await here.reset("root", "GPU-of-another-host")
        await here.reset("root", FIRST)
        await here.admit("ann", mine)
    async with site(tmp_path) as here:
        await here.admit("ann", mine)


async def test_a_token_is_the_same_for_a_repeated_call_and_after_a_restart(tmp_path: Path) -> None:
    request_id = str(uuid4())
    async with site(tmp_path) as here:
        first = await here.reserve("ann", request_id)
        assert (await here.reserve("ann", request_id)).lease_token == first.lease_token
        assert (await here.reserve("ann")).lease_token != first.lease_token
        assert len(first.lease_token) == 43
    async with site(tmp_path) as here:
        assert (await here.reserve("ann", request_id)).lease_token == first.lease_token
        await here.admit("ann", first)


async def test_fences_and_tokens_are_told_to_the_owner_alone_and_a_lease_token_needs_no_other(
    tmp_path: Path,
) -> None:
    async with site(tmp_path) as here:
        mine = await here.reserve("ann")
        get = allocator_api.GetReservationRequest(name=mine.reservation.name)

        async def told(who: str) -> tuple[int, str]:
            found = await here.allocator.GetReservation(get, metadata=bearer(who), timeout=30)
            return found.reservation.fence, found.lease_token

        assert await told("ann") == (mine.reservation.fence, mine.lease_token)
        assert await told("root") == (mine.reservation.fence, "")
        assert await told("bob") == (0, "")
        assert await told("eve") == (0, "")
        listed = await here.allocator.ListReservations(
            allocator_api.ListReservationsRequest(), metadata=bearer("eve"), timeout=30
        )
        assert [one.fence for one in listed.reservations] == [0]
        watch = here.allocator.WatchReservations(
            allocator_api.WatchReservationsRequest(), metadata=bearer("eve"), timeout=30
        )
        async for news in watch:
            assert [one.fence for one in news.reservations] == [0]
            break
        await here.admit("ann", mine)
        assert mine.lease_token not in str(listed)
        other = await here.reserve("bob")
        renewal = allocator_api.RenewReservationRequest(
            name=mine.reservation.name, fence=mine.reservation.fence
        )

        async def renew(*shown: str) -> None:
            with rpc_errors():
                await here.allocator.RenewReservation(
                    renewal, metadata=[(LEASE_KEY, one) for one in shown], timeout=30
                )

        await renew(mine.lease_token)
        for wrong, reason in (
            ([], "TOKEN_MISSING"),
            ([other.lease_token], "LEASE_TOKEN_INVALID"),
            ([mine.lease_token, mine.lease_token], "TOKEN_MALFORMED"),
            ([token("ann")], "LEASE_TOKEN_INVALID"),
        ):
            with pytest.raises(errors.GpuscaleError) as error:
                await renew(*wrong)
            assert error.value.reason == reason


class LosesConnections(allocator_api.AllocatorServiceServicer):
    """Answers CheckLease as a lost connection does, `losses` times, then as an allocator that knows the lease, or never."""

    def __init__(self, losses: float, *, silent: bool = False) -> None:
        self.losses = losses
        self.silent = silent
        self.asked = 0

    async def CheckLease(self, request: Any, context: Any) -> allocator_api.CheckLeaseResponse:
        self.asked += 1
        if self.asked <= self.losses:
            raise errors.UnavailableError("Stream removed (sendmsg: Broken pipe)", reason="LOST")
        if self.silent:
            await asyncio.Event().wait()
        return allocator_api.CheckLeaseResponse(lowest_fences=[7])


@asynccontextmanager
async def checking(allocator: LosesConnections) -> AsyncGenerator[LeaseChecks]:
    add = partial(allocator_api.add_AllocatorServiceServicer_to_server, allocator)
    service = Registration("gpuscale.api.allocator.v1.AllocatorService", add)
    async with serve(service) as address, open_channel(address) as channel:
        yield LeaseChecks(channel, "alpha")


LEASE = monitor_api.AdmitWorkRequest(
    reservation="reservations/r1", fence=7, gpu_uuids=("GPU-1",), lease_token="token"
)
CALLER = Principal("ann", Role.OPERATOR, "token")


async def test_a_lease_is_asked_for_again_however_many_connections_were_lost() -> None:
    """A restart or a cut link leaves several dead connections behind, and each fails the call that finds it."""
    allocator = LosesConnections(losses=5)
    async with checking(allocator) as checks:
        assert await checks.check(LEASE, CALLER) == {"GPU-1": 7}
    assert allocator.asked == 6


@pytest.mark.parametrize("allocator", [LosesConnections(losses=inf), LosesConnections(1, silent=True)])
async def test_an_allocator_that_stays_away_is_said_within_the_time_that_an_adapter_waits(
    allocator: LosesConnections,
) -> None:
    assert TIMEOUT < 3.0
    async with checking(allocator) as checks, asyncio.timeout(TIMEOUT + 20.0):
        with pytest.raises(errors.UnavailableError, match="Broken pipe") as failed:
            await checks.check(LEASE, CALLER)
    assert failed.value.reason == "LEASE_NOT_CHECKED"
    assert allocator.asked > 1


async def test_an_agent_that_cannot_ask_says_so(tmp_path: Path) -> None:
    async with site(tmp_path, checks=False) as here:
        with pytest.raises(errors.FailedPreconditionError, match="set allocator_address") as failed:
            await here.admit("ann", await here.reserve("ann"))
        assert failed.value.reason == "LEASE_NOT_CHECKED"
