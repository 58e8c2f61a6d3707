"""Presets: policies that reproduce known systems by their documented rules, and our own default. Pure.

Each makes a spec that scales on the work to do. docs/autoscaling.md has a recipe for each, and its intended differences from
the original. `named` reads the policy texts of OpenGRIS Scaler.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from gpuscale.autoscaler.domain.inputs import Aggregation
from gpuscale.autoscaler.domain.rules.formula import FormulaRule
from gpuscale.autoscaler.domain.rules.rule import (
    BoundMode,
    Comparator,
    Direction,
    Kind,
    RatioRule,
    Rule,
    StepRule,
    ThresholdRule,
)
from gpuscale.autoscaler.domain.rules.targets import DrainRule, PanicRule, TargetRule
from gpuscale.autoscaler.domain.spec import (
    CapabilitySet,
    Combine,
    EndpointSpec,
    GpuGate,
    HostSignal,
    Pace,
    PushedSignal,
    QueueCount,
    QueueSignal,
    RateLimit,
    ReplicaTemplate,
    ScaleInOrder,
    Signal,
    TaskSignal,
)
from gpuscale.common.errors import FieldViolation, InvalidArgumentError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Wish:
    """The input of a preset: the work, the bounds, and what a replica can do."""

    watcher: str  # id of the queue watcher that counts the work
    min_replicas: int
    max_replicas: int
    template: ReplicaTemplate  # what a replica is made of
    slots: int = 1  # pieces of work that a replica has in hand at a time
    goal: float = 30.0  # seconds that work may wait
    service_time: float | None = None  # seconds that one piece takes; None where nobody knows
    metric: str = ""  # a metric reported for the endpoint that counts the work, in place of the watcher
    # what differs from the original as shipped, by the original's own names (`PARAMETERS`)
    parameters: Mapping[str, float] = field(default_factory=dict[str, float])
    # of opengris_capability, in place of watcher and metric: all sets of one endpoint
    capability_sets: tuple[CapabilitySet, ...] = ()

    def stated(self, name: str, default: float) -> float:
        """A parameter, or its default."""
        return self.parameters.get(name, default)


WAITING = "waiting"
BUSY = "busy"
ALL = "all"
ARRIVING = "arriving"
TASKS = "tasks"
QUEUED_TASKS = "queued_tasks"
"""The metric of OpenGRIS Scaler's workers: the tasks in each one's queue."""
KEPT = Pace(200.0, startups=10.0)
"""Our own: longer, up to ten start-up times, while stopped replicas are needed again."""
HPA_UP = Pace(0.0, (RateLimit(15.0, replicas=4), RateLimit(15.0, percent=100.0)))
"""kubernetes: four more, or twice as many, in 15 s, whichever is more."""
HPA_DOWN = Pace(300.0, (RateLimit(15.0, percent=100.0),))
"""kubernetes: the most that was wanted within five minutes."""


def _work(wish: Wish, name: str, count: QueueCount) -> Signal:
    if wish.metric:
        return Signal(name, PushedSignal(wish.metric), counts_work=True)
    return Signal(name, QueueSignal(wish.watcher, count))


def _spec(wish: Wish, tick: float, signals: tuple[Signal, ...], *rules: Rule) -> EndpointSpec:
    return EndpointSpec(wish.min_replicas, wish.max_replicas, wish.template, signals, rules, tick)


def _one(wish: Wish, tick: float, count: QueueCount, kind: Kind) -> EndpointSpec:
    """A spec of one rule on one signal, without a cooldown."""
    name = ALL if count is QueueCount.TOTAL else WAITING
    return _spec(wish, tick, (_work(wish, name, count),), Rule(kind.field(), name, kind, cooldown=0.0))


def gpuscale(wish: Wish) -> EndpointSpec:
    """Our default: works off what waits within half of the goal, and keeps up with what comes.

    The other half of the goal is left for noticing and starting. The time that a piece of work takes is learnt from
    what arrives and what is in hand, where it is not stated. Where replicas that were given up are needed again,
    they are kept for longer, for that costs a start and the work that waits for it.
    """
    kind = DrainRule(
        wish.stated("deadline", wish.goal / 2),
        wish.service_time,
        wish.slots,
        utilization=wish.stated("utilization", 0.8),
        headroom=wish.parameters.get("headroom", None if "utilization" in wish.parameters else 1.5),
        window=wish.stated("window", 60.0),
        tolerance=wish.stated("tolerance", 0.15),
        catch_up_held=90.0,
    )
    signals: tuple[Signal, ...] = (_work(wish, WAITING, QueueCount.READY),)
    if not wish.metric:  # a metric counts all of the work: a watcher tells what waits from what is in hand
        kind = replace(kind, busy_signal=BUSY)
        signals = (*signals, _work(wish, BUSY, QueueCount.UNACKED))
        if wish.service_time is None:
            kind = replace(kind, rate_signal=ARRIVING)
            signals = (*signals, _work(wish, ARRIVING, QueueCount.RATE_IN))
    spec = _spec(wish, wish.stated("tick", 2.0), signals, Rule("drain", WAITING, kind))
    if "stabilization" in wish.parameters:
        return replace(spec, down=Pace(wish.parameters["stabilization"]))
    return replace(spec, down=KEPT)


def distributedfunsearch(wish: Wish) -> EndpointSpec:
    """DistributedFunSearch's samplers: one more above 50 waiting if a GPU and 30 GiB of a host are free, one fewer at 0."""
    threshold = wish.stated("sampler_scale_up_threshold", 50.0)
    memory = wish.stated("min_system_memory_gib", 30.0)
    gate = f"memory >= {memory * GIB:.0f}"
    signal = Signal("memory", HostSignal("memory_available_bytes"), across=Aggregation.MAX)
    spec = _funsearch(wish, "samplers", threshold, gate, signal)
    if wish.template.gpu_count:
        template = wish.template
        memory_gib, utilization = "min_gpu_memory_gib", "max_gpu_utilization"
        if template.ask is None or memory_gib in wish.parameters:
            template = replace(template, min_memory_bytes=round(wish.stated(memory_gib, 20.0) * GIB))
        if template.ask is None or utilization in wish.parameters:
            template = replace(template, max_utilization_percent=wish.stated(utilization, 50.0))
        spec = replace(spec, template=template, gpu_gate=GpuGate.CAP)
    return spec


def distributedfunsearch_evaluators(wish: Wish) -> EndpointSpec:
    """DistributedFunSearch's evaluators: one more above 10 waiting if a host's CPUs are not full, one fewer at 0."""
    threshold = wish.stated("evaluator_scale_up_threshold", 10.0)
    cpu, load = wish.stated("cpu_usage_threshold", 99.0), wish.stated("normalized_load_threshold", 0.99)
    gate = f"cpu < {cpu:g} and load < {load:g}"
    cpus = Signal("cpu", HostSignal("cpu_percent"), across=Aggregation.MIN, window=10.0)
    loads = Signal("load", HostSignal("load_per_core"), across=Aggregation.MIN)
    return _funsearch(wish, "evaluators", threshold, gate, cpus, loads)


def _funsearch(wish: Wish, role: str, threshold: float, gate: str, *signals: Signal) -> EndpointSpec:
    """One step per check. Up and down are separate rules: an unknown host stops starts, and nothing else."""
    up = f"replicas + 1 if {WAITING} > {threshold:g} and {gate} else replicas"
    spec = _spec(
        wish,
        wish.stated("check_interval", 120.0),
        (_work(wish, WAITING, QueueCount.READY), *signals),
        Rule("up", "", FormulaRule(up), direction=Direction.UP),
        Rule("down", WAITING, ThresholdRule(threshold), priority=1, cooldown=0.0, direction=Direction.DOWN),
    )
    return replace(
        spec,
        min_replicas=round(wish.stated(f"min_{role}", wish.min_replicas)),
        max_replicas=round(wish.stated(f"max_{role}", wish.max_replicas)),
        combine=Combine.FIRST_MATCH,
        down=Pace(0.0),
        paused=wish.stated("enabled", 1.0) == 0.0,
    )


def backend_ai(wish: Wish) -> EndpointSpec:
    """Backend.AI: two rules of one step each with a cooldown of 300 s; a step beyond a bound is skipped.

    The original names no thresholds: here more than a replica's slots waiting is too much, and nothing too little.
    """
    step, rest = round(wish.stated("step_size", 1.0)), wish.stated("cooldown_seconds", 300.0)
    high = StepRule(Comparator.GREATER_THAN, wish.stated("scale_up_threshold", wish.slots), step)
    low = StepRule(Comparator.LESS_THAN, wish.stated("scale_down_threshold", 1.0), -step)
    up = Rule("up", WAITING, high, cooldown=rest, bound_mode=BoundMode.SKIP)
    down = Rule("down", WAITING, low, cooldown=rest, bound_mode=BoundMode.SKIP)
    spec = _spec(wish, 10.0, (_work(wish, WAITING, QueueCount.READY),), up, down)
    how = Combine.SUM_STEPS if wish.stated("sum_steps", 0.0) else Combine.FIRST_MATCH
    return replace(spec, combine=how, bound_mode=BoundMode.SKIP)


def opengris_vanilla(wish: Wish) -> EndpointSpec:
    """OpenGRIS vanilla: one more above 10 tasks per worker, one fewer below 1, every 2 s."""
    return _opengris(wish, 10.0, 1.0)


def opengris_capability(wish: Wish) -> EndpointSpec:
    """OpenGRIS capability: one more above 5 tasks per worker, one fewer below 0.5, never the last with work; per set."""
    spec = _opengris(wish, 5.0, 0.5, guarded=True)
    if not wish.capability_sets:
        return spec
    return replace(
        spec,
        signals=(Signal(TASKS, TaskSignal()),),
        rules=(replace(spec.rules[0], signal=TASKS),),
        capability_sets=wish.capability_sets,
    )


def _opengris(wish: Wish, upper: float, lower: float, *, guarded: bool = False) -> EndpointSpec:
    """Those with the fewest queued tasks stop first, then those started first."""
    upper, lower = wish.stated("upper_task_ratio", upper), wish.stated("lower_task_ratio", lower)
    spec = _one(wish, 2.0, QueueCount.TOTAL, RatioRule(upper, lower, guarded=guarded))
    return replace(spec, busy_metric=QUEUED_TASKS, scale_in_order=ScaleInOrder.OLDEST_FIRST)


def opengris_fixed_elastic(wish: Wish) -> EndpointSpec:
    """OpenGRIS fixed_elastic: vanilla beside a primary group that is started once and never stopped.

    Where the template has tiers the primary group is on the first: what is above it goes to the next, and goes first.
    """
    primary = round(wish.stated("primary_worker_groups", 1.0))
    spec = replace(opengris_vanilla(wish), min_replicas=max(wish.min_replicas, primary))
    if not wish.template.tiers:
        return spec
    first, *others = wish.template.tiers
    pinned = replace(first, max_replicas=first.max_replicas or primary)
    return replace(spec, template=replace(wish.template, tiers=(pinned, *others)))


def opengris_no(wish: Wish) -> EndpointSpec:
    """OpenGRIS no: never a change; a person sets the count."""
    return _spec(wish, 2.0, ())


def hpa(wish: Wish) -> EndpointSpec:
    """The HorizontalPodAutoscaler on an external metric, with as much work per replica as it has slots."""
    tolerance = wish.stated("tolerance", 0.1)
    kind = TargetRule(
        wish.stated("target_average_value", wish.slots), tolerance_up=tolerance, tolerance_down=tolerance
    )
    window = wish.stated("stabilization_window_seconds", 300.0)
    spec = _one(wish, 15.0, QueueCount.TOTAL, kind)
    return replace(spec, up=HPA_UP, down=replace(HPA_DOWN, stabilization=window))


def keda(wish: Wish) -> EndpointSpec:
    """KEDA's RabbitMQ scaler as shipped: 20 messages per replica, through the HPA."""
    count = QueueCount.READY if wish.stated("exclude_unacknowledged", 0.0) else QueueCount.TOTAL
    spec = _one(wish, 15.0, count, TargetRule(wish.stated("value", 20.0)))
    active = replace(spec.signals[0], activation_threshold=wish.stated("activation_value", 0.0))
    window = wish.stated("cooldown_period", 300.0)
    return replace(spec, signals=(active,), up=HPA_UP, down=replace(HPA_DOWN, stabilization=window))


def knative(wish: Wish) -> EndpointSpec:
    """Knative's pod autoscaler: 70 % of a replica's slots, windows of 60 s and 6 s, every 2 s."""
    window = wish.stated("stable_window_seconds", 60.0)
    kind = PanicRule(
        wish.stated("container_concurrency_target", wish.slots),
        wish.stated("target_utilization_percentage", 70.0) / 100,
        window,
        window * wish.stated("panic_window_percentage", 10.0) / 100,
        wish.stated("panic_threshold_percentage", 200.0) / 100,
        wish.stated("max_scale_up_rate", 1000.0),
        wish.stated("max_scale_down_rate", 2.0),
    )
    return replace(_one(wish, 2.0, QueueCount.TOTAL, kind), down=Pace(wish.stated("scale_down_delay", 0.0)))


def ray_serve(wish: Wish) -> EndpointSpec:
    """Ray Serve: two requests per replica on the mean of 30 s; 30 s of agreement to grow, 600 s to shrink."""
    kind = TargetRule(wish.stated("target_ongoing_requests", 2.0), tolerance_up=0.0, tolerance_down=0.0)
    spec = _one(wish, 10.0, QueueCount.TOTAL, kind)
    window = wish.stated("look_back_period_s", 30.0)
    mean = replace(spec.signals[0], window=window, over_window=Aggregation.AVG)
    up, down = wish.stated("upscale_delay_s", 30.0), wish.stated("downscale_delay_s", 600.0)
    return replace(spec, signals=(mean,), up=Pace(up), down=Pace(down))


PRESETS: Mapping[str, Callable[[Wish], EndpointSpec]] = {
    make.__name__: make
    for make in (
        gpuscale,
        distributedfunsearch,
        distributedfunsearch_evaluators,
        backend_ai,
        opengris_vanilla,
        opengris_capability,
        opengris_fixed_elastic,
        opengris_no,
        hpa,
        keda,
        knative,
        ray_serve,
    )
}
"""Every preset by its name."""

_FUNSEARCH: Mapping[str, str] = {
    "enabled": "0 disables it (1)",
    "check_interval": "seconds between checks (120)",
    "sampler_scale_up_threshold": "messages above which a sampler is added (50)",
    "evaluator_scale_up_threshold": "messages above which an evaluator is added (10)",
    "min_samplers": "fewest samplers (min_replicas)",
    "max_samplers": "most samplers (max_replicas)",
    "min_evaluators": "fewest evaluators (min_replicas)",
    "max_evaluators": "most evaluators (max_replicas)",
    "min_gpu_memory_gib": "free memory of a sampler's GPU (20)",
    "max_gpu_utilization": "utilization that a sampler's GPU must be below, in percent (50)",
    "min_system_memory_gib": "free main memory of a sampler's host (30)",
    "cpu_usage_threshold": "CPU use that an evaluator's host must be below, in percent (99)",
    "normalized_load_threshold": "load per core of an evaluator's host (0.99)",
}
_RATIOS: Mapping[str, str] = {
    "upper_task_ratio": "tasks per worker above which one is added (10, capability 5)",
    "lower_task_ratio": "tasks per worker below which one is removed (1, capability 0.5)",
}
PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "gpuscale": {
        "deadline": "seconds within which what waits is worked off (half of the goal)",
        "utilization": "share of its slots that a replica is to be busy with (0.8)",
        "headroom": "most room to spare, in square roots of the work in hand (1.5; unlimited where utilization is stated)",
        "window": "seconds of arrivals that count (60)",
        "tolerance": "share by which the count may be off without a change (0.15)",
        "stabilization": "seconds of the past whose most is kept (200, and up to ten start-up times while it learns)",
        "tick": "seconds from one evaluation to the next (2)",
    },
    "distributedfunsearch": _FUNSEARCH,
    "distributedfunsearch_evaluators": _FUNSEARCH,
    "backend_ai": {
        "scale_up_threshold": "waiting above which replicas are added (slots)",
        "scale_down_threshold": "waiting below which replicas are removed (1)",
        "step_size": "replicas per step (1)",
        "cooldown_seconds": "least seconds between two changes by a rule (300)",
        "sum_steps": "1 adds up the steps of all rules, as pull request 3277 did; 0 takes the first (0)",
    },
    "opengris_vanilla": _RATIOS,
    "opengris_capability": _RATIOS,
    "opengris_fixed_elastic": {**_RATIOS, "primary_worker_groups": "groups that are never stopped (1)"},
    "opengris_no": {},
    "hpa": {
        "target_average_value": "work per replica (slots)",
        "tolerance": "tolerance, as a share of it (0.1)",
        "stabilization_window_seconds": "stabilization window down in seconds (300)",
    },
    "keda": {
        "value": "messages per replica (20)",
        "activation_value": "messages above which an endpoint without replicas wakes (0)",
        "cooldown_period": "stabilization window down in seconds (300)",
        "exclude_unacknowledged": "1 counts only waiting messages (0)",
    },
    "knative": {
        "container_concurrency_target": "work that each replica can hold (slots)",
        "target_utilization_percentage": "target share of it (70)",
        "stable_window_seconds": "length of the long window (60)",
        "panic_window_percentage": "length of the short one, as a share of it (10)",
        "panic_threshold_percentage": "a burst asks for this share of the ready replicas (200)",
        "max_scale_up_rate": "largest growth of an evaluation, as a multiple (1000)",
        "max_scale_down_rate": "largest reduction of an evaluation, as a divisor (2)",
        "scale_down_delay": "stabilization window down in seconds (0)",
    },
    "ray_serve": {
        "target_ongoing_requests": "work per replica (2)",
        "look_back_period_s": "seconds that work is averaged over (30)",
        "upscale_delay_s": "seconds of agreement before it grows (30)",
        "downscale_delay_s": "seconds of agreement before it shrinks (600)",
    },
}
"""The parameters of each preset, with their defaults."""
LARGEST_PARAMETER = 1e9
"""More seconds, replicas or GiB than anybody needs; a spec has room for it."""
_ALLOCATIONS = ("capability", "even_load")
_SCALINGS: Mapping[str, str] = {
    name.removeprefix("opengris_"): name for name in PRESETS if name.startswith("opengris_")
}


@dataclass(frozen=True, slots=True)
class Named:
    """A preset by its name, with a note on how it was requested."""

    name: str
    notes: tuple[str, ...] = ()


def named(text: str, field: str) -> Named:
    """The preset of a name, or of a policy text of OpenGRIS Scaler (`allocate=even_load; scaling=vanilla`)."""
    if "=" not in text:
        return Named(_known(text.strip(), PRESETS, field, "a preset"))
    words: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or key in words:
            raise _refused(field, f"must name allocate and scaling once each, not {part!r}")
        words[_known(key, ("allocate", "scaling"), field, "allocate or scaling")] = value
    if "scaling" not in words:
        raise _refused(field, "must name scaling")
    scaling = _known(words["scaling"], _SCALINGS, field, "a way of scaling")
    allocate = _known(words.get("allocate", _ALLOCATIONS[0]), _ALLOCATIONS, field, "a way of allocating")
    note = f"allocate={allocate} says which worker gets a task: here its broker does that"
    return Named(_SCALINGS[scaling], (note,))


def expand(name: str, wish: Wish, field: str) -> EndpointSpec:
    """The spec that a preset makes for a wish; `field`: the path of the parameters, for InvalidArgumentError."""
    known = PARAMETERS[name]
    wrong = [
        FieldViolation(f"{field}[{one}]", _unknown(one, known, f"a parameter of {name}"))
        for one in wish.parameters
        if one not in known
    ]
    wrong += [
        FieldViolation(
            f"{field}[{one}]", f"must be a number of at least 0 and at most {LARGEST_PARAMETER:,.0f}"
        )
        for one, value in wish.parameters.items()
        if not 0 <= value <= LARGEST_PARAMETER
    ]
    if wrong:
        raise InvalidArgumentError.of(wrong)
    return PRESETS[name](wish)


def about(name: str) -> str:
    """The description of a preset, in one line."""
    return (inspect.getdoc(PRESETS[name]) or "").partition("\n")[0]


def _known(word: str, known: Collection[str], field: str, what: str) -> str:
    if word in known:
        return word
    raise _refused(field, _unknown(word, known, what))


def _unknown(word: str, known: Collection[str], what: str) -> str:
    near = difflib.get_close_matches(word, sorted(known), n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known)) or 'none'}"
    return f"must be {what}; {hint}"


def _refused(field: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{field} {description}", field=field)
