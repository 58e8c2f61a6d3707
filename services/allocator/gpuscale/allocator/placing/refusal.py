"""Refusal: why no node serves an ask, which node came nearest, and what would help. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from gpuscale.allocator.domain.feasibility import Obstacle
from gpuscale.allocator.domain.model import WHOLE, Ask, GangStrategy, Node, NodeState
from gpuscale.allocator.placing import gangs
from gpuscale.allocator.placing.columns import Ints
from gpuscale.allocator.placing.survey import NodeSurvey, Survey
from gpuscale.allocator.placing.wording import (
    FOR_EVER,
    HELP,
    WORDS,
    asked,
    extent,
    gpus,
    lifting,
    mib,
    names,
    sentence,
)


class RefusalKind(StrEnum):
    """What sort of no it is; the value is the reason code of the error."""

    NODE_NOT_FOUND = "NODE_NOT_FOUND"
    GPU_NOT_FOUND = "GPU_NOT_FOUND"
    NODE_NOT_ONLINE = "NODE_NOT_ONLINE"
    UNSATISFIABLE = "UNSATISFIABLE"
    NO_CAPACITY = "NO_CAPACITY"


NOT_FOUND = frozenset({RefusalKind.NODE_NOT_FOUND, RefusalKind.GPU_NOT_FOUND})
"""What is NOT_FOUND to the caller."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an ask was not served.

    `obstacles` counts the GPUs of all nodes by what stood in the way; `metadata` says the same, with the nearest
    node, to programs.
    """

    kind: RefusalKind
    message: str
    obstacles: Mapping[Obstacle, int]
    metadata: Mapping[str, str]


def unknown_names(known: Mapping[str, Node], nodes: Sequence[Node], ask: Ask) -> Refusal | None:
    """Refuse an ask that names nodes the fleet has never seen, or GPUs that its nodes do not have; None when it does not.

    `nodes` are all nodes, in their order. Of a node that does not tell its GPUs nothing is said.
    """
    unknown = sorted(one for one in ask.nodes if one not in known)
    if not unknown:
        chosen = [known[one] for one in ask.nodes] if ask.nodes else nodes
        return _unknown_gpus(chosen, ask) if ask.gpus else None
    message = (
        f"no such node: {names(unknown)}."
        f" The fleet knows {names([node.id for node in nodes]) or 'no node yet'}."
    )
    return Refusal(RefusalKind.NODE_NOT_FOUND, message, {}, {"nodes": names(unknown)})


def _unknown_gpus(chosen: Sequence[Node], ask: Ask) -> Refusal | None:
    if any(node.gpu_problem or not node.reported for node in chosen):
        return None
    unknown = sorted(ask.gpus - {gpu.uuid.lower() for node in chosen for gpu in node.gpus})
    if not unknown:
        return None
    message = f"no such GPU: {names(unknown)} on {names(sorted(node.id for node in chosen))}."
    return Refusal(RefusalKind.GPU_NOT_FOUND, message, {}, {"gpus": names(unknown)})


def refuse(survey: Survey, placed: int) -> Refusal:
    """Say why none of the nodes serves the ask, of which `placed` members found room. Only when it was not served.

    Nodes that were chosen by name and do not report are said as such. An ask that no node could serve with all of
    its GPUs free is UNSATISFIABLE, unless some node has not said yet which it has, or cannot read them; any other finds
    NO_CAPACITY now.
    """
    ask, closest, unknown = survey.ask, survey.closest(), _unknown(survey)
    if ask.nodes and survey.unreachable:
        kind, message = RefusalKind.NODE_NOT_ONLINE, _not_online(survey.candidates)
    elif closest is None or (not unknown and not gangs.suffice(ask, survey.room_ever())):
        kind, message = RefusalKind.UNSATISFIABLE, _unsatisfiable(survey)
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


def _not_online(candidates: Sequence[Node]) -> str:
    offline = [node.id for node in candidates if node.state is NodeState.OFFLINE]
    stale = [node.id for node in candidates if node.state is not NodeState.OFFLINE]
    said = [f"the agent of {names(offline)} is not connected"] if offline else []
    said += [f"the last report of {names(stale)} is too old"] if stale else []
    return f"nothing can be reserved on the chosen nodes: {'; '.join(said)}. Choose other nodes or start the agent."


def _unsatisfiable(survey: Survey) -> str:
    """No node would serve the ask even if all of it were free."""
    ask = survey.ask
    said = f"{asked(ask)}: this can never be had, because"
    most, (cpu, memory, gpu_memory) = survey.widest(), survey.largest()
    if most is None or (not most.gpus and ask.gpu_count):
        return f"{said} no node here has a GPU. Start an agent on a host with GPUs, or choose other nodes."
    if len(most.gpus) < ask.gpu_count:
        return f"{said} the largest node, {most.id}, has {gpus(len(most.gpus))}. Ask for fewer."
    suited, enough = survey.suited(), survey.large_enough()
    if int(suited.max()) < ask.gpu_count:
        return f"{said} no node has so many suitable GPUs: {_excluded(survey)}. Ask for others or fewer."
    if int(enough.max()) < ask.gpu_count:
        return (
            f"{said} {survey.name(int(np.argmax(enough)))} has {int(enough.max())} of that memory size,"
            f" and the largest GPU known has {mib(gpu_memory)}. Ask for less memory or fewer GPUs."
        )
    room = survey.room_ever()
    if ask.member_count > 1 and room.any():
        return f"{said} {_most_members(ask, room)} of its {ask.member_count} members so. Ask for fewer."
    most_of_all = f"{cpu / WHOLE:g} cores and {mib(memory)} of main memory are the most"
    return f"{said} no such node has so much: {most_of_all}. Ask for less."


def _most_members(ask: Ask, room: Ints) -> str:
    """How many members find room at most where nodes take so many each."""
    if ask.gang_strategy is GangStrategy.STRICT_PACK:
        return f"the roomiest node takes {int(room.max())}"
    each = 1 if ask.gang_strategy is GangStrategy.STRICT_SPREAD else ask.member_count
    return f"all nodes together take {int(np.minimum(room, each).sum())}"


def _excluded(survey: Survey) -> str:
    counts = survey.lasting()
    return ", ".join(f"{count} {WORDS[reason]}" for reason, count in counts.most_common())


def _unknown(survey: Survey) -> list[str]:
    """What is not known of the nodes that may have GPUs for the ask, each with its reason."""
    unreported, unread = survey.unreported, survey.unread
    said = [f"not heard of since the allocator started: {names(unreported)}"] if unreported else []
    problems = [f"{node.id} ({node.gpu_problem})" for node in unread]
    return said + ([f"GPUs cannot be read on {names(problems)}"] if problems else [])


def _no_capacity(closest: NodeSurvey, unknown: Sequence[str], ask: Ask, placed: int) -> str:
    """Some node could serve the ask, but not now."""
    said: list[str] = []
    if ask.member_count > 1:
        said.append(f"{placed} of {ask.member_count} members find room")
    if closest.node.gpus:
        rest = ", ".join(_describe(reason, closest) for reason, _ in closest.counts.most_common())
        rest = f" (the rest: {rest})" if rest else ""
        said.append(f"the nearest is {closest.node.id} with {closest.fitting} of {ask.gpu_count}{rest}")
    if closest.outsiders:
        used = [f"{who} uses {mib(size)}" for who, size in closest.outsiders]
        said.append(f"processes of no reservation there: {names(used)}")
    said += unknown
    return f"no room now for {asked(ask)}: {'; '.join(said) or 'no node is free'}. {_advice(closest, ask)}"


def _describe(reason: Obstacle, closest: NodeSurvey) -> str:
    found = [gpu for obstacle, gpu in closest.in_the_way if obstacle is reason]
    return f"{len(found)} {WORDS[reason]}{extent(reason, found)}"


def _advice(closest: NodeSurvey, ask: Ask) -> str:
    counts = closest.counts
    advice = [words for reason, words in HELP.items() if counts[reason] and reason not in FOR_EVER]
    quarantined = [gpu for obstacle, gpu in closest.in_the_way if obstacle is Obstacle.QUARANTINED]
    if quarantined:
        lift = HELP[Obstacle.QUARANTINED]
        advice[advice.index(lift)] = f"{lift} ({lifting(closest.node.id, quarantined)})"
    if 0 < closest.fitting < ask.gpu_count:
        advice.append(f"ask for {gpus(closest.fitting)}")
    if closest.node.gpu_problem and not closest.node.gpus:
        advice.append(f"wait until {closest.node.id} can read its GPUs")
    return sentence(", or ".join(advice) or "wait until more nodes report")
