"""The values of the policies, and what is learnt from asks: CPU per GPU, how scarce builds are, and what is typical."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from gpuscale.allocator.domain.model import Ask, Node, Pick, Policy, Use
from gpuscale.allocator.placing.columns import Build
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.policies import (
    CHUNK,
    CPU_PRIOR,
    FIRST_DRAWN,
    HALF_LIFE,
    PRICE_PRIOR,
    REPRICED,
    Demand,
    expected_waste,
    gradients,
    integer_scores,
    typical,
)
from gpuscale.allocator.placing.refusal import RefusalKind
from gpuscale.allocator.usecases.fleet import FleetView, node_of
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from tests.support.allocator_values import NOW, ask, gpu, node, plain_node
from tests.support.placing import placer, reservation


def roomy(name: str, count: int, *, rank: int, cores: int) -> Node:
    """A node of idle GPUs that tells its CPU."""
    return replace(plain_node(name, count, rank=rank), cpu_milli=cores * 1000)


def wish(policy: Policy = Policy.SPREAD, **fields: object) -> Ask:
    return replace(ask(), policy=policy, **fields)


def picked(of: Placer, one: Ask) -> Pick:
    answer = of.place(one, NOW)
    assert isinstance(answer, Pick), answer
    return answer


def test_spread_counts_what_holders_of_shares_were_granted_as_taken() -> None:
    """Until they start, telemetry shows their GPU empty: the second share must not land beside the first."""
    use = Use()
    of = placer([plain_node("n0", 2)], use)
    half = wish(Policy.SPREAD, gpu_milli=500)
    first = picked(of, half)
    use.hold(reservation(first.gpus))
    assert [one.uuid for one in (*first.gpus, *picked(of, half).gpus)] == ["n0-0", "n0-1"]


def test_pack_prefers_the_node_whose_gpus_would_starve() -> None:
    """Both have two free GPUs; on the one with 4 cores left a GPU can no longer be fed at 8 cores per GPU."""
    use = Use()
    of = placer([roomy("rich", 2, rank=0, cores=32), roomy("poor", 2, rank=1, cores=8)], use)
    for _ in range(200):
        of.place(wish(Policy.PACK, cpu_milli=8000), NOW)
    answer = picked(of, wish(Policy.PACK, cpu_milli=2000))
    assert answer.nodes == ("poor",)
    parts = [part.name for part in answer.gpus[0].score.parts]
    assert parts == ["starvation_drop", "free_gpu", "free_cpu", "scarcity", "share_waste"]


def test_pack_prefers_fuller_nodes_and_of_their_gpus_the_fullest() -> None:
    use = Use()
    of = placer([plain_node("empty", 4), plain_node("used", 4, rank=1)], use)
    for index, milli in ((0, 1000), (2, 600)):
        taken = wish(Policy.PACK, gpu_milli=milli, gpus=frozenset({f"used-{index}"}))
        use.hold(reservation(picked(of, taken).gpus))
    assert [one.uuid for one in picked(of, wish(Policy.PACK, gpu_milli=300)).gpus] == ["used-2"]


def test_pack_spares_models_that_others_ask_for_by_name() -> None:
    """The price of a build is learnt from asks as they come; without them the first node would do."""
    scarce = node("scarce", replace(gpu("s0"), model="A100"), rank=0)
    common = node("common", *(replace(gpu(f"c{i}", index=i), model="T4") for i in range(1)), rank=1)
    of = placer([scarce, common])
    assert picked(of, wish(Policy.PACK)).nodes == ("scarce",)
    for _ in range(100):
        of.place(wish(Policy.PACK, models=("a100",)), NOW)
    assert picked(of, wish(Policy.PACK)).nodes == ("common",)
    assert picked(of, wish(Policy.PACK, models=("A100",))).nodes == ("scarce",)


def test_pack_spares_the_last_of_a_model_that_few_asks_name() -> None:
    """Each tenth ask names it: it is a small node like others while all is free, and dear once most of it is held."""
    use = Use()
    rare = node("rare", *(replace(gpu(one, index=index), model="A100") for index, one in enumerate("abcd")))
    of = placer([rare, plain_node("common", 8, rank=1)], use)
    for number in range(200):
        of.place(wish(Policy.PACK, models=() if number % 10 else ("A100",)), NOW)
    assert picked(of, wish(Policy.PACK)).nodes == ("rare",)
    use.hold(reservation(picked(of, wish(Policy.PACK, gpu_count=3, models=("A100",))).gpus))
    for _ in range(REPRICED):
        of.place(wish(Policy.PACK), NOW)
    assert picked(of, wish(Policy.PACK)).nodes == ("common",)


def with_memory(name: str, gpus: int, *, rank: int, gib: int) -> Node:
    """A node of idle GPUs that tells its memory."""
    return replace(plain_node(name, gpus, rank=rank), memory_total_bytes=gib << 30)


def test_pack_spares_nodes_that_alone_can_serve_what_others_ask_for() -> None:
    """Nobody names a model: what a quarter of the GPUs can ever serve makes the nodes that can scarce."""
    many = [with_memory(f"small-{at}", 2, rank=at + 1, gib=64) for at in range(3)]
    of = placer([with_memory("large", 2, rank=0, gib=512), *many])
    assert picked(of, wish(Policy.PACK)).nodes == ("large",)
    for _ in range(100):
        of.place(wish(Policy.PACK, host_memory_bytes=128 << 30), NOW)
    assert picked(of, wish(Policy.PACK)).nodes == ("small-0",)
    large = picked(of, wish(Policy.PACK, nodes=frozenset({"large"})))
    parts = {part.name: part.value for part in large.gpus[0].score.parts}
    assert parts["scarcity"] == pytest.approx(4.0 * 1000, rel=0.3)


@pytest.mark.parametrize(("able", "scarce"), [(2, True), (3, False)])
def test_what_most_gpus_can_serve_is_not_scarce(able: int, scarce: bool) -> None:
    """Three fifths of all GPUs are the line."""
    demand = Demand()
    of = Placer(Use(), demand)
    for at in range(4):
        of.apply_node(with_memory(f"n{at}", 1, rank=at, gib=512 if at < able else 64))
    for _ in range(100):
        of.place(wish(Policy.PACK, host_memory_bytes=128 << 30), NOW)
    assert bool(demand.tariff.prices) is scarce


def test_nodes_that_are_asked_for_by_name_set_no_price() -> None:
    demand = Demand()
    of = Placer(Use(), demand)
    for at in range(4):
        of.apply_node(roomy(f"n{at}", 1, rank=at, cores=8 + at))
    for named in (wish(nodes=frozenset({"n0"})), wish(gpus=frozenset({"n0-0"}))):
        of.place(named, NOW)
    assert demand.tariff.prices == {}


def test_a_share_is_worth_what_the_next_shares_find_too_small() -> None:
    """Of three shares two are 500 and one 200: of 300 free two thirds of the next cannot use anything."""
    waste = expected_waste({(0, 1, 500, ()): 2, (0, 1, 200, ()): 1, (0, 1, 1000, ()): 7, (0, 4, 1000, ()): 7})
    found = [float(waste[free]) for free in (0, 100, 199, 200, 300, 499, 500, 1000)]
    assert found == pytest.approx([0, 100, 199, 200 * 2 / 3, 300 * 2 / 3, 499 * 2 / 3, 0, 0])
    assert expected_waste({}).tolist() == [0.0] * 1001


def test_pack_leaves_of_gpus_what_the_next_shares_can_use() -> None:
    """Of 700 and 600 free, 200 leave 500 and 400: where shares are halves, the first; else the fuller one."""
    use = Use()
    demand = Demand()
    of = Placer(use, demand)
    of.apply_node(plain_node("n0", 2))
    for gpu_index, milli in ((0, 300), (1, 400)):
        holds = wish(Policy.PACK, gpu_milli=milli, gpus=frozenset({f"n0-{gpu_index}"}))
        use.hold(reservation(picked(of, holds).gpus))
    small = wish(Policy.PACK, gpu_milli=200)
    assert [one.uuid for one in picked(of, small).gpus] == ["n0-1"]
    for _ in range(64):
        of.place(wish(Policy.PACK, gpu_milli=500), NOW)
    assert [one.uuid for one in picked(of, small).gpus] == ["n0-0"]


def rated(name: str, *watts: float | None, rank: int = 0) -> Node:
    """A node of GPUs that are made for so many watts."""
    gpus = (replace(gpu(f"{name}-{at}", index=at), rated_watts=one) for at, one in enumerate(watts))
    return node(name, *gpus, rank=rank)


def test_of_equal_nodes_pack_takes_the_one_with_most_gpus_to_a_kilowatt() -> None:
    """One that does not tell its watts comes last, and where none does, the first that was seen is taken as ever."""
    of = placer([rated("mute", None), rated("hot", 400.0, rank=1), rated("cool", 250.0, rank=2)])
    [taken] = picked(of, wish(Policy.PACK)).gpus
    part = taken.score.parts[-1]
    assert (taken.uuid, part.name, part.value, part.weight) == ("cool-0", "gpus_per_kw", 4.0, 1 / 1024)
    [unread] = picked(placer([rated("a", None), rated("b", 0.0, rank=1)]), wish(Policy.PACK)).gpus
    assert unread.uuid == "a-0"
    assert "gpus_per_kw" not in [one.name for one in unread.score.parts]
    assert picked(of, wish(Policy.BESTFIT)).nodes == ("mute",)


def test_watts_settle_nothing_but_ties() -> None:
    """The node of one GPU is the fuller one, however many the other has to a kilowatt."""
    of = placer([rated("cool", 0.1, 0.1), rated("hot", 700.0, rank=1)])
    assert picked(of, wish(Policy.PACK)).nodes == ("hot",)


def test_of_a_nodes_gpus_pack_takes_those_with_fewest_watts() -> None:
    of = placer([rated("n0", None, 400.0, 250.0, 300.0)])
    assert [one.uuid for one in picked(of, wish(Policy.PACK)).gpus] == ["n0-2"]
    assert {one.uuid for one in picked(of, wish(Policy.PACK, gpu_count=2)).gpus} == {"n0-2", "n0-3"}
    assert picked(of, wish(Policy.FIRSTFIT)).gpus[0].uuid == "n0-0"


@pytest.mark.parametrize(
    ("told", "rated"),
    [
        ({"power_limit_watts": 200.0, "power_limit_default_watts": 400.0}, 400.0),
        ({"power_limit_watts": 200.0}, 200.0),
        ({}, None),
    ],
)
def test_a_cap_makes_no_gpu_cheaper(told: dict[str, float], rated: float | None) -> None:
    """A budget caps free GPUs to their lowest: what they are made for is what counts."""
    one = types_api.Gpu(uuid="GPU-a", reading=types_api.GpuReading(**told))
    message = monitor_api.Node(name="nodes/n0", snapshot=types_api.Snapshot(gpus=[one]))
    found = node_of(message, FleetView({}), NOW)
    assert [gpu.rated_watts for gpu in found.gpus] == [rated]


def test_watts_that_are_told_while_a_gpu_is_held_count_when_it_is_free() -> None:
    use = Use()
    of = placer([rated("n0", 400.0), rated("n1", 300.0, rank=1)], use)
    use.hold(reservation(picked(of, wish(nodes=frozenset({"n0"}))).gpus, name="r"))
    assert picked(of, wish(Policy.PACK)).nodes == ("n1",)
    of.apply_node(rated("n0", 100.0))
    use.free("r")
    assert picked(of, wish(Policy.PACK)).nodes == ("n0",)


def test_watts_settle_nothing_where_few_gpus_are_free() -> None:
    """From where a quarter is free to where less than a fifth is: then the fixed order of nodes refuses less."""
    demand, free = Demand(), [100]

    def saves(now_free: int) -> bool:
        free[0] = now_free
        for _ in range(REPRICED):
            demand.observe(wish(Policy.PACK), NO_BUILD, {COMMON: 100}, lambda: {COMMON: 1000.0 * free[0]})
        return demand.tariff.saves

    saved = [saves(now_free) for now_free in (25, 26, 21, 20, 25, 100)]
    assert saved == [False, True, True, False, False, True]
    of = Placer(Use(), demand)
    for one in (rated("hot", 400.0), rated("cool", 250.0, rank=1)):
        of.apply_node(one)
    for now_free, expected in ((10, "hot"), (90, "cool")):
        saves(now_free)
        answer = of.place(wish(Policy.PACK), NOW, again=True)
        assert answer.nodes == (expected,)


def test_an_ask_that_waits_is_learnt_once() -> None:
    scarce = node("scarce", replace(gpu("s0"), model="A100"), rank=0)
    of = placer([scarce, node("common", replace(gpu("c0"), model="T4"), rank=1)])
    for _ in range(100):
        of.place(wish(Policy.PACK, models=("a100",)), NOW, again=True)
        of.explain(wish(Policy.PACK, models=("a100",)), NOW)
        of.place_after(wish(Policy.PACK, models=("a100",)), NOW, ())
    assert picked(of, wish(Policy.PACK)).nodes == ("scarce",)


def test_bestfit_leaves_least_and_firstfit_takes_the_first() -> None:
    of = placer([roomy("big", 8, rank=0, cores=64), roomy("small", 2, rank=1, cores=16)])
    assert picked(of, wish(Policy.BESTFIT, cpu_milli=1000)).nodes == ("small",)
    assert picked(of, wish(Policy.FIRSTFIT, cpu_milli=1000)).nodes == ("big",)


def test_fgd_puts_a_share_where_it_spoils_least() -> None:
    """Typical asks are whole GPUs and halves: half a GPU belongs on the one that is broken already."""
    use, demand = Use(), Demand({(0, 1, 1000, ()): 1, (0, 1, 500, ()): 1})
    of = Placer(use, demand)
    of.apply_node(plain_node("n0", 2))
    one = picked(of, wish(Policy.FGD, gpu_milli=500, gpus=frozenset({"n0-1"})))
    use.hold(reservation(one.gpus))
    answer = picked(of, wish(Policy.FGD, gpu_milli=500))
    assert [gpu.uuid for gpu in answer.gpus] == ["n0-1"]
    assert [part.name for part in answer.gpus[0].score.parts] == ["gradient", "score"]
    assert of.explain(wish(Policy.FGD, gpu_count=0, gpu_milli=500), NOW).nodes[0].fitting == 2


def test_the_gradient_is_that_of_the_paper() -> None:
    """One node, GPUs with 1000 and 500 free, 10 cores; next come a whole GPU, or half of one with 20 cores.

    Before: the whole GPU fits, 500 are useless to it; the other finds too little CPU, 1500 are: (500 + 1500) / 2.
    A half on the first GPU leaves nothing for a whole one: (1000 + 1000) / 2; on the second (0 + 1000) / 2.
    """
    classes = {(0, 1, 1000, ()): 1, (20_000, 1, 500, ()): 1}
    drawn = typical(classes, lambda _: np.array([True]))
    free, fits = np.array([[1000, 500]]), np.array([[True, True]])
    half = replace(ask(), gpu_milli=500)
    found = gradients(drawn, np.array([10_000]), free, np.array([0]), half, fits)
    assert found.tolist() == [[1000.0 - 1000.0, 1000.0 - 500.0]]
    whole = gradients(drawn, np.array([10_000]), free, np.array([0]), ask(), np.array([[True, False]]))
    assert whole.tolist() == [[1000.0 - 500.0, -np.inf]]


def test_gradients_of_a_large_fleet_take_no_more_memory_at_once() -> None:
    """On each of 8 GPUs a node another share is free, and there are 25 typical asks."""
    drawn = typical({(0, 1, milli, ()): 1 for milli in range(100, 600, 20)}, lambda _: np.array([True]))
    peaks, quarter = list[int](), replace(ask(), gpu_milli=250)
    for count in (CHUNK, 8 * CHUNK):
        cpu, free = np.full(count, 10_000), 300 + np.arange(count * 8).reshape(count, 8) % 700
        of = cpu, free, np.zeros(count, np.int64), quarter, free > 0
        tracemalloc.start()
        found = gradients(drawn, *of)
        peaks.append(tracemalloc.get_traced_memory()[1] - found.nbytes)
        tracemalloc.stop()
        ends = [slice(at, at + 1) for at in (0, count - 1)]
        parts = [gradients(drawn, cpu[at], free[at], of[2][:1], quarter, free[at] > 0) for at in ends]
        assert found[[0, -1]].tolist() == np.concatenate(parts).tolist()
    assert peaks[1] < 2 * peaks[0]


@pytest.mark.parametrize("gradient", [-5000.0, -300.0, 0.0, 12.5, 700.0, 4000.0])
def test_the_integer_score_is_the_floor_of_the_sigmoid(gradient: float) -> None:
    expected = int(100 / (1 + np.exp(-gradient / 1000)))
    assert integer_scores(np.array([gradient])).tolist() == [expected]


@pytest.mark.parametrize(("weights", "expected"), [((95, 4, 1), [1]), ((90, 5, 5), [1, 8])])
def test_the_rarest_asks_are_not_typical_and_of_equals_the_smaller(
    weights: tuple[int, ...], expected: list[int]
) -> None:
    classes = dict(zip([(0, count, 1000, ()) for count in (1, 2, 8)], weights, strict=True))
    assert typical(classes, lambda _: np.array([True])).count.tolist() == expected


@pytest.mark.parametrize("policy", [Policy.PACK, Policy.FGD])
def test_a_pick_is_scored_by_what_is_known_of_asks_now(policy: Policy) -> None:
    """One who has placed before scores as one who comes new to the same demand."""
    demand = Demand()
    placers = [Placer(Use(), demand), Placer(Use(), demand)]
    for one in placers:
        one.apply_node(replace(plain_node("a", 2), cpu_milli=16_000))
    wish = Ask(1, 0, 100.0, policy=policy, cpu_milli=4_000, gpu_milli=300)
    before = placers[0].place(wish, NOW, again=True)
    for _ in range(600):
        placers[0].place(Ask(1, 0, 100.0, policy=policy, cpu_milli=15_000, gpu_milli=700), NOW)
    after = [one.place(wish, NOW, again=True) for one in placers]
    assert after[0] == after[1] != before


def test_a_gpu_that_no_node_has_is_named_also_where_no_node_is() -> None:
    of = Placer(Use())
    of.apply_node(plain_node("a", 1))
    found = of.place(Ask(1, 0, 100.0, gpus=frozenset({"a-7"})), NOW)
    assert found.kind is RefusalKind.NOT_FOUND


RARE, COMMON = ("a", 2, 32, 64), ("b", 8, 96, 512)
SUPPLY = {RARE: 10, COMMON: 30}
NO_BUILD = frozenset[Build]()


def idle() -> dict[Build, float]:
    """As if all of a large cluster were free, a quarter of it of the rare build."""
    return {build: 1e9 * count for build, count in SUPPLY.items()}


def test_the_cluster_is_a_start_that_asks_soon_outvote() -> None:
    demand = Demand()
    demand.expect(14.0)
    demand.observe(wish(cpu_milli=6000), NO_BUILD, SUPPLY, idle)
    expected = (6000 + 14.0 * CPU_PRIOR) / (1000 + CPU_PRIOR)
    assert demand.tariff.cpu_per_gpu == pytest.approx(expected)
    for _ in range(1000):
        demand.observe(wish(cpu_milli=6000), NO_BUILD, SUPPLY, idle)
    assert demand.tariff.cpu_per_gpu == pytest.approx(6.0, rel=0.02)


def test_asks_that_say_nothing_of_cpu_teach_nothing_of_it() -> None:
    demand = Demand()
    demand.observe(wish(cpu_milli=6000), NO_BUILD, SUPPLY, idle)
    for _ in range(100):
        demand.observe(wish(), NO_BUILD, SUPPLY, idle)
    assert demand.tariff.cpu_per_gpu == pytest.approx(6.0)


def test_a_price_is_the_demand_that_only_a_build_serves_over_its_part_of_what_is_free() -> None:
    """Half of all GPUs asked for must be of one build, which is a quarter of what is free: price 2, but for the prior."""
    demand = Demand()
    for _ in range(500):
        demand.observe(wish(models=("a",)), frozenset({RARE}), SUPPLY, idle)
        demand.observe(wish(), NO_BUILD, SUPPLY, idle)
    seen = 1_000_000 * (1 - 0.5 ** (1000 / HALF_LIFE)) / (1000 / HALF_LIFE * 0.6931)
    assert demand.tariff.prices[RARE] == pytest.approx(2.0 * seen / (seen + PRICE_PRIOR), rel=0.02)
    assert COMMON not in demand.tariff.prices
    for _ in range(REPRICED):
        demand.observe(wish(), NO_BUILD, SUPPLY, lambda: {RARE: 1e9, COMMON: 39e9})
    assert demand.tariff.prices[RARE] == pytest.approx(20.0 * seen / (seen + PRICE_PRIOR), rel=0.02)


@pytest.mark.parametrize(("cpu_milli", "scarcity"), [(8_000, 0.0), (9_450, 0.5), (20_000, 1.0)])
def test_cpu_is_scarce_where_asks_take_what_there_is_beside_gpus(cpu_milli: int, scarcity: float) -> None:
    """A cluster of 10 cores a GPU; asks without GPUs count as well as those with."""
    demand = Demand()
    demand.expect(10.0)
    for _ in range(1000):
        demand.observe(wish(gpu_count=0, cpu_milli=cpu_milli - 2_000), NO_BUILD, SUPPLY, idle)
        demand.observe(wish(cpu_milli=2_300), NO_BUILD, SUPPLY, idle)
    assert demand.tariff.cpu_scarcity == scarcity


def test_pack_prefers_nodes_with_less_cpu_where_cpu_is_scarce() -> None:
    of = placer([roomy("rich", 2, rank=0, cores=64), roomy("poor", 2, rank=1, cores=32)])
    small = wish(Policy.PACK, cpu_milli=1000, gpu_milli=100)
    for _ in range(200):
        of.place(wish(Policy.PACK, cpu_milli=2_000), NOW)
    assert picked(of, small).nodes == ("rich",)
    for _ in range(200):
        of.place(wish(Policy.PACK, gpu_count=0, cpu_milli=60_000), NOW)
        of.place(wish(Policy.PACK, cpu_milli=2_000), NOW)
    assert picked(of, small).nodes == ("poor",)


def test_an_ask_that_several_builds_serve_weighs_on_them_by_their_supply() -> None:
    supply = {RARE: 10, ("c", 4, 32, 64): 5, COMMON: 30}
    demand = Demand()
    for _ in range(500):
        demand.observe(wish(models=("a", "c")), frozenset(supply) - {COMMON}, supply, idle)
    prices = demand.tariff.prices
    assert prices[RARE] == pytest.approx(prices["c", 4, 32, 64])


def test_what_is_old_counts_less() -> None:
    demand = Demand()
    for cpu in (2000, 8000):
        for _ in range(HALF_LIFE):
            demand.observe(wish(cpu_milli=cpu), NO_BUILD, SUPPLY, idle)
    assert demand.tariff.cpu_per_gpu == pytest.approx((2.0 * 0.5 + 8.0) / 1.5, rel=0.02)


def test_the_tariff_stays_the_same_object_while_it_hardly_moves() -> None:
    """All that was reckoned with it stays valid."""
    demand = Demand()
    for _ in range(2000):
        demand.observe(wish(cpu_milli=6000), NO_BUILD, SUPPLY, idle)
    before = demand.tariff
    demand.observe(wish(cpu_milli=7000), NO_BUILD, SUPPLY, idle)
    assert demand.tariff is before


def test_typical_asks_are_drawn_up_now_and_then_and_never_where_they_were_given() -> None:
    demand, given = Demand(), Demand({(0, 1, 1000, ()): 1})
    for _ in range(min(FIRST_DRAWN)):
        assert demand.classes == {}
        demand.observe(wish(), NO_BUILD, SUPPLY, idle)
        given.observe(wish(gpu_count=2), NO_BUILD, SUPPLY, idle)
    assert demand.classes == {(0, 1, 1000, ()): min(FIRST_DRAWN)}
    assert given.classes == {(0, 1, 1000, ()): 1}
