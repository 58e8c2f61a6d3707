"""Plans of moves: what a node has to give, who stays, and what is said where nothing helps."""

from dataclasses import replace

import pytest

from gpuscale.allocator.domain.model import WHOLE, Ask, GangStrategy, Reservation, Use
from gpuscale.allocator.placing import rebalance as module
from gpuscale.allocator.placing.rebalance import MovePlan, NoMoves, rebalance
from tests.support.allocator_values import NOW, ask, plain_node, reserved
from tests.support.placing import placer, reservation


def _again(one: Reservation) -> Ask:
    return Ask(len(one.gpus), 0, 100.0, gpu_milli=one.gpus[0].milli)


class _Fleet:
    """Nodes of four GPUs each, of which some are held: each reservation by its name, node, GPUs and price."""

    def __init__(
        self, nodes: int, *held: tuple[str, int, tuple[int, ...], float | None], milli: int = WHOLE
    ) -> None:
        self.use = Use()
        self.placer = placer([plain_node(f"n{rank}", 4, rank=rank) for rank in range(nodes)], self.use)
        self.prices = {name: price for name, _, _, price in held if price is not None}
        for name, node, gpus, _ in held:
            of = [
                reserved(f"n{node}-{index}", node=f"n{node}", index=index, milli=milli, memory=80 * milli)
                for index in gpus
            ]
            self.use.hold(reservation(of, name=name))

    def plan(self, wish: Ask, most: int = 9) -> MovePlan | NoMoves:
        return rebalance(self.placer, wish, self.prices, _again, NOW, most)


def _moves(found: MovePlan | NoMoves) -> dict[str, str]:
    return {move.reservation.id: move.gpus[0].node for move in found.moves}


def _fleet_in_twos() -> _Fleet:
    return _Fleet(2, ("a", 0, (0, 1), 50.0), ("b", 1, (0, 1), 20.0))


@pytest.mark.parametrize(
    ("price", "gpus", "why"),
    [
        (None, (0, 1), "no node that could serve it has enough that may move"),
        (50.0, (0, 1, 2), "what would have to leave has no free place elsewhere"),
    ],
)
def test_nobody_moves_who_may_not_or_without_a_place_elsewhere(
    price: float | None, gpus: tuple[int, ...], why: str
) -> None:
    of = _Fleet(2, ("a", 0, (0, 1), price), ("b", 1, gpus, price))
    assert of.plan(ask(4)) == NoMoves(why)


def test_a_gang_of_eight_gets_two_nodes_of_what_is_free_in_ones_and_twos() -> None:
    held = [(f"r{node}-{index}", node, (index,), 10.0) for node in range(4) for index in (0, 1)]
    wish = replace(ask(4), member_count=2, gang_strategy=GangStrategy.STRICT_SPREAD)
    of = _Fleet(4, *held)
    found = of.plan(wish)
    assert (len(found.moves), found.price, len(set(found.pick.nodes))) == (4, 40.0, 2)
    refused = of.plan(wish, most=3)
    assert refused.message.startswith("there is no room for member 2 of 2: ")


def test_a_search_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 2)
    assert _fleet_in_twos().plan(ask(4)) == NoMoves("none was found in 2 tries")
