"""A spec survives the way over the wire: what was absent stays absent, and zero stays zero."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.rules import KINDS
from gpuscale.autoscaler.domain.rules.rule import Kind
from gpuscale.autoscaler.domain.spec import EndpointSpec, RateLimit
from gpuscale.autoscaler.wire.specs import spec_from_wire, spec_to_wire

ids = st.sampled_from(["0", "a", "b.c_d-e", "zz", "zzzz-9", "z" * 63])
lengths = st.integers(1, 10**6).map(lambda n: n / 4)
numbers = st.floats(allow_nan=False).map(
    lambda number: number + 0.0
)  # -0.0 is 0.0: what is the default is not sent
some = st.integers(1, 1000)
asks = st.builds(
    allocator_api.Ask,
    mig_profile=ids,
    models=st.lists(ids, max_size=3),
    node_labels=st.dictionaries(ids, ids, max_size=3),
    allow_unknown_utilization=st.none() | st.booleans(),
    gpu_milli=st.none() | some,
).map(lambda ask: ask.SerializeToString(deterministic=True))


def durations(of: Descriptor) -> Iterator[str]:
    """Fields that are a Duration on the wire: seconds in the model, under the same name."""
    for field in of.fields:
        if field.message_type is Duration.DESCRIPTOR:
            yield field.name
        elif field.message_type and field.message_type.file.package == of.file.package:
            yield from durations(field.message_type)


NAMED: Mapping[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(durations(api.EndpointSpec.DESCRIPTOR), lengths),
    **dict.fromkeys(("step_up", "step_down", "workers"), some),
    "step": st.integers(1, 99),
    "weekdays": st.frozensets(st.integers(1, 7)),
    "start": st.integers(0, 1439),
    "end": st.integers(0, 1440),
    "time_zone": st.sampled_from(["UTC", "Asia/Tokyo"]),
    "capabilities": st.dictionaries(ids, st.integers(-1, 99), max_size=3),
    "max_utilization_percent": st.floats(0, 100),
    "adapter": ids,
}
"""What a field of a name may hold, where its type alone does not say it."""
SIMPLE: Mapping[Any, st.SearchStrategy[Any]] = {
    str: ids,
    bool: st.booleans(),
    int: st.integers(0, 1000),
    float: numbers,
    bytes: st.just(b"") | asks,
    NoneType: st.none(),
    RateLimit: st.builds(RateLimit, lengths, some, st.none())
    | st.builds(RateLimit, lengths, st.none(), numbers),
}


def held(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Any value of a type, as a field of that name holds it."""
    origin, within = get_origin(hint), get_args(hint)
    if origin in {UnionType, Union}:
        return st.one_of(*(st.none() if one is NoneType else held(one, name) for one in within))
    if name in NAMED:
        return NAMED[name]
    if hint in SIMPLE:
        return SIMPLE[hint]
    if origin is tuple:
        return st.lists(held(within[0]), max_size=3).map(tuple)
    if origin is frozenset:
        return st.frozensets(held(within[0]), max_size=3)
    if origin is Mapping:
        return st.dictionaries(held(within[0]), held(within[1]), max_size=3)
    if hint is Kind:
        return st.one_of(*map(held, KINDS))
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    assert is_dataclass(hint)
    hints = get_type_hints(hint)
    return st.builds(hint, **{one.name: held(hints[one.name], one.name) for one in fields(hint)})


@given(held(EndpointSpec))
def test_there_and_back(spec: EndpointSpec) -> None:
    wire = spec_to_wire(spec)
    assert spec_from_wire(wire) == spec
    assert spec_to_wire(spec_from_wire(type(wire).FromString(wire.SerializeToString()))) == wire
