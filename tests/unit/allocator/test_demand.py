"""What is learnt from asks: CPU per GPU, how scarce models are, and what is typical."""

from dataclasses import replace

import pytest

from gpuscale.allocator.domain.model import Ask
from gpuscale.allocator.placing.policies import CPU_PRIOR, FIRST_DRAWN, HALF_LIFE, PRICE_PRIOR, Demand
from tests.support.allocator_values import ask

SUPPLY = {1: 10, 2: 30}


def wish(**fields: object) -> Ask:
    return replace(ask(), **fields)


def test_the_cluster_is_a_start_that_asks_soon_outvote() -> None:
    demand = Demand()
    demand.expect(14.0)
    demand.observe(wish(cpu_milli=6000), (), SUPPLY)
    expected = (6000 + 14.0 * CPU_PRIOR) / (1000 + CPU_PRIOR)
    assert demand.tariff.cpu_per_gpu == pytest.approx(expected)
    for _ in range(1000):
        demand.observe(wish(cpu_milli=6000), (), SUPPLY)
    assert demand.tariff.cpu_per_gpu == pytest.approx(6.0, rel=0.02)


def test_asks_that_say_nothing_of_cpu_teach_nothing_of_it() -> None:
    demand = Demand()
    demand.observe(wish(cpu_milli=6000), (), SUPPLY)
    for _ in range(100):
        demand.observe(wish(), (), SUPPLY)
    assert demand.tariff.cpu_per_gpu == pytest.approx(6.0)


def test_a_price_is_the_demand_that_only_a_model_serves_over_its_part_of_the_supply() -> None:
    """Half of all GPUs asked for must be of model 1, which is a quarter of the supply: price 2, but for the prior."""
    demand = Demand()
    for _ in range(500):
        demand.observe(wish(models=("a",)), (1,), SUPPLY)
        demand.observe(wish(), (), SUPPLY)
    seen = 1_000_000 * (1 - 0.5 ** (1000 / HALF_LIFE)) / (1000 / HALF_LIFE * 0.6931)
    assert demand.tariff.prices[1] == pytest.approx(2.0 * seen / (seen + PRICE_PRIOR), rel=0.02)
    assert demand.tariff.prices.get(2, 0.0) == 0.0


def test_an_ask_that_names_several_models_weighs_on_them_by_their_supply() -> None:
    demand = Demand()
    for _ in range(500):
        demand.observe(wish(models=("a", "b")), (1, 2), SUPPLY)
    prices = demand.tariff.prices
    assert prices[1] == pytest.approx(prices[2])


def test_what_is_old_counts_less() -> None:
    demand = Demand()
    for cpu in (2000, 8000):
        for _ in range(HALF_LIFE):
            demand.observe(wish(cpu_milli=cpu), (), SUPPLY)
    assert demand.tariff.cpu_per_gpu == pytest.approx((2.0 * 0.5 + 8.0) / 1.5, rel=0.02)


def test_the_tariff_stays_the_same_object_while_it_hardly_moves() -> None:
    """All that was reckoned with it stays valid."""
    demand = Demand()
    for _ in range(2000):
        demand.observe(wish(cpu_milli=6000), (), SUPPLY)
    before = demand.tariff
    demand.observe(wish(cpu_milli=7000), (), SUPPLY)
    assert demand.tariff is before


def test_typical_asks_are_drawn_up_now_and_then_and_never_where_they_were_given() -> None:
    demand, given = Demand(), Demand({(0, 1, 1000, ()): 1})
    for _ in range(min(FIRST_DRAWN)):
        assert demand.classes == {}
        demand.observe(wish(), (), SUPPLY)
        given.observe(wish(gpu_count=2), (), SUPPLY)
    assert demand.classes == {(0, 1, 1000, ()): min(FIRST_DRAWN)}
    assert given.classes == {(0, 1, 1000, ()): 1}
