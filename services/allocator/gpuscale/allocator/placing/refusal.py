"""Refusal: why no node serves an ask, which came nearest, and what would help. Pure.

`Survey` evaluates all nodes for the ask; `refuse` reports what it found.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from operator import attrgetter

import numpy as np

from gpuscale.allocator.domain.model import WHOLE, Ask, GangStrategy, Gpu, Node, NodeState, Use
from gpuscale.allocator.placing.columns import NO_GPU, Bools, Columns, Ints, listed, outsiders
from gpuscale.allocator.placing.constraints import (
    ABSENT,
    ADMITS_ALL_PERCENT,
    CODES,
    LASTING,
    ORDER,
    Obstacle,
    selected,
    suffice,
)
from gpuscale.allocator.placing.index import Shape
from gpuscale.common.names import gpu_name, node_name
from gpuscale.common.sizes import counted

MIB = 1024 * 1024
MOST_NAMES = 5
"""Most names in one message."""


_TEXTS: Mapping[Obstacle, tuple[str, str]] = {
    Obstacle.HELD: ("held by other reservations", "wait until a reservation ends"),
    Obstacle.MEMORY_BELOW_MIN: ("with too little free memory", "ask for less memory"),
    Obstacle.UTILIZATION_TOO_HIGH: ("too busy", "allow a higher utilization"),
    Obstacle.UTILIZATION_UNKNOWN: ("with a utilization that is not reported", "allow unknown utilization"),
    Obstacle.NODE_NOT_ONLINE: ("behind an agent that is not connected", "start the agent"),
    Obstacle.STALE: ("with readings that are too old", "see why the node stopped reporting"),
    Obstacle.CPU_BELOW_MIN: ("on nodes with too little CPU left", "ask for less CPU"),
    Obstacle.HOST_MEMORY_BELOW_MIN: ("on nodes with too little main memory left", "ask for less main memory"),
    Obstacle.POWER_BUDGET: ("beyond a power budget", "wait until others draw less, or raise the budget"),
    Obstacle.POWER_LIMIT: (
        "on nodes that cannot keep that power limit",
        "install gpuscale-power there, or ask for another limit",
    ),
    Obstacle.QUARANTINED: ("quarantined", "lift the quarantine"),
    Obstacle.CORDONED: ("cordoned", "take back the cordon"),
    Obstacle.NOT_APART: ("beside a reservation to stay apart from", "allow it beside the others"),
    Obstacle.MODEL_DIFFERS: ("of another model", "admit other models"),
    Obstacle.LABELS_DIFFER: ("on nodes without the labels", "ask for other labels"),
    Obstacle.NODE_NOT_SELECTED: ("on nodes that were not chosen", "choose other nodes"),
    Obstacle.GPU_NOT_SELECTED: ("not chosen", "choose other GPUs"),
    Obstacle.MIG_PROFILE_DIFFERS: ("not of the kind asked for (whole, or the MIG profile)", ""),
    Obstacle.GPU_NOT_OK: ("not answering", ""),
    Obstacle.MEMORY_UNKNOWN: ("with memory that is not reported", ""),
}
WORDS = {obstacle: words for obstacle, (words, _) in _TEXTS.items()}
"""Descriptions of GPUs that an obstacle rules out."""
HELP = {obstacle: cure for obstacle, (_, cure) in _TEXTS.items() if cure}
"""Remedies for obstacles."""
FOR_EVER = LASTING - {Obstacle.MIG_PROFILE_DIFFERS}
"""Choices of the caller: suggested only when asked what would help."""
FIRST_HELP = FOR_EVER | {Obstacle.CPU_BELOW_MIN, Obstacle.HOST_MEMORY_BELOW_MIN, Obstacle.MEMORY_BELOW_MIN}
"""What an ask that can never be granted has to change: the rest of it ends by itself, or is no help before."""


_TOLD: Mapping[Obstacle, Callable[[Gpu], str]] = {
    Obstacle.GPU_NOT_OK: attrgetter("trouble"),
    Obstacle.QUARANTINED: attrgetter("quarantine"),
    Obstacle.MODEL_DIFFERS: attrgetter("model"),
}
"""The reading of a GPU that an obstacle is about."""


def names(texts: Sequence[str]) -> str:
    """Join the first few texts for a message."""
    more = len(texts) - MOST_NAMES
    return ", ".join(texts[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def sentence(text: str) -> str:
    """Make a text a sentence."""
    return f"{text[0].upper()}{text[1:]}."


def asked(ask: Ask) -> str:
    """What an ask asks for."""
    what = counted(ask.gpu_count, "GPU")
    if ask.mig_profile:
        what = f"{counted(ask.gpu_count, 'MIG instance')} {ask.mig_profile}"
    elif ask.gpu_memory_bytes is not None:
        what = f"{mib(ask.gpu_memory_bytes)} of {what}"
    elif not ask.exclusive:
        what = f"{ask.gpu_milli / WHOLE:g} of {what}"
    if not ask.gpu_count:
        what = "room without a GPU"
    elif ask.member_count > 1:
        what = f"{ask.member_count} x {what} ({ask.gang_strategy.value.replace('_', ' ')})"
    elif ask.gpu_count > 1:
        what = f"{what} of one node"
    each = "each " if ask.gpu_count > 1 or ask.member_count > 1 else ""
    labels = names([f"{key}={value}" for key, value in ask.node_labels])
    wishes = {
        f"{each}with {mib(ask.min_memory_bytes)} free": ask.min_memory_bytes,
        f"{each}used less than {ask.max_utilization_percent:g} %": (
            ask.max_utilization_percent < ADMITS_ALL_PERCENT
        ),
        f"of model {' or '.join(ask.models)}": ask.models,
        f"beside {counted(ask.cpu_milli / WHOLE, 'core')}": ask.cpu_milli,
        f"beside {mib(ask.host_memory_bytes)} of main memory": ask.host_memory_bytes,
        f"on nodes with {labels}": labels,
        f"on {names(sorted(ask.nodes))}": ask.nodes,
    }
    return ", ".join([what, *(text for text, wanted in wishes.items() if wanted)])


def mib(size: int) -> str:
    """A memory size."""
    return f"{size // MIB} MiB"


def extent(reason: Obstacle, found: Sequence[Gpu]) -> str:
    """How far the GPUs that an obstacle rules out are from what was asked for."""
    if reason is Obstacle.MEMORY_BELOW_MIN:
        return f" ({mib(max(gpu.memory_free_bytes or 0 for gpu in found))} at most)"
    if reason is Obstacle.UTILIZATION_TOO_HIGH:
        return f" ({min(gpu.utilization_percent or 0 for gpu in found):g} % at least)"
    told = _TOLD.get(reason)
    return "" if told is None else f" ({names(sorted({told(gpu) for gpu in found}))})"


def lifting(node: str, quarantined: Sequence[Gpu]) -> str:
    """The command that lifts quarantines of GPUs of a node."""
    spots = [f"{node}/{gpu.parent or gpu.uuid}" for gpu in quarantined]
    return f"gpuscalectl clear quarantine {' '.join(sorted(set(spots))[:MOST_NAMES])}"


@dataclass(frozen=True, slots=True)
class NodeSurvey:
    """One node for the ask: how many of its GPUs fit, and the obstacles of the others.

    `outsiders` names processes of no live reservation on GPUs with too little memory, and what they use.
    """

    node: Node
    fitting: int
    in_the_way: tuple[tuple[Obstacle, Gpu], ...]
    outsiders: tuple[tuple[str, int], ...] = ()


class Survey:
    """All nodes for one ask at `now`, by an up-to-date shape."""

    def __init__(self, columns: Columns, shape: Shape, use: Use, now: float) -> None:
        size = len(columns)
        self.ask: Ask = shape.ask
        self._columns = columns
        self._shape = shape
        self._use = use
        self._codes = shape.gpu_codes[:size]
        self._rows = np.arange(size)
        self._now = now
        self._gpus = columns.gpu_count[:size]
        self._fitting = (self._codes == 0).sum(1)
        self._candidates: Bools = np.ones(size, np.bool_)
        if self.ask.nodes or self.ask.excluded_nodes:
            self._candidates = selected(self.ask, columns)

    @property
    def counts(self) -> Counter[Obstacle]:
        """How many GPUs of all nodes each obstacle rules out; for several on one GPU, the first counts."""
        found = listed(np.bincount(self._codes.ravel() - ABSENT, minlength=len(ORDER) + 2))
        return Counter({one: count for one, count in zip(ORDER, found[2:], strict=True) if count})

    def _those(self, mask: Bools) -> list[Node]:
        return [self._columns.nodes[row] for row in listed(np.flatnonzero(self._candidates & mask))]

    @property
    def candidates(self) -> list[Node]:
        """The nodes that the ask admits by name."""
        return self._those(self._candidates)

    @property
    def unreported(self) -> list[Node]:
        """The candidates that have not reported yet."""
        return self._those(~self._columns.reported[: len(self._columns)])

    @property
    def unread(self) -> list[Node]:
        """The candidates that report, but cannot read their GPUs, and could serve with the right ones."""
        if not self.ask.gpu_count:
            return []
        size = len(self._columns)
        other = self._shape.node_codes[:size] == CODES[Obstacle.LABELS_DIFFER]
        return self._those(self._columns.reported[:size] & self._columns.unread[:size] & ~other)

    @property
    def unreachable(self) -> bool:
        """Whether nothing current is known of any candidate: each is offline, or its report is too old."""
        columns, size = self._columns, len(self._columns)
        fresh = (columns.fresh_until[:size] >= self._now) & (columns.kind[:size] != NO_GPU)
        reachable = (columns.state[:size] == 0) & (fresh.any(1) | (self._gpus == 0))
        return not (self._candidates & reachable).any()

    def node(self, row: int) -> NodeSurvey:
        """The node of a row."""
        gpus, codes = self._columns.gpus[row], listed(self._codes[row])
        in_the_way = tuple((ORDER[code - 1], gpu) for code, gpu in zip(codes, gpus, strict=False) if code > 0)
        strangers: list[tuple[str, int]] = []
        for obstacle, gpu in in_the_way:
            if obstacle is Obstacle.MEMORY_BELOW_MIN:
                strangers += outsiders(gpu, map(self._use.live, self._use.gpu(gpu.uuid).reservations))
        strangers.sort(key=lambda one: (-one[1], one[0]))
        return NodeSurvey(self._columns.nodes[row], int(self._fitting[row]), in_the_way, tuple(strangers))

    def closest(self) -> NodeSurvey | None:
        """The candidate with the most fitting GPUs, then the most GPUs, then first seen; None if there is none."""
        if not self._candidates.any():
            return None
        closeness = self._fitting * (self._columns.width + 1) + self._gpus
        return self.node(int(np.argmax(np.where(self._candidates, closeness, -1))))

    def nearest(self, most: int) -> list[int]:
        """The nearest rows: candidates first, then by fitting GPUs, then GPUs, then first seen."""
        order = np.lexsort((self._rows, -self._gpus, -self._fitting, ~self._candidates))
        return listed(order[:most])

    def room_ever(self) -> Ints:
        """How many members each candidate would take if all of it were free."""
        return np.where(self._candidates, self._shape.room_ever(), 0)

    def unsatisfiable(self) -> str:
        """Why no node would serve the ask even if all of it were free."""
        ask, columns, constraints = self.ask, self._columns, self._shape.constraints
        said = f"{asked(ask)} can never be granted:"
        most = max(self.candidates, key=lambda node: len(node.gpus), default=None)
        if most is None or (not most.gpus and ask.gpu_count):
            return (
                f"{said} no node here has a GPU. Start an agent on a host with GPUs, or choose other nodes."
            )
        if len(most.gpus) < ask.gpu_count:
            return f"{said} the largest node, {most.id}, has {counted(len(most.gpus), 'GPU')}. Ask for fewer."
        rows = np.flatnonzero(self._candidates)
        if constraints.suited(rows).sum(1).max() < ask.gpu_count:
            lasting = [(one, count) for one, count in self.counts.most_common() if one in LASTING]
            excluded = ", ".join(f"{count} {WORDS[one]}" for one, count in lasting)
            return f"{said} no node has so many suitable GPUs: {excluded}. Ask for others or fewer."
        found = (columns.cpu[rows], columns.memory[rows], columns.total[rows])
        cpu, memory, gpu_memory = (max(0, int(one.max(initial=0))) for one in found)
        enough = constraints.ever(rows).sum(1)
        if enough.max() < ask.gpu_count:
            return (
                f"{said} {columns.nodes[rows[enough.argmax()]].id} has {enough.max()} of that memory size,"
                f" and the largest GPU known has {mib(gpu_memory)}. Ask for less memory or fewer GPUs."
            )
        room = self.room_ever()
        if ask.member_count > 1 and room.any():
            each = 1 if ask.gang_strategy is GangStrategy.STRICT_SPREAD else ask.member_count
            taken = {GangStrategy.STRICT_PACK: f"the roomiest node takes {int(room.max())}"}.get(
                ask.gang_strategy, f"all nodes together take {int(np.minimum(room, each).sum())}"
            )
            return f"{said} {taken} of its {ask.member_count} members. Ask for fewer."
        most_of_all = f"{counted(cpu / WHOLE, 'core')} and {mib(memory)} of main memory are the most"
        return f"{said} no such node has so much: {most_of_all}. Ask for less."


class RefusalKind(StrEnum):
    """The kind of refusal; the value is the error's reason."""

    NOT_FOUND = "NOT_FOUND"
    NODE_NOT_ONLINE = "NODE_NOT_ONLINE"
    UNSATISFIABLE = "UNSATISFIABLE"
    NO_CAPACITY = "NO_CAPACITY"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an ask was not served.

    `obstacles` counts the GPUs of all nodes by their obstacle; `metadata` says the same, with the nearest node, for programs.
    """

    kind: RefusalKind
    message: str
    obstacles: Mapping[Obstacle, int]
    metadata: Mapping[str, str]


def unknown_names(known: Mapping[str, Node], nodes: Sequence[Node], ask: Ask) -> Refusal | None:
    """Refuse an ask that names nodes the fleet has never seen, or GPUs that its nodes do not have; else None.

    `nodes` are all nodes in order. A node with unknown GPUs may have any.
    """
    if unknown := sorted(ask.nodes - known.keys()):
        there = names([node.id for node in nodes]) or "no node yet"
        message = f"no such node: {names(unknown)}. The fleet knows {there}."
        return Refusal(RefusalKind.NOT_FOUND, message, {}, {"name": _listed(map(node_name, unknown))})
    chosen = [known[one] for one in ask.nodes] or nodes
    if not ask.gpus or not all(node.names_gpus for node in chosen):
        return None
    if unknown := sorted(ask.gpus - {gpu.uuid.lower() for node in chosen for gpu in node.gpus}):
        where = chosen[0].id if len(chosen) == 1 else "-"  # as AIP-159 writes any of several
        message = f"no such GPU: {names(unknown)} on {names(sorted(node.id for node in chosen))}."
        found = _listed(gpu_name(where, one) for one in unknown)
        return Refusal(RefusalKind.NOT_FOUND, message, {}, {"name": found})
    return None


def _listed(found: Iterable[str]) -> str:
    """Resource names as one metadata value, which must be short: the first few of them."""
    return ",".join(islice(found, MOST_NAMES))


def refuse(survey: Survey, placed: int) -> Refusal:
    """Say why no node serves the ask, of which `placed` members found room. Call it only if it was not served.

    Chosen nodes that do not report are named as such. An ask that no node could serve with all of its GPUs free is
    UNSATISFIABLE, unless the GPUs of some node are not known yet or cannot be read; any other is NO_CAPACITY now.
    """
    ask, closest = survey.ask, survey.closest()
    unknown: list[str] = []  # of the nodes that may have GPUs for the ask
    if silent := survey.unreported:
        unknown.append(f"not heard of since the allocator started: {names([node.id for node in silent])}")
    if unread := [f"{node.id} ({node.gpu_problem})" for node in survey.unread]:
        unknown.append(f"GPUs cannot be read on {names(unread)}")
    if ask.nodes and survey.unreachable:
        offline = [node.id for node in survey.candidates if node.state is NodeState.OFFLINE]
        stale = [node.id for node in survey.candidates if node.state is not NodeState.OFFLINE]
        said = [f"the agent of {names(offline)} is not connected"] if offline else []
        said += [f"no current report has come from {names(stale)}"] if stale else []
        kind = RefusalKind.NODE_NOT_ONLINE
        message = f"nothing can be reserved on the chosen nodes: {'; '.join(said)}. Choose other nodes or start the agent."
    elif closest is None or (not unknown and not suffice(ask, survey.room_ever())):
        kind, message = RefusalKind.UNSATISFIABLE, survey.unsatisfiable()
    else:
        kind, message = RefusalKind.NO_CAPACITY, _no_capacity(closest, unknown, ask, placed)
    obstacles = survey.counts
    metadata = {"gpu_count": str(ask.gpu_count), "min_memory_bytes": str(ask.min_memory_bytes)}
    if ask.member_count > 1:
        metadata |= {"member_count": str(ask.member_count), "placed_member_count": str(placed)}
    if closest is not None:
        metadata |= {"nearest_node": closest.node.id, "nearest_gpu_count": str(closest.fitting)}
    metadata |= {reason.value.lower(): str(count) for reason, count in sorted(obstacles.items())}
    return Refusal(kind, message, obstacles, metadata)


def unpartitioned(ask: Ask) -> str:
    """Why an ask for MIG instances waits that could not be served with all GPUs free."""
    return (
        f"no room now for {asked(ask)}: too few such instances, even if all were free."
        " Idle GPUs may be partitioned: gpuscalectl plan rebalance tells"
    )


Reconsider = Callable[[Ask, Refusal], Awaitable[Refusal]]
"""Looks again at a refusal, which may not be for ever."""
Kept = Mapping[str, tuple[Obstacle, str]]
"""The nodes that power rules out, with the obstacle and its description."""


def refuse_for_power(ask: Ask, kept: Kept, found: Refusal, nodes: Mapping[str, Node]) -> Refusal:
    """Say why an ask is refused that these nodes would serve but for power; `found` counts obstacles of the others."""
    counts = Counter[Obstacle]()
    for node, (obstacle, _) in kept.items():
        counts[obstacle] += len(nodes[node].gpus) if node in nodes else 0
    lasting = found.kind is RefusalKind.UNSATISFIABLE and set(counts) == {Obstacle.POWER_LIMIT}
    why = names(list(dict.fromkeys(text for _, text in kept.values())))
    message = f"no room now for {asked(ask)}: {why}. {sentence(', or '.join(HELP[one] for one in counts))}"
    kind = RefusalKind.UNSATISFIABLE if lasting else RefusalKind.NO_CAPACITY
    obstacles = {**found.obstacles, **counts}
    obstacles[Obstacle.NODE_NOT_SELECTED] = obstacles.get(Obstacle.NODE_NOT_SELECTED, 0) - counts.total()
    obstacles = {one: count for one, count in obstacles.items() if count > 0}
    metadata = {one: text for one, text in found.metadata.items() if one != "node_not_selected"}
    metadata |= {one.value.lower(): str(count) for one, count in obstacles.items()}
    return Refusal(kind, message, obstacles, metadata)


def _no_capacity(closest: NodeSurvey, unknown: Sequence[str], ask: Ask, placed: int) -> str:
    """Some node could serve the ask, but not now."""
    said: list[str] = []
    if ask.member_count > 1:
        said.append(f"{placed} of {ask.member_count} members {'finds' if placed == 1 else 'find'} room")
    counts = Counter(found for found, _ in closest.in_the_way)
    if closest.node.gpus:
        others: list[str] = []
        for reason, count in counts.most_common():
            found = [gpu for obstacle, gpu in closest.in_the_way if obstacle is reason]
            others.append(f"{count} {WORDS[reason]}{extent(reason, found)}")
        rest = f" (the rest: {', '.join(others)})" if others else ""
        said.append(f"the nearest is {closest.node.id} with {closest.fitting} of {ask.gpu_count}{rest}")
    if closest.outsiders:
        used = [f"{who} uses {mib(size)}" for who, size in closest.outsiders]
        said.append(f"processes of no reservation there: {names(used)}")
    said += unknown
    advice = [words for reason, words in HELP.items() if counts[reason] and reason not in FOR_EVER]
    quarantined = [gpu for obstacle, gpu in closest.in_the_way if obstacle is Obstacle.QUARANTINED]
    if quarantined:
        lift = HELP[Obstacle.QUARANTINED]
        advice[advice.index(lift)] = f"{lift} ({lifting(closest.node.id, quarantined)})"
    if 0 < closest.fitting < ask.gpu_count:
        advice.append(f"ask for {counted(closest.fitting, 'GPU')}")
    if closest.node.gpu_problem and not closest.node.gpus:
        advice.append(f"wait until {closest.node.id} can read its GPUs")
    helps = sentence(", or ".join(advice) or "wait until more nodes report")
    return f"no room now for {asked(ask)}: {'; '.join(said) or 'no node is free'}. {helps}"
