"""A spec survives the way over the wire: what was absent stays absent, and zero stays zero."""

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.autoscaler.model import (
    Comparator,
    EndpointSpec,
    QueueCount,
    QueueSignal,
    ReplicaTemplate,
    Rule,
    Signal,
    StepRule,
)
from gpuscale.autoscaler.translate import spec_from_wire, spec_to_wire

ids = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,8}[a-z0-9])?", fullmatch=True)
seconds = st.none() | st.integers(0, 10**6).map(lambda n: n / 4)
counts = st.integers(0, 1000)
signals = st.builds(Signal, ids, st.builds(QueueSignal, ids, st.sampled_from(QueueCount)), seconds)
steps = st.builds(StepRule, st.sampled_from(Comparator), st.floats(allow_nan=False), st.integers(-99, 99))
rules = st.builds(
    Rule,
    id=ids,
    signal=ids,
    kind=steps,
    disabled=st.booleans(),
    priority=st.integers(-9, 9),
    cooldown=seconds,
    min_replicas=st.none() | counts,
    max_replicas=st.none() | counts,
)
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
)
specs = st.builds(
    EndpointSpec,
    counts,
    counts,
    templates,
    signals=st.lists(signals, max_size=3).map(tuple),
    rules=st.lists(rules, max_size=3).map(tuple),
    tick=seconds,
    paused=st.booleans(),
)


@given(specs)
def test_there_and_back(spec: EndpointSpec) -> None:
    wire = spec_to_wire(spec)
    assert spec_from_wire(wire) == spec
    assert spec_to_wire(spec_from_wire(type(wire).FromString(wire.SerializeToString()))) == wire
