"""KEDA's contract is spoken to the letter: package, paths, field numbers and types are what KEDA puts on the wire."""

import pytest
from google.protobuf import descriptor
from google.protobuf.message import Message

from gpuscale.api import externalscaler as api
from gpuscale.api.types.v1 import options_pb2
from tests.contract.descriptors import rpcs

Field = descriptor.FieldDescriptor
TEXT, INTEGER, REAL, FLAG, PART = (
    Field.TYPE_STRING,
    Field.TYPE_INT64,
    Field.TYPE_DOUBLE,
    Field.TYPE_BOOL,
    Field.TYPE_MESSAGE,
)


def test_every_rpc_has_its_path_its_kind_and_the_role_of_a_viewer() -> None:
    """KEDA calls these paths, and has no bearer token that could make it more than a viewer."""
    found = {
        rpc.path: (rpc.client_streaming, rpc.server_streaming, rpc.method.GetOptions())
        for rpc in rpcs()
        if rpc.path.startswith("/externalscaler.")
    }
    assert {path: kind[:2] for path, kind in found.items()} == {
        "/externalscaler.ExternalScaler/IsActive": (False, False),
        "/externalscaler.ExternalScaler/StreamIsActive": (False, True),
        "/externalscaler.ExternalScaler/GetMetricSpec": (False, False),
        "/externalscaler.ExternalScaler/GetMetrics": (False, False),
        "/externalscaler.ExternalScaler/StreamMetricSpec": (False, True),
    }
    roles = {options.Extensions[options_pb2.role] for _, _, options in found.values()}
    assert roles == {options_pb2.ROLE_VIEWER}


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (api.ScaledObjectRef, {1: ("name", TEXT), 2: ("namespace", TEXT), 3: ("scalerMetadata", PART)}),
        (api.IsActiveResponse, {1: ("result", FLAG)}),
        (api.GetMetricSpecResponse, {1: ("metricSpecs", PART)}),
        (api.MetricSpec, {1: ("metricName", TEXT), 2: ("targetSize", INTEGER), 3: ("targetSizeFloat", REAL)}),
        (api.GetMetricsRequest, {1: ("scaledObjectRef", PART), 2: ("metricName", TEXT)}),
        (api.GetMetricsResponse, {1: ("metricValues", PART)}),
        (
            api.MetricValue,
            {1: ("metricName", TEXT), 2: ("metricValue", INTEGER), 3: ("metricValueFloat", REAL)},
        ),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_every_field_has_its_number_and_type(
    message: type[Message], fields: dict[int, tuple[str, int]]
) -> None:
    assert {one.number: (one.name, one.type) for one in message.DESCRIPTOR.fields} == fields


def test_a_request_as_keda_writes_it_is_read() -> None:
    """Bytes put together by hand: name "so", namespace "ns", metadata {"endpoint": "jobs"}."""
    raw = b"\x0a\x02so\x12\x02ns\x1a\x10\x0a\x08endpoint\x12\x04jobs"
    ref = api.ScaledObjectRef.FromString(raw)
    assert (ref.name, ref.namespace, dict(ref.scalerMetadata)) == ("so", "ns", {"endpoint": "jobs"})
