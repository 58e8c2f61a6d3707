"""A plan of moves is the cheapest there is, against every set of moves on small fleets, and it can be carried out as it says."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscale.allocator.domain.model import WHOLE, Ask, GangStrategy, Node, Pick, Policy, Reservation, Use
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.rebalance import MovePlan, NoMoves, rebalance
from tests.support.allocator_values import MIB, NOW, plain_node
from tests.support.placing import placer, reservation

CORES = 8_000
TOTAL = 80_000 * MIB


def again(one: Reservation) -> Ask:
    """What one that moves asks for elsewhere."""
    gpus = one.gpus
    return Ask(len(gpus), 0, 100.0, gpu_milli=gpus[0].milli, cpu_milli=one.cpu_milli, policy=Policy.PACK)


@dataclass
class Site:
    """A small fleet with reservations on it, and what those cost to move that may."""

    nodes: list[Node]
    use: Use
    placer: Placer
    prices: dict[str, float]
    ask: Ask

    def plan(self, most: int = 9) -> MovePlan | NoMoves:
        return rebalance(self.placer, self.ask, self.prices, again, NOW, most)


def site(random: Random, *, shares: bool) -> Site:
    """A fleet that is mostly full."""
    sizes = [random.randint(1, 4) for _ in range(random.randint(2, 3))]
    nodes = [
        replace(plain_node(f"n{rank}", size, rank=rank), cpu_milli=CORES, memory_total_bytes=TOTAL)
        for rank, size in enumerate(sizes)
    ]
    use, prices = Use(), dict[str, float]()
    of = placer(nodes, use)
    for number in range(random.randint(3, 7)):
        milli = random.choice([300, 500, 700]) if shares and random.random() < 0.7 else WHOLE
        count = 1 if milli < WHOLE else random.choice([1, 1, 2])
        cpu = random.choice([0, 0, 2_000, 3_000])
        wish = Ask(
            count, 0, 100.0, gpu_milli=milli, cpu_milli=cpu, nodes=frozenset({random.choice(nodes).id})
        )
        found = of.place(wish, NOW)
        if isinstance(found, Pick):
            use.hold(reservation(found.gpus, name=f"r{number}", ask=wish))
            if random.random() < 0.8:
                prices[f"r{number}"] = float(random.randint(0, 6))
    ask = Ask(random.choice([1, 2, 2, 3, 4]), 0, 100.0, cpu_milli=random.choice([0, 0, 4_000]))
    return Site(nodes, use, of, prices, ask)


class Oracle:
    """The price of the cheapest moves, by trying all: who leaves, which GPUs the ask gets, and where who leaves goes."""

    def __init__(self, of: Site) -> None:
        self._site = of
        self._room = {gpu.uuid: WHOLE - of.use.gpu(gpu.uuid).milli for node in of.nodes for gpu in node.gpus}
        self._cpu = {node.id: CORES - of.use.node(node.id).cpu_milli for node in of.nodes}

    def price(self) -> float | None:
        """None where no moves make room."""
        live = [self._site.use.live(one) for one in self._site.prices]
        sets = chain.from_iterable(combinations(live, size) for size in range(len(live) + 1))
        for leaving in sorted(sets, key=self._cost):
            if any(self._fits(leaving, node, gpus) for node, gpus in self._aims(leaving)):
                return self._cost(leaving)
        return None

    def _cost(self, leaving: Sequence[Reservation]) -> float:
        return sum(self._site.prices[one.id] for one in leaving)

    def _aims(self, leaving: Sequence[Reservation]) -> Iterator[tuple[Node, tuple[str, ...]]]:
        room = dict(self._room)
        for gpu in (gpu for one in leaving for gpu in one.gpus):
            room[gpu.uuid] += gpu.milli
        for node in self._site.nodes:
            whole = [gpu.uuid for gpu in node.gpus if room[gpu.uuid] == WHOLE]
            yield from ((node, gpus) for gpus in combinations(whole, self._site.ask.gpu_count))

    def _fits(self, leaving: Sequence[Reservation], node: Node, aim: tuple[str, ...]) -> bool:
        """Whether all that leave find a place off the aim, while they are held where they are still."""
        room = {uuid: 0 if uuid in aim else free for uuid, free in self._room.items()}
        cpu = dict(self._cpu)
        gone = sum(one.cpu_milli for one in leaving if one.gpus[0].node == node.id)

        def settle(left: Sequence[Reservation]) -> bool:
            if not left:
                return cpu[node.id] + gone >= self._site.ask.cpu_milli
            one, *others = left
            milli = one.gpus[0].milli
            for there in self._site.nodes:
                if cpu[there.id] < one.cpu_milli:
                    continue
                able = [gpu.uuid for gpu in there.gpus if room[gpu.uuid] >= milli]
                for chosen in combinations(able, len(one.gpus)):
                    cpu[there.id] -= one.cpu_milli
                    for uuid in chosen:
                        room[uuid] -= milli
                    found = settle(others)
                    cpu[there.id] += one.cpu_milli
                    for uuid in chosen:
                        room[uuid] += milli
                    if found:
                        return True
            return False

        return settle(leaving)


def carried_out(of: Site, plan: MovePlan) -> None:
    """Make the moves in their order, new place first, and grant the ask; AssertionError where that cannot be done."""
    for move in plan.moves:
        assert move.price == of.prices[move.reservation.id]
        of.use.hold(move.after)
        node = move.gpus[0].node
        assert of.use.node(node).cpu_milli <= CORES, "the new place is there while the old one is held"
        of.use.free(move.reservation.id)
    found = of.placer.place(of.ask, NOW)
    of.use.hold(reservation(found.gpus, name="the ask", ask=of.ask))


@given(seed=st.integers(0, 10**9), shares=st.booleans())
def test_the_cheapest_moves_are_found_and_can_be_made(seed: int, shares: bool) -> None:
    of = site(Random(seed), shares=shares)
    before = {one: of.use.live(one).gpus for one in of.prices}
    best, found = Oracle(of).price(), of.plan()
    assert {one: of.use.live(one).gpus for one in of.prices} == before
    assert best == (found.price if isinstance(found, MovePlan) else None)
    if isinstance(found, MovePlan):
        carried_out(of, found)


@given(seed=st.integers(0, 10**9), strategy=st.sampled_from(GangStrategy))
@settings(max_examples=settings().max_examples // 2)
def test_members_of_a_gang_get_room_by_moves_that_can_be_made(seed: int, strategy: GangStrategy) -> None:
    random = Random(seed)
    of = site(random, shares=True)
    of.ask = replace(of.ask, gpu_count=random.choice([1, 2]), member_count=2, gang_strategy=strategy)
    found = of.plan()
    if isinstance(found, MovePlan):
        carried_out(of, found)
    else:
        assert not isinstance(of.placer.place(of.ask, NOW), Pick)


@given(seed=st.integers(0, 10**9))
def test_no_more_moves_are_made_than_may_be(seed: int) -> None:
    of = site(Random(seed), shares=True)
    free = of.plan()
    for most in (2, 1, 0):
        found = of.plan(most)
        assert isinstance(found, NoMoves) or (isinstance(free, MovePlan) and free.price <= found.price)
        assert isinstance(found, NoMoves) or len(found.moves) <= most
