"""Who waits for a MIG instance gets it of an idle GPU: from the allocator's contract to the driver's double, through agent and gpuscale-power."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from gpuscale.allocator.domain.cordons import Cordon, Spot
from gpuscale.allocator.state.policies import PolicyStore
from gpuscale.allocator.usecases import fleet as following
from gpuscale.allocator.usecases import powering, rebalancing
from gpuscale.allocator.usecases.draining import Maintenance
from gpuscale.api.allocator import v1 as api
from gpuscale.common.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from gpuscale.common.names import gpu_name
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.wire import to_duration
from gpuscale.monitor.agent import helpers
from gpuscale.monitor.agent.nvml import source
from tests.integration.allocator.test_power_on_the_driver import PowerSite, site
from tests.support.allocator import reserve_request
from tests.support.nvml_double import NvmlDouble, divide
from tests.support.power import PowerHelper
from tests.support.waiting import eventually

CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"


pytestmark = pytest.mark.usefixtures("reports_stay_fresh")


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a driver and a fleet of thousands need."""
    for module in (powering, rebalancing):
        monkeypatch.setattr(module, "LOOK", 0.05)
    monkeypatch.setattr(helpers, "LOOK", 0.1)
    monkeypatch.setattr(helpers, "QUICK", 0.1)
    monkeypatch.setattr(following, "MIN_INTERVAL", 0.0)
    monkeypatch.setattr(source, "FIRST_PARTS_SECONDS", 0.3)
    monkeypatch.setattr(source, "SLOW_EVERY_SECONDS", 0.3)


@pytest.fixture
def helper(nvml_double: NvmlDouble) -> Iterator[PowerHelper]:
    divide(nvml_double.gpus[0], "3g.40gb", "1g.10gb")
    divide(nvml_double.gpus[1], "7g.80gb")
    nvml_double.write()
    found = PowerHelper(nvml_double)
    yield found
    nvml_double.release_all()
    found.kill()


@asynccontextmanager
async def waited_for(folder: Path, helper: PowerHelper, profile: str) -> AsyncGenerator["Waiting"]:
    """Somebody waits for an instance of a profile, of which another holds the only one."""
    async with site(folder, helper) as (here, _), AsyncExitStack() as stack:
        capacity = here.capacity
        first = partial(here.client.reserve, 1, mig_profile=profile)
        await eventually(first, retry_on=(ResourceExhaustedError, FailedPreconditionError))
        request = reserve_request(holder="waits", mig_profile=profile, wait=to_duration(60))
        granted = asyncio.ensure_future(here.client.stub.Reserve(request, timeout=60))
        stack.callback(granted.cancel)
        one = Waiting(here, granted)
        await eventually(
            lambda: capacity.PlanRebalance(api.PlanRebalanceRequest(), timeout=60),
            lambda found: any(plan.partitions for plan in found.plans),
        )
        yield one


class Waiting:
    """Who waits, and how they get what they wait for."""

    def __init__(self, here: PowerSite, granted: "asyncio.Future[api.ReserveResponse]") -> None:
        self.here = here
        self.granted = granted

    async def apply(self) -> api.ApplyRebalanceResponse:
        with rpc_errors():
            return await self.here.capacity.ApplyRebalance(api.ApplyRebalanceRequest(), timeout=60)

    async def applied(self) -> api.RebalancePlan:
        """Apply as soon as the allocator has heard of the helper, and has a plan."""
        return await eventually(
            self.apply,
            lambda answer: answer.plan if answer.HasField("plan") else None,
            retry_on=(FailedPreconditionError,),
        )

    async def told(self, count: int = 1) -> Sequence[str]:
        """Why the first changes were made, newest first, once there are so many."""
        return await eventually(lambda: self._reasons(count))

    async def cordons(self) -> Sequence[api.Cordon]:
        return (await self.here.nodes.ListCordons(api.ListCordonsRequest(), timeout=60)).cordons

    async def _reasons(self, count: int) -> Sequence[str]:
        changes = await self.here.changes()
        return [one.reason for one in changes] if len(changes) == count else []


async def test_without_the_helper_it_is_refused_and_said_what_to_do(
    tmp_path: Path, helper: PowerHelper
) -> None:
    async with waited_for(tmp_path / "state", helper, "7g.80gb") as waits:
        with pytest.raises(FailedPreconditionError, match="--partitions-file") as refused:
            await waits.apply()
        assert refused.value.reason == "NO_PARTITION_HELPER"
        assert "gpuscalectl plan rebalance" in refused.value.message
        assert not await waits.cordons()
    assert helper.double.calls(CREATE) == 0


async def test_a_profile_that_no_gpu_has_can_be_waited_for_where_a_helper_may_make_it(
    tmp_path: Path, helper: PowerHelper
) -> None:
    async with site(tmp_path / "state", helper) as (here, _):
        client, profile = here.client, "2g.20gb"
        no_capacity = api.NoRoomReason.Value("NO_ROOM_REASON_NO_CAPACITY")

        async def reason(wait: float = 0.0) -> str:
            asked = client.reserve(1, mig_profile=profile, wait=to_duration(wait) if wait else None)
            with pytest.raises((FailedPreconditionError, ResourceExhaustedError)) as refused:
                await asked
            return f"{refused.value.reason}: {refused.value.message}"

        async def looked() -> Sequence[api.CheckAvailabilityResponse | api.ExplainPlacementResponse]:
            ask, of = api.Ask(gpu_count=1, mig_profile=profile), here.capacity
            check, explain = api.CheckAvailabilityRequest(ask=ask), api.ExplainPlacementRequest(ask=ask)
            return [
                await of.CheckAvailability(check, timeout=60),
                await of.ExplainPlacement(explain, timeout=60),
            ]

        async def becomes(kind: str) -> bool:
            return (await reason()).startswith(f"{kind}: ")

        await eventually(lambda: becomes("UNSATISFIABLE"))
        never = "can never be granted"
        assert never in await reason(wait=60.0)
        assert {never in one.message for one in await looked()} == {True}
        await asyncio.to_thread(helper.start_to_partition)
        await eventually(lambda: becomes("NO_CAPACITY"))
        why = "too few such instances, even if all were free. Idle GPUs may be partitioned: gpuscalectl plan rebalance tells"
        assert why in await reason()
        assert {(one.reason, why in one.message) for one in await looked()} == {(no_capacity, True)}
        queued = await client.reserve(
            1, mig_profile=profile, wait=to_duration(60), keep_place=True, job=api.Job(command="train")
        )
        request = api.GetReservationRequest(name=queued.name)

        async def seen() -> api.Reservation:
            return (await client.stub.GetReservation(request, timeout=60)).reservation

        await eventually(
            seen, lambda found: found.state == found.STATE_WAITING and why in found.job.queue_reason
        )
        assert profile in await eventually(
            lambda: here.capacity.ApplyRebalance(api.ApplyRebalanceRequest(), timeout=60),
            lambda answer: [one for part in answer.plan.partitions for one in part.profiles],
        )
        assert (await eventually(seen, lambda found: [gpu.model for gpu in found.gpus]))[0].endswith(
            f"MIG {profile}"
        )


async def test_who_waits_gets_an_instance_of_an_idle_gpu_that_is_cordoned_meanwhile(
    tmp_path: Path, helper: PowerHelper
) -> None:
    async with waited_for(tmp_path / "state", helper, "7g.80gb") as waits:
        double, here = helper.double, waits.here
        double.hold(double.gpus[0].rules, CREATE)
        double.write()
        await asyncio.to_thread(helper.start_to_partition)
        plan = await waits.applied()
        assert (plan.partitions[0].gpu, [*plan.partitions[0].profiles]) == (here.gpus[0], ["7g.80gb"])
        await eventually(lambda: double.calls(CREATE) == 1)
        [cordon] = await waits.cordons()
        assert (cordon.target, cordon.author) == (here.gpus[0], "gpuscale-power")
        assert cordon.reason == "gets MIG instances 7g.80gb for waits"
        double.release_all()
        got = (await waits.granted).reservation.gpus[0]
        assert got.model.endswith("MIG 7g.80gb")
        assert got.uuid.startswith("MIG-00000000"), "the new one"
        assert await waits.told() == ["has MIG instances 7g.80gb (for waits)"]
        [change] = await here.changes()
        assert (change.gpu, [*change.profiles]) == (here.gpus[0], ["7g.80gb"])
        assert not await waits.cordons()


async def test_kill_9_between_destroy_and_create_gives_the_gpu_back_what_it_had(
    tmp_path: Path, helper: PowerHelper
) -> None:
    async with waited_for(tmp_path / "state", helper, "7g.80gb") as waits:
        double = helper.double
        double.hold(double.gpus[0].rules, CREATE)
        double.write()
        await asyncio.to_thread(helper.start_to_partition)
        await waits.applied()
        await eventually(lambda: double.calls(CREATE) == 1)
        helper.kill()
        assert double.instances() == []
        assert await waits.cordons(), "nothing is placed there"
        double.release_all()
        await asyncio.to_thread(helper.start_to_partition)
        [why] = await waits.told()
        assert "the order was interrupted: its original instances are restored" in why
        assert double.instances() == [("1g.10gb", 4), ("3g.40gb", 0)]
        held = await waits.here.client.reserve(1, mig_profile="1g.10gb")
        assert held.gpus[0].uuid.startswith("MIG-00000000"), "the one that was made again"
        await waits.here.client.release(held)
        await waits.applied()
        assert (await waits.granted).reservation.gpus[0].model.endswith("MIG 7g.80gb")
        assert len(await waits.told(2)) == 2


async def test_an_order_outlives_the_allocator(tmp_path: Path, helper: PowerHelper) -> None:
    folder, gpu = tmp_path / "state", gpu_name("alpha", helper.double.gpus[0].uuid)
    async with waited_for(folder, helper, "7g.80gb") as waits:
        helper.double.hold(helper.double.gpus[0].rules, CREATE)
        helper.double.write()
        await asyncio.to_thread(helper.start_to_partition)
        await waits.applied()
        await eventually(lambda: helper.double.calls(CREATE) == 1)
    helper.double.release_all()
    async with site(folder, helper) as (here, _):
        await eventually(here.changes)
        [change] = await here.changes()
        assert (change.gpu, change.reason) == (gpu, "has MIG instances 7g.80gb (for waits)")
        assert not (await here.nodes.ListCordons(api.ListCordonsRequest(), timeout=60)).cordons


async def test_a_gpu_of_which_anybody_holds_a_part_is_not_partitioned(
    tmp_path: Path, helper: PowerHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waited_for(tmp_path / "state", helper, "7g.80gb") as waits:
        here = waits.here
        await asyncio.to_thread(helper.start_to_partition)
        held = await here.client.reserve(1, mig_profile="1g.10gb")
        assert not (await waits.apply()).HasField("plan")
        await here.client.release(held)
        cordon = Maintenance.cordon

        async def late(self: Maintenance, spot: Spot, *, reason: str, author: str) -> Cordon:
            nonlocal held
            held = await here.client.reserve(1, mig_profile="1g.10gb")
            return await cordon(self, spot, reason=reason, author=author)

        monkeypatch.setattr(Maintenance, "cordon", late)
        await waits.applied()
        [why] = await waits.told()
        assert why == f"does not get MIG instances 7g.80gb: {held.name} holds a part of it (for waits)"
        assert not await waits.cordons()
    assert helper.double.calls(CREATE) == 0


async def test_an_order_that_cannot_be_deleted_at_first_is_told_as_it_ended(
    tmp_path: Path, helper: PowerHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    withdraw = PolicyStore.withdraw

    async def unwritable(_self: PolicyStore, _kind: str, _key: str) -> None:
        monkeypatch.setattr(PolicyStore, "withdraw", withdraw)
        raise UnavailableError("the disk is full")

    async with waited_for(tmp_path / "state", helper, "7g.80gb") as waits:
        monkeypatch.setattr(PolicyStore, "withdraw", unwritable)
        await asyncio.to_thread(helper.start_to_partition)
        await waits.applied()
        assert await waits.told() == ["has MIG instances 7g.80gb (for waits)"]
        assert PolicyStore.withdraw is withdraw, "it failed once"
