"""What becomes of orders to end outsiders: given once, never late, and never said to be refused once an agent has them."""

import asyncio

import pytest

from gpuscale.allocator.domain.use_policies import StageOutcome
from gpuscale.allocator.usecases.fleet import FleetView
from gpuscale.allocator.usecases.policing import ANSWER, HEARD, KillOrders
from gpuscale.common import wire
from gpuscale.common.errors import NotFoundError

pytestmark = pytest.mark.looptime

GPU, PROCESS = "nodes/n0/gpus/GPU-1", (4711, 99)
REFUSED, ASKED, DONE = StageOutcome.REFUSED, StageOutcome.ASKED, StageOutcome.DONE
Killed = asyncio.Task[tuple[StageOutcome, str]]


async def ordered(orders: KillOrders) -> Killed:
    """An order, once an agent has been heard that waits for no other."""
    orders.take("n0", [])
    kill = asyncio.create_task(orders.kill(GPU, PROCESS, 10.0))
    await asyncio.sleep(0)
    return kill


@pytest.fixture
def orders() -> KillOrders:
    return KillOrders(FleetView({"n0": 0, "n1": 1}))


@pytest.mark.parametrize(("problem", "outcome"), [("", DONE), ("it has ended", REFUSED)])
async def test_an_agent_is_given_an_order_once_and_says_what_became_of_it(
    orders: KillOrders, problem: str, outcome: StageOutcome
) -> None:
    kill = await ordered(orders)
    [one] = orders.take("n0", [])
    assert (one.gpu, one.pid, one.start_ticks, wire.seconds(one.grace)) == (GPU, *PROCESS, 10.0)
    assert orders.take("n1", [(one.id, "not this node's")]) == []
    assert orders.take("n0", []) == []
    await asyncio.sleep(1)
    assert not kill.done()
    assert orders.take("n0", [(one.id, problem)]) == []
    assert await kill == (outcome, problem)


async def test_an_order_that_was_handed_over_and_is_not_answered_is_not_called_refused(
    orders: KillOrders,
) -> None:
    kill = await ordered(orders)
    assert orders.take("n0", [])
    outcome, why = await kill
    assert outcome is ASKED
    assert "the agent of nodes/n0 took the order, but reported no result within 10 s" in why


async def test_an_order_that_nobody_took_in_time_is_given_to_nobody(orders: KillOrders) -> None:
    kill = await ordered(orders)
    assert await kill == (REFUSED, f"the agent of nodes/n0 took no order within {ANSWER:g} s")
    assert orders.take("n0", []) == []


async def test_a_host_without_the_helper_is_given_no_order(orders: KillOrders) -> None:
    silent = (REFUSED, "nodes/n0 has no gpuscale-killer, or its agent is silent")
    assert await orders.kill(GPU, PROCESS, 10.0) == silent
    orders.take("n0", [])
    await asyncio.sleep(HEARD + 1)
    assert await orders.kill(GPU, PROCESS, 10.0) == silent
    with pytest.raises(NotFoundError, match="there is no nodes/n7"):
        orders.take("n7", [])
