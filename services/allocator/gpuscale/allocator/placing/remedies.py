"""Remedies: what would make room for an ask, by name: leases that end, cordons, processes of no reservation. Pure."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from gpuscale.allocator.domain.cordons import Cordon, Cordons
from gpuscale.allocator.domain.feasibility import Obstacle
from gpuscale.allocator.domain.ledger import due_at
from gpuscale.allocator.domain.model import Ask, Reservation
from gpuscale.allocator.domain.placement import Pick
from gpuscale.allocator.placing.memory import outsiders
from gpuscale.allocator.placing.outlook import NodeOutlook, Outlook
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.wording import MOST_NAMES, lifting, mib, names, sentence


def remedies(
    outlook: Outlook, ask: Ask, *, placer: Placer, live: Sequence[Reservation], cordons: Cordons, now: float
) -> list[str]:
    """What would make room, in words, the surest first; none for an ask that can be granted."""
    if isinstance(outlook.answer, Pick):
        return []
    return [
        *_leases(ask, placer, live, now),
        *_cordons(outlook, cordons),
        *_quarantines(outlook.nodes[:1]),
        *_outsiders(outlook.nodes[:1], live),
        *outlook.remedies,
    ]


def _leases(ask: Ask, placer: Placer, live: Sequence[Reservation], now: float) -> Iterator[str]:
    """When there is room at the latest, if nobody renews: after the fewest leases, in the order in which they end."""
    ending = sorted(live, key=due_at)
    ids = [one.id for one in ending]

    def room_after(count: int) -> bool:
        return isinstance(placer.place_after(ask, now, ids[:count]), Pick)

    if not ids or not room_after(len(ids)):
        return
    count = 1 + bisect_left(range(1, len(ids)), x=True, key=room_after)
    last = ending[count - 1]
    left = f"{max(0.0, due_at(last) - now):.0f} s"
    if last.revoke_at is not None and last.revoke_at <= last.deadline:
        yield sentence(f"reservation {last.id} of {last.holder} is taken away in {left}: then there is room")
    else:
        yield sentence(
            f"reservation {last.id} of {last.holder} ends in {left} at the latest, unless it is renewed:"
            " then there is room"
        )


def _cordons(outlook: Outlook, cordons: Cordons) -> Iterator[str]:
    """The cordons in the way, of the nearest nodes first."""
    found: dict[str, Cordon] = {}
    for view in outlook.nodes:
        for gpu in view.gpus:
            cordon = cordons.covering(view.node.id, gpu.gpu.uuid, gpu.gpu.parent)
            if gpu.obstacle is Obstacle.CORDONED and cordon is not None:
                found.setdefault(cordon.spot.name, cordon)
    for name, cordon in list(found.items())[:MOST_NAMES]:
        why = f" ({cordon.reason})" if cordon.reason else ""
        yield f"{name} is cordoned by {cordon.author}{why}: gpuscalectl uncordon {name}"


def _quarantines(nearest: Sequence[NodeOutlook]) -> Iterator[str]:
    """The quarantined GPUs of the nearest node."""
    for view in nearest:
        found = [one.gpu for one in view.gpus if one.obstacle is Obstacle.QUARANTINED]
        for gpu in found[:MOST_NAMES]:
            yield f"{view.node.id}/{gpu.uuid} is quarantined ({gpu.quarantine}): {lifting(view.node.id, [gpu])}"


def _outsiders(nearest: Sequence[NodeOutlook], live: Sequence[Reservation]) -> Iterator[str]:
    """Processes of no reservation that hold the memory that is missing on the nearest node."""
    for view in nearest:
        for gpu in view.gpus:
            if gpu.obstacle not in {Obstacle.MEMORY_BELOW_MIN, Obstacle.UTILIZATION_TOO_HIGH}:
                continue
            on_it = [one for one in live if one.id in gpu.reservations]
            if strangers := outsiders(gpu.gpu, on_it):
                held = mib(sum(size for _, size in strangers))
                who = names([name for name, _ in strangers])
                yield sentence(f"processes of no reservation hold {held} of {gpu.gpu.uuid}: {who}")
