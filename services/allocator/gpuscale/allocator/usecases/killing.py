"""Orders to end outsiders: policies give them, and the agents of hosts that opted in take them and say what became of them.

An agent asks for orders, so that nothing has to reach it, and only what it checks itself is done on its host. An order is given
once, and never late. Of one that was handed over and that nobody answers it is not known what became of it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from gpuscale.allocator.domain.use_policies import StageOutcome
from gpuscale.allocator.usecases.fleet import FleetView
from gpuscale.common.errors import NotFoundError
from gpuscale.common.names import node_name

HEARD = 15.0
"""Seconds after which an agent that did not ask for orders is silent; it asks each 5 s."""
ANSWER = 10.0
"""Seconds for which what became of an order is waited for."""


@dataclass(frozen=True, slots=True)
class KillOrder:
    """To end a process on a GPU, of that resource name, at the latest `grace` seconds after it was asked to."""

    id: str
    gpu: str
    pid: int
    start_ticks: int
    grace: float


@dataclass(eq=False, slots=True)
class _Pending:
    """An order that waits for its answer, and whether an agent was handed it."""

    order: KillOrder
    node: str
    answer: "asyncio.Future[str]"
    handed: bool = False


@dataclass(eq=False)
class KillOrders:
    """The orders that are on their way."""

    view: FleetView
    _pending: dict[str, _Pending] = field(default_factory=dict[str, _Pending], init=False)
    _heard: dict[str, float] = field(default_factory=dict[str, float], init=False)

    async def kill(self, gpu: str, process: tuple[int, int], grace: float) -> tuple[StageOutcome, str]:
        """End a process on a GPU: DONE, or REFUSED or ASKED with why."""
        node, loop = gpu.split("/")[1], asyncio.get_running_loop()
        agent = f"the agent of {node_name(node)}"
        if self._heard.get(node, float("-inf")) < loop.time() - HEARD:
            return StageOutcome.REFUSED, f"{node_name(node)} has no gpuscale-killer, or its agent is silent"
        order = KillOrder(uuid4().hex, gpu, *process, grace)
        one = self._pending[order.id] = _Pending(order, node, loop.create_future())
        try:
            async with asyncio.timeout(ANSWER):
                problem = await one.answer
                return (StageOutcome.REFUSED if problem else StageOutcome.DONE), problem
        except TimeoutError:
            if not one.handed:
                return StageOutcome.REFUSED, f"{agent} took no order within {ANSWER:g} s"
            silent = f"{agent} took the order, and did not say within {ANSWER:g} s what became of it"
            return StageOutcome.ASKED, silent
        finally:
            del self._pending[order.id]

    def take(self, node: str, results: Sequence[tuple[str, str]]) -> list[KillOrder]:
        """Learn what became of orders (id, problem); the others for a node. Raises NotFoundError: the node is not known."""
        if self.view.get(node) is None:
            raise NotFoundError(f"there is no {node_name(node)}", metadata={"name": node_name(node)})
        for order, problem in results:
            one = self._pending.get(order)
            if one is not None and one.node == node and not one.answer.done():
                one.answer.set_result(problem)
        self._heard[node] = asyncio.get_running_loop().time()
        given = [one for one in self._pending.values() if one.node == node and not one.handed]
        for one in given:
            one.handed = True
        return [one.order for one in given]
