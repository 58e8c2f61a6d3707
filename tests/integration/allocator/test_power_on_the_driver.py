"""Power budgets from the allocator's contract to the driver's double, with an agent and gpuscale-power between them."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from gpuscale.allocator.usecases import fleet as following
from gpuscale.allocator.usecases import powering
from gpuscale.api.allocator import v1 as api
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, ResourceExhaustedError
from gpuscale.common.names import gpu_name
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.monitor.agent import helpers
from tests.support.allocator import Client, allocator, calling
from tests.support.monitor import running_agent, running_fleet
from tests.support.nvml_double import NvmlDouble
from tests.support.ports import free_port
from tests.support.power import PowerHelper
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a driver and a fleet of thousands need."""
    monkeypatch.setattr(powering, "LOOK", 0.05)
    monkeypatch.setattr(helpers, "LOOK", 0.1)
    monkeypatch.setattr(helpers, "QUICK", 0.1)
    monkeypatch.setattr(following, "MIN_INTERVAL", 0.0)


pytestmark = pytest.mark.usefixtures("reports_stay_fresh")


class PowerSite:
    """The host `alpha` with the double's GPUs, its agent, the helper, and who sets budgets."""

    def __init__(
        self, double: NvmlDouble, helper: PowerHelper, client: Client, channel: grpc.aio.Channel
    ) -> None:
        self.double = double
        self.helper = helper
        self.client = client
        self.power = api.PowerServiceStub(channel)
        self.capacity = api.CapacityServiceStub(channel)
        self.nodes = api.NodeServiceStub(channel)
        self.gpus = [gpu_name("alpha", gpu.uuid) for gpu in double.gpus]

    async def budget(
        self, watts: float, name: str = "rack", per: str = "", nodes: Sequence[str] = ()
    ) -> api.PowerBudget:
        wanted = api.PowerBudget(
            name=f"budgets/{name}", spec=api.PowerBudgetSpec(watts=watts, per=per, nodes=nodes)
        )
        request = api.CreatePowerBudgetRequest(power_budget=wanted, request_id=str(uuid4()))
        with rpc_errors():
            return (await self.power.CreatePowerBudget(request, timeout=60)).power_budget

    async def helped(self) -> None:
        """Start the helper, and wait until the allocator knows of it."""
        await asyncio.to_thread(self.helper.start)

        async def known() -> bool:
            ask = api.Ask(gpu_count=1, power_limit_watts=300)
            request = api.CheckAvailabilityRequest(ask=ask)
            return (await self.capacity.CheckAvailability(request, timeout=60)).available

        await eventually(known)

    async def sum(self, name: str = "rack") -> api.PowerSum:
        request = api.GetPowerBudgetRequest(name=f"budgets/{name}")
        [found] = (await self.power.GetPowerBudget(request, timeout=60)).power_budget.sums
        return found

    async def changes(self) -> Sequence[api.PowerChange]:
        request = api.ListPowerChangesRequest(page_size=1000)
        return (await self.power.ListPowerChanges(request, timeout=60)).power_changes

    async def until_limits(self, *watts: float | None) -> None:
        await eventually(lambda: self.helper.limits() == list(watts))

    def load(self, *watts: float) -> None:
        """What the work on each GPU would draw."""
        for gpu, drawn in zip(self.double.gpus, watts, strict=True):
            gpu.power_watts = drawn
        self.double.write()


@pytest.fixture
def helper(nvml_double: NvmlDouble) -> Iterator[PowerHelper]:
    found = PowerHelper(nvml_double)
    yield found
    found.kill()


@asynccontextmanager
async def site(folder: Path, helper: PowerHelper) -> AsyncGenerator[tuple[PowerSite, AsyncExitStack]]:
    """All of it; the agent ends with the stack."""
    async with (
        running_fleet() as fleet,
        allocator(folder, fleet.address) as address,
        open_channel(address) as channel,
        calling(address) as client,
        AsyncExitStack() as of_agent,
    ):
        await of_agent.enter_async_context(
            running_agent(
                fleet.address,
                node="alpha",
                source="nvml",
                period_seconds=0.1,
                allocator=channel,
                power_socket=helper.socket,
            )
        )
        await client.ready()
        yield PowerSite(helper.double, helper, client, channel), of_agent


async def test_without_the_helper_it_is_refused_and_said_what_to_install(
    tmp_path: Path, helper: PowerHelper
) -> None:
    async with site(tmp_path / "state", helper) as (here, _):
        await here.client.heard("alpha", len(here.gpus))
        with pytest.raises(FailedPreconditionError, match="systemctl enable --now gpuscale-power") as refused:
            await here.budget(900)
        assert refused.value.reason == "NO_POWER_HELPER"
        with pytest.raises(GpuscaleError, match="nodes/alpha has no gpuscale-power") as no_room:
            await here.client.reserve(1, power_limit_watts=300)
        assert "Install gpuscale-power there" in no_room.value.message
        elsewhere = await here.budget(900, nodes=["nodes/none"])
        elsewhere.spec.ClearField("nodes")
        update = api.UpdatePowerBudgetRequest(power_budget=elsewhere)
        with pytest.raises(FailedPreconditionError, match="gpuscale-power"), rpc_errors():
            await here.power.UpdatePowerBudget(update, timeout=60)
        await here.helped()
        await here.budget(900, "more")
        with pytest.raises(GpuscaleError, match="admit 200 to 700 W"):
            await here.client.reserve(1, power_limit_watts=100)


async def test_a_reservations_limit_lasts_as_long_as_it_does(tmp_path: Path, helper: PowerHelper) -> None:
    async with site(tmp_path / "state", helper) as (here, _):
        await here.helped()
        assert helper.limits() == [None, None], "nothing is capped as long as nothing asks for it"
        held = await here.client.reserve(1, gpus=here.gpus[:1], power_limit_watts=300)
        await here.until_limits(300, None)
        await here.client.release(held)
        await here.until_limits(700, None)
        last, first = await here.changes()
        assert (first.gpu, first.watts, first.HasField("before_watts")) == (here.gpus[0], 300, False)
        assert first.reason == "its holder limits it to 300 W"
        assert (last.before_watts, last.HasField("watts")) == (300, False)
        assert last.reason == "no cap is needed any more"


async def test_a_budget_is_kept_shared_explained_and_what_would_exceed_it_does_not_start(
    tmp_path: Path, helper: PowerHelper
) -> None:
    async with site(tmp_path / "state", helper) as (here, _):
        await here.helped()
        await here.budget(900, per="node")
        both = [await here.client.reserve(1, gpus=[gpu]) for gpu in here.gpus]
        here.load(690, 690)
        await here.until_limits(450, 450)
        found = await eventually(here.sum, lambda one: one if 0 < one.drawn_watts <= 900 else None)
        assert (found.name, found.gpu_count, found.capped_count, found.loose_count) == (
            "nodes/alpha",
            2,
            2,
            0,
        )
        [change] = [one for one in await here.changes() if one.gpu == here.gpus[0] and one.watts == 450]
        assert change.power_budget == "budgets/rack"
        assert change.reason == "nodes/alpha may draw 900 W: by equal shares"
        here.load(690, 100)
        await here.until_limits(700, 200)

        await here.client.release(both[1])
        changed = api.PowerBudget(name="budgets/rack", spec=api.PowerBudgetSpec(watts=300))
        update = api.UpdatePowerBudgetRequest(
            power_budget=changed, update_mask=FieldMask(paths=["spec.watts"])
        )
        await here.power.UpdatePowerBudget(update, timeout=60)
        await here.until_limits(200, 200)
        with pytest.raises(
            ResourceExhaustedError, match=r"budgets/rack leaves nodes/alpha .* of 300 W"
        ) as no:
            await here.client.reserve(1)
        assert no.value.metadata["power_budget"] == "2"
        asked = api.ExplainPlacementRequest(ask=api.Ask(gpu_count=1))
        explained = await here.capacity.ExplainPlacement(asked, timeout=60)
        assert not explained.available
        assert [one.obstacle for one in explained.nodes] == [api.Obstacle.OBSTACLE_POWER_BUDGET]
        await here.client.release(both[0])
        await here.power.DeletePowerBudget(api.DeletePowerBudgetRequest(name="budgets/rack"), timeout=60)
        await here.until_limits(700, 700)


async def test_limits_are_back_after_the_end_of_helper_agent_and_host_and_caps_come_again(
    tmp_path: Path, helper: PowerHelper
) -> None:
    async with site(tmp_path / "state", helper) as (here, agent):
        await here.helped()
        await here.budget(900)
        for gpu in here.gpus:
            await here.client.reserve(1, gpus=[gpu])
        here.load(690, 690)
        await here.until_limits(450, 450)
        helper.kill()
        loose = await eventually(here.sum, lambda one: one if one.loose_count == 2 else None)
        assert (loose.drawn_watts, loose.room_watts) == (900, 0)
        lost = [one.reason for one in await here.changes() if not one.HasField("watts")]
        assert lost == ["gpuscale-power does not answer"] * 2
        await asyncio.to_thread(helper.start, "--silence", "0.5")
        sets = helper.log.read_text()
        assert "700 W instead of 450 W" in sets, "set back at its start"
        await here.until_limits(450, 450)
        await agent.aclose()
        await here.until_limits(700, 700)
        known = {one.name: one.time.ToNanoseconds() for one in await here.changes()}
        assert known
    async with site(tmp_path / "state", helper) as (here, _):
        await here.until_limits(450, 450)
        helper.kill()
        helper.socket.unlink()
        helper.double.boot()
        await asyncio.to_thread(helper.start)
        await here.until_limits(450, 450)
        kept = {one.name: one.time.ToNanoseconds() for one in await here.changes()}
        assert known.items() <= kept.items(), "what was changed is on disk"


async def test_an_agent_that_starts_while_no_allocator_answers_keeps_the_caps_that_are_in_force(
    helper: PowerHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, ask = list[object](), helpers.ask_helper

    async def noted(place: Path, order: Mapping[str, object], patience: float) -> Mapping[str, Any] | None:
        orders.append(order["caps"])
        return await ask(place, order, patience)

    monkeypatch.setattr(helpers, "ask_helper", noted)
    await asyncio.to_thread(helper.start)
    helper.put(gpu0=300)
    async with (
        running_fleet() as fleet,
        open_channel(f"127.0.0.1:{free_port()}") as nobody,
        running_agent(
            fleet.address, node="alpha", source="nvml", allocator=nobody, power_socket=helper.socket
        ),
    ):
        await eventually(lambda: {helper.double.gpus[0].uuid: 300} in orders)
    assert helper.limits() == [300, None]
