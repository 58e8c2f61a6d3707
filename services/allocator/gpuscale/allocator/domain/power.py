"""Power budgets: how many watts each GPU may draw. Pure.

Draw is limited before it occurs: a held GPU counts with its cap, or its limit without one, and caps are lowered before others
are raised. A GPU that nobody holds counts with what it draws, and one with unknown limit and draw takes everything. Watts are
those of GPUs only, not of their hosts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gpuscale.allocator.domain.model import Node
from gpuscale.common.names import node_name

EMERGENCY, CALM = 5.0, 30.0
"""Seconds above a budget after which all caps are lowered to the minimum, and for how long they stay there."""
NEAR, SPARE = 0.9, 1.25
"""The part of its cap above which a GPU counts as limited by it, and the headroom over its draw, as factors."""
IDLE_SPARE, LEAST_RAISE = 10.0, 20.0
"""Watts of headroom for a GPU that nobody holds, and the least raise of a cap."""


class PowerShare(StrEnum):
    """Whose caps are raised first if not all can be."""

    EQUAL = "EQUAL"
    PRIORITY = "PRIORITY"
    SPEED = "SPEED"


@dataclass(frozen=True, slots=True)
class PowerBudget:
    """Watts for the GPUs of the named nodes, or all nodes, that have the labels.

    `per` is empty for one sum over all, `node`, or the key of a label for one sum per value.
    """

    watts: float
    nodes: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    per: str = ""
    share: PowerShare = PowerShare.EQUAL

    def sum_of(self, node: Node) -> str:
        """The sum that a node counts towards; empty if none."""
        if (self.nodes and node.id not in self.nodes) or not set(self.labels) <= node.labels.items():
            return ""
        if self.per == "node":
            return node_name(node.id)
        value = node.labels.get(self.per, "")
        return "all" if not self.per else value and f"{self.per}={value}"


@dataclass(frozen=True, slots=True)
class PoweredGpu:
    """The power of a GPU, in watts; None is unknown.

    `helped` says that a helper can set its cap, from `low` on: both limits are known then. `high` is its limit without a cap,
    `cap` the one in force, or the higher one while it changes. `wish` is the most that its holders want, `activity` how busy
    its SMs are.
    """

    uuid: str
    node: str
    helped: bool = False
    low: float = 0.0
    high: float | None = None
    watts: float | None = None
    cap: float | None = None
    held: bool = False
    priority: int = 0
    wish: float | None = None
    activity: float | None = None

    @property
    def most(self) -> float:
        """The most it may draw, apart from budgets."""
        high = self.high or 0.0
        return max(self.low, min(high, self.wish)) if self.held and self.wish is not None else high

    @property
    def limit(self) -> float | None:
        """The limit in force."""
        return self.high if self.cap is None else self.cap

    @property
    def counted(self) -> float | None:
        """What it counts if no cap is chosen for it."""
        if self.held or self.watts is None:
            return self.limit
        return min(self.watts + IDLE_SPARE, math.inf if self.limit is None else max(self.limit, self.watts))

    @property
    def start(self) -> float:
        """The least it counts beyond that once somebody holds it."""
        counted, least = self.counted, self.low if self.helped else self.high
        return math.inf if counted is None or least is None else max(0.0, least - counted)

    @property
    def pressed(self) -> bool:
        """Whether its cap limits it, or may."""
        return self.cap is not None and (self.watts is None or self.watts >= NEAR * self.cap)


@dataclass(frozen=True, slots=True)
class PowerCap:
    """The cap of a GPU, and why; without a budget, for a reservation."""

    watts: float
    reason: str
    budget: str = ""


@dataclass(frozen=True, slots=True)
class PowerSum:
    """The state of one sum of a budget.

    `drawn` is the draw, with limits in place of unknown draws; None if those are unknown too. `room` is the least that may be
    added.
    """

    budget: str
    name: str
    watts: float
    nodes: frozenset[str]
    gpus: tuple[PoweredGpu, ...]
    drawn: float | None
    room: float
    emergency: bool


@dataclass(frozen=True, slots=True)
class PowerRoom:
    """What may still start, as of a look; `costs` are for GPUs that nobody held then, `ranges` for nodes with a helper."""

    sums: Mapping[str, Sequence[PowerSum]] = field(default_factory=dict[str, Sequence[PowerSum]])
    costs: Mapping[str, float] = field(default_factory=dict[str, float])
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def short(
        self, picked: Mapping[str, str], since: Mapping[str, str]
    ) -> tuple[PowerSum, float, float] | None:
        """The first sum that GPUs, by UUID with their nodes, exceed; what is left of it, and what they need.

        `since` has the GPUs that were held since the look.
        """
        new = {uuid: node for uuid, node in picked.items() if uuid in self.costs and uuid not in since}
        for one in {id(one): one for node in new.values() for one in self.sums.get(node, ())}.values():
            need = sum(self.costs[uuid] for uuid, node in new.items() if node in one.nodes)
            spent = sum(self.costs.get(uuid, 0.0) for uuid, node in since.items() if node in one.nodes)
            if need > one.room - spent:
                return one, max(0.0, one.room - spent), need
        return None

    def keeps(self, node: str, watts: float) -> str:
        """Why the GPUs of a node cannot have this cap; empty if they can."""
        if node not in self.ranges:
            return f"{node_name(node)} has no gpuscale-power"
        low, high = self.ranges[node]
        return "" if low <= watts <= high else f"GPUs of {node_name(node)} admit {low:g} to {high:g} W"


@dataclass(frozen=True, slots=True)
class PowerLook:
    """The result of a look: the caps of GPUs with a helper, the state of budgets, and what may start."""

    caps: Mapping[str, PowerCap] = field(default_factory=dict[str, PowerCap])
    sums: Sequence[PowerSum] = ()
    room: PowerRoom = field(default_factory=PowerRoom)


class Governor:
    """Chooses caps at each look; it remembers since when each sum has been above its budget."""

    def __init__(self) -> None:
        self._above: dict[tuple[str, str], float] = {}
        self._calm: dict[tuple[str, str], float] = {}

    def look(
        self,
        budgets: Iterable[tuple[str, PowerBudget]],
        nodes: Iterable[Node],
        gpus: Mapping[str, Sequence[PoweredGpu]],
        now: float,
    ) -> PowerLook:
        """Choose caps for the GPUs of nodes, by node id."""
        budgets, nodes = list(budgets), list(nodes)
        of_nodes: dict[tuple[str, str], set[str]] = {}
        for node in nodes:
            for key, budget in budgets:
                if name := budget.sum_of(node):
                    of_nodes.setdefault((key, name), set()).add(node.id)
        chosen = {
            gpu.uuid: PowerCap(gpu.most, f"its holder limits it to {gpu.most:g} W")
            for node in nodes
            for gpu in gpus.get(node.id, ())
            if gpu.helped
        }
        by_key, sums = dict(budgets), list[PowerSum]()
        for (key, name), ids in sorted(of_nodes.items(), key=lambda one: (len(one[1]), one[0])):
            of_sum = tuple(gpu for node in sorted(ids) for gpu in gpus.get(node, ()))
            watts = by_key[key].watts
            drawn = _total(gpu.limit if gpu.watts is None else gpu.watts for gpu in of_sum)
            if drawn is not None and drawn <= watts:
                self._above.pop((key, name), None)
            elif now - self._above.setdefault((key, name), now) >= EMERGENCY:
                self._calm[key, name] = now + CALM
            emergency = self._calm.get((key, name), -math.inf) > now
            least = _total(gpu.low if gpu.helped and gpu.held else gpu.counted for gpu in of_sum)
            room = 0.0 if least is None or emergency else max(0.0, watts - least)
            found = PowerSum(key, name, watts, frozenset(ids), of_sum, drawn, room, emergency)
            _share(found, by_key[key].share, chosen)
            sums.append(found)
        for found in sums:  # nothing is raised while others of the sum have yet to be lowered
            limits = {gpu.uuid: gpu.limit for gpu in found.gpus if gpu.helped and gpu.limit is not None}
            if any(chosen[uuid].watts < limit for uuid, limit in limits.items()):
                for uuid, limit in limits.items():
                    chosen[uuid] = replace(chosen[uuid], watts=min(chosen[uuid].watts, limit))
        self._above = {one: since for one, since in self._above.items() if one in of_nodes}
        self._calm = {one: until for one, until in self._calm.items() if one in of_nodes}
        high = {gpu.uuid: gpu.high or 0.0 for of_node in gpus.values() for gpu in of_node}
        caps = {uuid: cap for uuid, cap in chosen.items() if cap.watts < high[uuid]}
        by_node: dict[str, list[PowerSum]] = {}
        for one in sums:
            for node_id in one.nodes:
                by_node.setdefault(node_id, []).append(one)
        costs = {gpu.uuid: gpu.start for node in by_node for gpu in gpus.get(node, ()) if not gpu.held}
        ranges = {
            node: (max(gpu.low for gpu in found), min(gpu.high or 0.0 for gpu in found))
            for node, found in gpus.items()
            if found and all(gpu.helped for gpu in found)
        }
        return PowerLook(caps, sums, PowerRoom(by_node, costs, ranges))


def _total(watts: Iterable[float | None]) -> float | None:
    found = list(watts)
    known = [one for one in found if one is not None]
    return sum(known) if len(known) == len(found) else None


def _share(found: PowerSum, share: PowerShare, chosen: dict[str, PowerCap]) -> None:
    """Lower the chosen caps as far as a sum needs it."""
    claims = [gpu for gpu in found.gpus if gpu.helped and gpu.held]
    others = _total(gpu.counted for gpu in found.gpus if not (gpu.helped and gpu.held))
    left = -math.inf if others is None or found.emergency else found.watts - others
    most = {gpu.uuid: chosen[gpu.uuid].watts for gpu in claims}
    if sum(most.values()) <= left:
        return
    now = {gpu.uuid: min(most[gpu.uuid], gpu.limit or 0.0) for gpu in claims}
    caps, pressed = _divide(claims, most, left, share), [gpu.uuid for gpu in claims if gpu.pressed]
    gained = max((caps[uuid] - now[uuid] for uuid in pressed if now[uuid] < most[uuid]), default=0.0)
    if sum(now.values()) <= left and gained < LEAST_RAISE:
        caps = now
    what = f"{found.name} may draw {found.watts:g} W"
    why = f"it drew more for {EMERGENCY:g} s" if found.emergency else f"by {share.lower()} shares"
    if others is None:
        why = "the draw of some of its GPUs is unknown"
    free = {gpu.uuid: gpu.low for gpu in found.gpus if gpu.helped and not gpu.held}
    for uuid, watts in {**caps, **free}.items():
        if watts < chosen[uuid].watts:
            chosen[uuid] = PowerCap(watts, f"{what}: {why}", found.budget)


def _divide(
    claims: Sequence[PoweredGpu], most: Mapping[str, float], left: float, share: PowerShare
) -> dict[str, float]:
    """The caps of GPUs: to each its minimum, then what it can use, then what is left, in the order of shares."""
    caps = {gpu.uuid: gpu.low for gpu in claims}
    wanted = {
        gpu.uuid: most[gpu.uuid]
        if gpu.watts is None or gpu.pressed
        else min(most[gpu.uuid], max(gpu.low, gpu.watts * SPARE + IDLE_SPARE))
        for gpu in claims
    }
    # The groups that are served one after the other; by speed only if that is known of all.
    ranks = {gpu.uuid: 0.0 for gpu in claims}
    if share is PowerShare.PRIORITY:
        ranks = {gpu.uuid: float(gpu.priority) for gpu in claims}
    elif share is PowerShare.SPEED:
        speeds = {gpu.uuid: gpu.activity / gpu.watts for gpu in claims if gpu.activity and gpu.watts}
        if len(speeds) == len(claims):  # differences below a fifth do not count
            ranks = {uuid: float(round(math.log(speed, 1.2))) for uuid, speed in speeds.items()}
    order = sorted(set(ranks.values()), reverse=True)
    groups = [[gpu for gpu in claims if ranks[gpu.uuid] == rank] for rank in order]
    for goal in (wanted, most):
        for group in groups:
            _level(caps, {gpu.uuid: goal[gpu.uuid] for gpu in group}, left - sum(caps.values()))
    low = {gpu.uuid: gpu.low for gpu in claims}
    return {
        uuid: watts if watts >= most[uuid] else max(low[uuid], math.floor(watts))
        for uuid, watts in caps.items()
    }


def _level(caps: dict[str, float], goals: Mapping[str, float], left: float) -> None:
    """Raise the lowest caps to a common level, none beyond its goal, by at most what is left."""
    rising = {uuid: caps[uuid] for uuid in goals if goals[uuid] > caps[uuid]}
    while left > 1.0 and rising:
        level = min(rising.values())
        lowest = [uuid for uuid in rising if rising[uuid] <= level]
        above = [watts for watts in rising.values() if watts > level]
        step = min(
            [left / len(lowest), *(goals[uuid] - level for uuid in lowest), *(one - level for one in above)]
        )
        for uuid in lowest:
            rising[uuid] = caps[uuid] = level + step
            if caps[uuid] >= goals[uuid]:
                del rising[uuid]
        left -= step * len(lowest)
