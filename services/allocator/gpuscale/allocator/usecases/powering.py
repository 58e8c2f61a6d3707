"""Running power budgets: a look each second, caps for agents that ask, and a log of changes and reasons.

Agents ask, so nobody connects to them. What an agent says of its GPUs is newer than the fleet's view; GPUs of a node with a
silent agent, or without a helper, count with the most they may draw. A cap takes effect even if it cannot be logged.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import NoReturn, TypeAlias

from gpuscale.allocator.domain.model import POWER_LABEL, Node, NodeState
from gpuscale.allocator.domain.power import Governor, PowerBudget, PoweredGpu, PowerLook
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.state.commits import Changes
from gpuscale.allocator.state.policies import ACTS_KEPT, PolicyStore, PowerChange
from gpuscale.allocator.usecases.declarations import Declarations
from gpuscale.allocator.usecases.leases import Records
from gpuscale.api.allocator import v1 as api
from gpuscale.common import wire
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, NotFoundError
from gpuscale.common.names import gpu_name, node_name
from gpuscale.common.runtime.logs import Attempts, get_logger
from gpuscale.common.runtime.tasks import in_slices

LOOK = 1.0
"""Seconds between two looks."""
HEARD = 15.0
"""Seconds after which an agent that did not ask for caps is silent."""
SLICE = 64
"""Nodes that are looked at before other calls come."""
_log = get_logger(__name__)
_Told: TypeAlias = tuple[float, Mapping[str, api.GpuPower]]
_Caps: TypeAlias = Mapping[str, float]
_Numbered: TypeAlias = tuple[int, PowerChange]


@dataclass(eq=False)
class Powering:
    """Maintains power budgets. `open_powering` makes one; then `run` must run."""

    budgets: Declarations[PowerBudget]
    store: PolicyStore
    records: Records
    placer: Placer
    room: Changes
    _governor: Governor = field(default_factory=Governor, init=False)
    _told: dict[str, _Told] = field(default_factory=dict[str, _Told], init=False)
    _handed: dict[str, _Caps] = field(default_factory=dict[str, _Caps], init=False)
    _changes: deque[_Numbered] = field(default_factory=lambda: deque[_Numbered](maxlen=ACTS_KEPT), init=False)
    _written: int = field(default=0, init=False)
    """The number of the last change on disk."""
    _problems: dict[str, str] = field(default_factory=dict[str, str], init=False)
    found: PowerLook = field(default_factory=PowerLook, init=False)
    """As of the last look."""

    async def load(self) -> None:
        """Load what is on disk."""
        await self.budgets.load()
        self._changes.extend(await self.store.power_changes())
        self._written = self._changes[-1][0] if self._changes else 0

    async def run(self) -> NoReturn:
        """Look for ever."""
        writing = Attempts(_log, "cannot write changes of power limits", GpuscaleError)
        while True:
            await asyncio.sleep(LOOK)
            await self.look()
            with writing:  # else they are written with the next
                new = [*takewhile(lambda one: one[0] > self._written, reversed(self._changes))][::-1]
                if new:
                    await self.store.save_power_changes(new)
                    self._written = new[-1][0]

    def changes(self) -> list[_Numbered]:
        """Changes of caps, newest first, each with its number."""
        return list(reversed(self._changes))

    def take(self, node: str, told: Mapping[str, api.GpuPower]) -> _Caps:
        """Take an agent's report on a node; returns the caps to set. Raises NotFoundError for an unknown node."""
        NotFoundError.unless(self.records.view.get(node), node_name(node))
        self._told[node] = self._now(), told
        for uuid, one in told.items():
            if one.problem and one.problem != self._problems.get(uuid):
                _log.warning("cannot set a power limit", gpu=gpu_name(node, uuid), problem=one.problem)
            self._problems[uuid] = one.problem
        caps = {uuid: cap.watts for uuid, cap in self.found.caps.items() if uuid in told}
        self._handed[node] = caps
        return caps

    def expect_helpers(self, budget: PowerBudget) -> None:
        """Raise FailedPreconditionError (NO_POWER_HELPER) if the budget adds reporting nodes without a helper."""
        missing = [
            node.id
            for node in self.records.view.nodes
            if node.state is NodeState.ONLINE and node.gpus and budget.sum_of(node)
            if not any(one.sum_of(node) for _, _, one in self.budgets.specs())
            if not any(gpu.helped for gpu in self._gpus(node))
        ]
        if missing:
            raise FailedPreconditionError(
                f"{', '.join(map(node_name, missing[:5]))} cannot be capped: no gpuscale-power answers there. Install it:"
                " systemctl enable --now gpuscale-power, and give the agent its power_socket",
                reason="NO_POWER_HELPER",
                metadata={"name": ",".join(map(node_name, missing[:5]))},
            )

    async def look(self) -> None:
        """Choose caps again, beside other calls: for 8,000 GPUs it takes tens of milliseconds."""
        budgets = [(key, budget) for key, _, budget in self.budgets.specs()]
        if not (budgets or self._told or self.found.sums):
            return
        nodes, newly = self.records.view.nodes, self.records.ledger.use.newly
        counted, gpus = list(newly), dict[str, Sequence[PoweredGpu]]()
        async for node in in_slices(nodes, SLICE):
            if node.id in self._told or any(budget.sum_of(node) for _, budget in budgets):
                gpus[node.id] = self._gpus(node)
        now, before = self._now(), self.found
        self.found = await asyncio.to_thread(self._governor.look, budgets, nodes, gpus, now)
        self.placer.power = self.found.room
        for uuid in counted:
            newly.pop(uuid, None)
        for gpu in chain.from_iterable(gpus.values()):
            cap, wanted = before.caps.get(gpu.uuid), self.found.caps.get(gpu.uuid)
            was, watts = cap.watts if cap else None, wanted.watts if wanted else None
            if was != watts:
                budget = wanted.budget if wanted else cap.budget if cap else ""
                why = wanted.reason if wanted else "no cap is needed any more"
                if not (wanted or gpu.helped) and budget in {"", *dict(budgets)}:  # it is needed, and lost
                    heard = now - self._told.get(gpu.node, (-HEARD, {}))[0] < HEARD
                    silence = "its helper tells no limits" if heard else "its agent is not heard of"
                    why = self._problems.get(gpu.uuid) or silence
                name, time = gpu_name(gpu.node, gpu.uuid), self.records.clock.wall()
                self.record(PowerChange(name, was, watts, budget, why, time))
        rooms = {(one.budget, one.name): one.room for one in before.sums}
        if len(self.found.sums) < len(rooms) or any(
            one.room > rooms.get((one.budget, one.name), one.room) for one in self.found.sums
        ):
            self.room.room()

    def record(self, change: PowerChange) -> None:
        """Keep what was changed; it is written with the next look."""
        self._changes.append((self._changes[-1][0] + 1 if self._changes else 1, change))

    def _now(self) -> float:
        return self.records.clock.now()

    def _gpus(self, node: Node) -> Sequence[PoweredGpu]:
        heard, told = self._told.get(node.id, (-HEARD, {}))
        now, handed = self._now(), self._handed.get(node.id, {})
        fresh, use = now - heard < HEARD, self.records.ledger.use
        found: list[PoweredGpu] = []
        for gpu in (one for one in node.gpus if not one.parent):
            said = told.get(gpu.uuid)
            holders = [use.live(one) for one in use.on(gpu).reservations]
            wishes = [one.labels.get(POWER_LABEL, "") for one in holders]
            held, priority = bool(holders), max((one.priority for one in holders), default=0)
            limit: float | None = wire.or_else(said, "limit_watts", None) if said else None
            watts: float | None = wire.or_else(said, "watts", None) if said else None
            if not (said and fresh and said.HasField("lowest_watts")) or limit is None or said.problem:
                if not (said and fresh):
                    watts = gpu.power_watts if gpu.fresh_until >= now else None
                limits = (gpu.power_limit_watts, limit)  # a cap may be taken back there
                high = max((one for one in limits if one is not None), default=None)
                found.append(
                    PoweredGpu(gpu.uuid, node.id, high=high, watts=watts, held=held, priority=priority)
                )
                continue
            cap = max(said.cap_watts, handed.get(gpu.uuid, 0.0)) if said.HasField("cap_watts") else None
            found.append(
                PoweredGpu(
                    gpu.uuid,
                    node.id,
                    helped=True,
                    low=said.lowest_watts,
                    high=limit,
                    watts=watts,
                    cap=cap,
                    held=held,
                    priority=priority,
                    wish=max(map(float, wishes)) if all(wishes) and wishes else None,
                    activity=wire.or_else(said, "sm_activity_percent", None),
                )
            )
        return found


async def open_powering(
    store: PolicyStore, decode: Callable[[str], PowerBudget], records: Records, placer: Placer, room: Changes
) -> Powering:
    """Maintains the stored budgets."""

    def checked(body: str) -> PowerBudget:
        budget = decode(body)
        found.expect_helpers(budget)
        return budget

    found = Powering(Declarations("budgets", store, decode, records.clock), store, records, placer, room)
    await found.load()
    found.budgets.decode = checked
    return found
