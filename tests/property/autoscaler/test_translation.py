"""A spec survives the way over the wire: what was absent stays absent, and zero stays zero."""

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.domain.inputs import Aggregation
from gpuscale.autoscaler.domain.rules.formula import FormulaRule
from gpuscale.autoscaler.domain.rules.rule import BoundMode, Direction, Rule
from gpuscale.autoscaler.domain.rules.steps import BandRule, Comparator, RatioRule, StepRule, ThresholdRule
from gpuscale.autoscaler.domain.rules.targets import DrainRule, PanicRule, TargetRule, TargetType
from gpuscale.autoscaler.domain.rules.timed import ForecastModel, ForecastRule, Period, ScheduleRule
from gpuscale.autoscaler.domain.spec import (
    CapabilitySet,
    Combine,
    EndpointSpec,
    GpuSignal,
    HostSignal,
    OnMissing,
    Pace,
    PrometheusSignal,
    PushedSignal,
    QueueCount,
    QueueSignal,
    RateLimit,
    ReplicaSignal,
    ReplicaTemplate,
    ScaleInOrder,
    ScalingMode,
    Signal,
    TaskSignal,
    WaitingSignal,
)
from gpuscale.autoscaler.wire.specs import spec_from_wire, spec_to_wire

ids = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,8}[a-z0-9])?", fullmatch=True)
lengths = st.integers(1, 10**6).map(lambda n: n / 4)
seconds = st.none() | lengths
counts = st.integers(0, 1000)
some = st.integers(1, 1000)
numbers = st.floats(allow_nan=False)
node_sets = st.frozensets(ids, max_size=3)
sources = st.one_of(
    st.builds(QueueSignal, ids, st.sampled_from(QueueCount)),
    st.builds(GpuSignal, ids, node_sets, st.booleans()),
    st.builds(HostSignal, ids, node_sets),
    st.builds(PushedSignal, ids),
    st.builds(ReplicaSignal, ids),
    st.builds(PrometheusSignal, ids, ids),
    st.builds(WaitingSignal, st.just("") | ids),
    st.just(TaskSignal()),
)
signals = st.builds(
    Signal,
    ids,
    sources,
    seconds,
    across=st.sampled_from(Aggregation),
    window=seconds,
    over_window=st.sampled_from(Aggregation),
    on_missing=st.sampled_from(OnMissing),
    last_ttl=lengths,
    activation_threshold=numbers,
    counts_work=st.booleans(),
)
minutes = st.integers(0, 1439)
periods = st.builds(Period, st.frozensets(st.integers(1, 7)), minutes, st.integers(0, 1440), counts)
kinds = st.one_of(
    st.builds(StepRule, st.sampled_from(Comparator), numbers, st.integers(-99, 99)),
    st.builds(BandRule, st.none() | numbers, st.none() | numbers, some, some),
    st.builds(RatioRule, numbers, numbers, st.booleans(), st.booleans()),
    st.builds(ThresholdRule, numbers, numbers, some),
    st.builds(TargetRule, numbers, st.sampled_from(TargetType), numbers, numbers),
    st.builds(PanicRule, numbers, numbers, lengths, seconds, numbers, numbers, numbers),
    st.builds(
        DrainRule, lengths, seconds, numbers, numbers, st.just("") | ids, st.just("") | ids, lengths, numbers
    ),
    st.builds(ScheduleRule, st.lists(periods, max_size=3).map(tuple), st.sampled_from(["UTC", "Asia/Tokyo"])),
    st.builds(ForecastRule, numbers, st.sampled_from(ForecastModel), seconds, lengths),
    st.builds(FormulaRule, ids),
)
rules = st.builds(
    Rule,
    id=ids,
    signal=ids,
    kind=kinds,
    disabled=st.booleans(),
    priority=st.integers(-9, 9),
    cooldown=seconds,
    min_replicas=st.none() | counts,
    max_replicas=st.none() | counts,
    direction=st.sampled_from(Direction),
    bound_mode=st.sampled_from(BoundMode),
)
limits = st.builds(RateLimit, lengths, some, st.none()) | st.builds(RateLimit, lengths, st.none(), numbers)
paces = st.builds(
    Pace,
    seconds,
    st.lists(limits, max_size=2).map(tuple),
    st.booleans(),
    st.booleans(),
    st.just(0.0) | lengths,
)
asks = st.builds(
    allocator_api.Ask,
    mig_profile=ids,
    models=st.lists(ids, max_size=3),
    node_labels=st.dictionaries(ids, ids, max_size=3),
    allow_unknown_utilization=st.none() | st.booleans(),
    gpu_milli=st.none() | some,
).map(lambda ask: ask.SerializeToString(deterministic=True))
templates = st.builds(
    ReplicaTemplate,
    template=ids,
    adapter=st.just("") | ids,
    parameters=st.dictionaries(ids, st.text(max_size=5), max_size=3),
    gpu_count=counts,
    min_memory_bytes=st.none() | counts,
    max_utilization_percent=st.none() | st.floats(0, 100),
    lease_ttl=seconds,
    drain_timeout=seconds,
    ask=st.none() | st.just(b"") | asks,
)
amounts = st.dictionaries(ids, st.integers(-1, 99), max_size=3)
sets = st.builds(CapabilitySet, ids, amounts, counts, st.none() | counts, some, st.none() | templates)
specs = st.builds(
    EndpointSpec,
    counts,
    counts,
    templates,
    signals=st.lists(signals, max_size=3).map(tuple),
    rules=st.lists(rules, max_size=3).map(tuple),
    tick=seconds,
    paused=st.booleans(),
    combine=st.sampled_from(Combine),
    up=paces,
    down=paces,
    mode=st.sampled_from(ScalingMode),
    bound_mode=st.sampled_from(BoundMode),
    busy_metric=st.just("") | ids,
    scale_in_order=st.sampled_from(ScaleInOrder),
    capability_sets=st.lists(sets, max_size=2).map(tuple),
)


@given(specs)
def test_there_and_back(spec: EndpointSpec) -> None:
    wire = spec_to_wire(spec)
    assert spec_from_wire(wire) == spec
    assert spec_to_wire(spec_from_wire(type(wire).FromString(wire.SerializeToString()))) == wire
