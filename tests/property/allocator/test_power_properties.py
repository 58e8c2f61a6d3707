"""Power budgets over random timelines of load, on a model of GPUs that draw what their load asks for, as far as caps admit."""

from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscale.allocator.domain import power
from gpuscale.allocator.domain.model import Node, NodeState

LOW, HIGH, IDLE, TICK = 200.0, 700.0, 60.0, 1.0
LATENCIES = {"a": 1, "b": 3, "c": 2}
"""Ticks after which the agents of nodes have carried out what they were told."""
SLOWEST = max(LATENCIES.values()) * TICK


@dataclass
class ModelGpu:
    """What is the case: what the load would draw, and the cap that is in force."""

    uuid: str
    node: str
    helped: bool = True
    held: bool = False
    priority: int = 0
    load: float = IDLE
    cap: float | None = None
    known: bool = True
    high: float | None = HIGH

    @property
    def drawn(self) -> float:
        return min(self.load, HIGH if self.cap is None else self.cap)


class Model:
    """Two nodes in a rack and one beside it, whose agents carry out orders some ticks late."""

    def __init__(self, budgets: dict[str, power.PowerBudget], loose: str = "") -> None:
        self.budgets = budgets
        self.nodes = [
            Node(name, rank, NodeState.ONLINE, (), labels=labels)
            for rank, (name, labels) in enumerate({"a": {"rack": "r"}, "b": {"rack": "r"}, "c": {}}.items())
        ]
        self.gpus = [ModelGpu(f"{node.id}{at}", node.id) for node in self.nodes for at in range(4)]
        self.gpus[0].helped = not loose  # nobody caps it, and of a mute one nobody knows its limit
        self.gpus[0].high = None if loose == "mute" else HIGH
        self.governor = power.Governor()
        self.sent: dict[str, list[dict[str, float]]] = {node.id: [] for node in self.nodes}
        self.newly: dict[str, str] = {}
        self.now = 0.0

    def seen(self, gpu: ModelGpu) -> power.PoweredGpu:
        told = [one.get(gpu.uuid, HIGH) for one in self.sent[gpu.node]]
        cap = max([HIGH if gpu.cap is None else gpu.cap, *told])
        return power.PoweredGpu(
            gpu.uuid,
            gpu.node,
            helped=gpu.helped,
            low=LOW if gpu.helped else 0.0,
            high=gpu.high,
            watts=gpu.drawn if gpu.known else None,
            cap=None if cap >= HIGH else cap,
            held=gpu.held,
            priority=gpu.priority,
            activity=gpu.drawn / 10,
        )

    def tick(self) -> power.PowerLook:
        self.now += TICK
        by_node = {
            node.id: [self.seen(gpu) for gpu in self.gpus if gpu.node == node.id] for node in self.nodes
        }
        look = self.governor.look(self.budgets.items(), self.nodes, by_node, self.now)
        for node, sent in self.sent.items():
            sent.append({uuid: cap.watts for uuid, cap in look.caps.items()})
            if len(sent) > LATENCIES[node]:
                orders = sent.pop(0)
                for gpu in self.gpus:
                    if gpu.helped and gpu.node == node:
                        gpu.cap = orders.get(gpu.uuid)
        return look

    def happen(self, look: power.PowerLook, at: int, what: str) -> None:
        gpu = self.gpus[at]
        if what == "hold" and not gpu.held:
            gpu.held = look.room.short({gpu.uuid: gpu.node}, self.newly) is None
            gpu.priority = at % 3
            if gpu.held:
                self.newly[gpu.uuid] = gpu.node
        elif what == "free":
            gpu.held, gpu.load = False, IDLE
            self.newly.pop(gpu.uuid, None)
        elif what == "blind":
            gpu.known = not gpu.known
        elif what == "busy":
            gpu.load = HIGH
        elif what == "idle":
            gpu.load = IDLE

    def above(self) -> set[str]:
        found: set[str] = set()
        for key, budget in self.budgets.items():
            sums: dict[str, float] = {}
            for node in self.nodes:
                if name := budget.sum_of(node):
                    drawn = sum(gpu.drawn for gpu in self.gpus if gpu.node == node.id)
                    sums[name] = sums.get(name, 0.0) + drawn
            found |= {f"{key}/{name}" for name, drawn in sums.items() if drawn > budget.watts + 1e-6}
        return found


Timeline = list[list[tuple[int, str]]]


def timeline_of(seed: int) -> Timeline:
    """A minute of what happens to which GPUs; first most are taken and put to work."""
    chance = Random(seed)
    kinds = {"hold": 4, "busy": 5, "idle": 2, "free": 1, "blind": 1}
    found: Timeline = [[(at, what) for at in range(12) if chance.random() < 0.8 for what in ("hold", "busy")]]
    for _ in range(60):
        happens = [at for at in range(12) if chance.random() < 0.1]
        found.append([(at, chance.choices([*kinds], [*kinds.values()])[0]) for at in happens])
    return found


TIMELINES = st.integers(0, 1 << 32).map(timeline_of)
# Each sum can be kept with all caps at their lowest, and a GPU at its limit that nobody can cap.
WATTS = st.tuples(
    st.sampled_from([1400.0, 1500.0, 2300.0]),
    st.sampled_from([2200.0, 2500.0, 4000.0]),
    st.sampled_from([3000.0, 3500.0, 6000.0]),
)


def of_all_kinds(watts: tuple[float, float, float], share: power.PowerShare) -> dict[str, power.PowerBudget]:
    per_node, per_rack, fleet = watts
    return {
        "node": power.PowerBudget(per_node, per="node", share=share),
        "rack": power.PowerBudget(per_rack, per="rack", share=share),
        "fleet": power.PowerBudget(fleet, share=share),
    }


@given(TIMELINES, WATTS, st.sampled_from(power.PowerShare), st.sampled_from(["", "loose", "mute"]))
@settings(max_examples=settings().max_examples // 2)
def test_budgets_are_kept_but_for_five_seconds_whoever_draws_and_no_cap_is_below_what_a_device_admits(
    timeline: Timeline, watts: tuple[float, float, float], share: power.PowerShare, loose: str
) -> None:
    model, since = Model(of_all_kinds(watts, share), loose), dict[str, float]()
    look = model.tick()
    for events in timeline:
        for event in events:
            model.happen(look, *event)
        look = model.tick()
        model.newly.clear()
        assert all(LOW <= cap.watts < HIGH for cap in look.caps.values())
        since = {key: since.get(key, model.now) for key in model.above()}
        lasted = {key: model.now - began for key, began in since.items()}
        assert all(spell <= power.EMERGENCY + SLOWEST + TICK for spell in lasted.values()), lasted


@given(TIMELINES, WATTS, st.sampled_from(power.PowerShare))
@settings(max_examples=settings().max_examples // 2)
def test_once_caps_are_in_force_no_budget_is_above_at_any_moment_whatever_those_draw_who_hold_gpus(
    timeline: Timeline, watts: tuple[float, float, float], share: power.PowerShare
) -> None:
    """Nothing waits for it to be seen: caps alone keep a budget, also while some are lowered and others raised."""
    model = Model(of_all_kinds(watts, share))
    look = model.tick()
    for events in timeline:
        for at, what in events:
            if (what != "busy" or model.gpus[at].held) and (what != "hold" or model.now == TICK):
                model.happen(look, at, what)
        look = model.tick()
        model.newly.clear()
        assert model.now <= 2 * TICK + SLOWEST or not model.above()


@given(st.integers(2, 4), st.integers(1400, 2700))
def test_what_is_left_goes_to_those_who_can_use_it_and_a_steady_load_changes_no_cap(
    busy: int, watts: int
) -> None:
    model = Model({"node": power.PowerBudget(float(watts), nodes=("a",))})
    for at, gpu in enumerate(model.gpus[:4]):
        gpu.held, gpu.load = True, HIGH if at < busy else IDLE
    looks = [model.tick() for _ in range(30)]
    caps = [{uuid: cap.watts for uuid, cap in one.caps.items()} for one in looks[-10:]]
    assert all(one == caps[0] for one in caps)
    drawn = sum(gpu.drawn for gpu in model.gpus[:4])
    assert drawn <= watts
    could = min(HIGH * busy, watts - LOW * (4 - busy)) + IDLE * (4 - busy)
    assert drawn >= could - 25 * busy
