"""Priority between endpoints: which replicas of lower priority give up GPUs that those of a higher one need. Pure.

Only useful GPUs are taken: those that the allocator would grant but for their holders, all that a replica needs on one node.
The cheapest way is taken: the lowest priority, then the fewest replicas, then those that scale-in would stop first. Each
endpoint keeps its min.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gpuscale.autoscaler.domain.inputs import GiveWay
from gpuscale.autoscaler.domain.replicas import Replica
from gpuscale.autoscaler.domain.spec import EndpointSpec

HOLD, LONGEST_HOLD = 60.0, 600.0
"""Seconds for which an endpoint that gave way does not grow, and the maximum: they double when it soon gives way again."""
RECENT = 1800.0
"""Seconds for which an earlier concession counts."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A replica that may give way: of an endpoint that keeps at least `least`, by ascending `rank`."""

    endpoint: str
    replica: str
    priority: int
    rank: int
    least: int = 0


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """A node for an ask: its free GPUs, and the reservations on each GPU that is merely held."""

    free: int
    held: tuple[frozenset[str], ...] = ()


NOBODY: Mapping[str, Holder] = {}
_Way = tuple[tuple[float, int, int], int, frozenset[str]]
"""The cost of room for one replica, its node, and the reservations to end for it."""


def choose(
    gpus: int,
    rooms: Sequence[NodeRoom],
    coming: Collection[str],
    holders: Mapping[str, Holder],
    spare: Mapping[str, int],
    *,
    counted: int,
    more: int,
) -> list[frozenset[str]]:
    """The reservations to end for each of `more` replicas with `gpus` GPUs each, beyond what will be free anyway.

    `coming` are reservations that end anyway, `spare` how many replicas each endpoint may give up; `counted` replicas have a
    claim on what is already free, and take no more. Replicas that need nobody to give way, or cannot be placed, are omitted.
    """
    left, ending = dict(spare), frozenset(coming)
    free, held = [room.free for room in rooms], [list(room.held) for room in rooms]
    taken: list[frozenset[str]] = []
    for index in range(counted + more):
        able = holders if index >= counted else NOBODY
        nodes = range(len(rooms))
        ways = (_way(gpus, node, free[node], held[node], ending, able, left) for node in nodes)
        best = min(filter(None, ways), default=None, key=lambda way: way[:2])
        if best is None:
            continue
        _, node, victims = best
        ending |= victims
        for one in victims:
            left[holders[one].endpoint] -= 1
        freed = [gpu for gpu in held[node] if gpu <= ending][: max(0, gpus - free[node])]
        free[node] -= gpus - len(freed)
        for gpu in freed:
            held[node].remove(gpu)
        if victims:
            taken.append(victims)
    return taken


def _way(
    gpus: int,
    node: int,
    free: int,
    held: Sequence[frozenset[str]],
    ending: frozenset[str],
    holders: Mapping[str, Holder],
    left: Mapping[str, int],
) -> _Way | None:
    """The cheapest room for one replica on a node; None if there is none."""

    def enough(victims: frozenset[str]) -> bool:
        return free + sum(gpu <= ending | victims for gpu in held) >= gpus

    def affordable(victims: frozenset[str]) -> bool:
        given = Counter(holders[one].endpoint for one in victims)
        return all(count <= left[endpoint] for endpoint, count in given.items())

    def cost(victims: frozenset[str]) -> tuple[float, int, int]:
        priority = max((float(holders[one].priority) for one in victims), default=float("-inf"))
        return priority, len(victims), sum(holders[one].rank for one in victims)

    victims = frozenset[str]()
    while not enough(victims):
        others = (gpu - ending - victims for gpu in held)
        able = (one for one in others if one and one <= holders.keys() and affordable(victims | one))
        best = min(able, key=cost, default=None)
        if best is None:
            return None
        victims |= best
    for one in sorted(victims, key=lambda one: (cost(frozenset({one})), one), reverse=True):
        if enough(victims - {one}):  # another has more GPUs than needed
            victims -= {one}
    return cost(victims), node, victims


def secure(replicas: Sequence[Replica]) -> list[Replica]:
    """Those that count, and have GPUs that nobody will revoke."""
    return [one for one in replicas if one.granted and not one.leaving and one.lease is not None]


def yielding(way: GiveWay, spec: EndpointSpec, replicas: Sequence[Replica]) -> list[Replica]:
    """The replicas that stop now to give way: as many as possible above the endpoint's min."""
    having = secure(replicas) if spec.gives_way else []
    spare = max(0, len(having) - spec.min_replicas)
    return [one for one in having if one.id in way.replicas][:spare]


def hold(times: Sequence[float], now: float) -> float:
    """Seconds for which an endpoint that gave way at these times does not grow."""
    return min(LONGEST_HOLD, HOLD * 2.0 ** max(0, sum(at > now - RECENT for at in times) - 1))
