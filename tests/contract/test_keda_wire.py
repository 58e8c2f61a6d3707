"""KEDA's contract is spoken to the letter: package, paths, field numbers and types are what KEDA puts on the wire."""

import pytest

from gpuscale.api import externalscaler as api
from gpuscale.api.types.v1 import options_pb2
from tests.contract.descriptors import Field, rpcs

KINDS = {
    Field.TYPE_STRING: "string",
    Field.TYPE_INT64: "int64",
    Field.TYPE_DOUBLE: "double",
    Field.TYPE_BOOL: "bool",
    Field.TYPE_MESSAGE: "message",
}
MESSAGES = {
    "ScaledObjectRef": ["1 string name", "2 string namespace", "3 message scalerMetadata"],
    "IsActiveResponse": ["1 bool result"],
    "GetMetricSpecResponse": ["1 message metricSpecs"],
    "MetricSpec": ["1 string metricName", "2 int64 targetSize", "3 double targetSizeFloat"],
    "GetMetricsRequest": ["1 message scaledObjectRef", "2 string metricName"],
    "GetMetricsResponse": ["1 message metricValues"],
    "MetricValue": ["1 string metricName", "2 int64 metricValue", "3 double metricValueFloat"],
}


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
    roles = {options.Extensions[options_pb2.method].role for _, _, options in found.values()}
    assert roles == {options_pb2.ROLE_VIEWER}


@pytest.mark.parametrize("message", MESSAGES)
def test_every_field_has_its_number_and_type(message: str) -> None:
    fields = getattr(api, message).DESCRIPTOR.fields
    assert [f"{one.number} {KINDS[one.type]} {one.name}" for one in fields] == MESSAGES[message]


def test_a_request_as_keda_writes_it_is_read() -> None:
    """Bytes put together by hand: name "so", namespace "ns", metadata {"endpoint": "jobs"}."""
    raw = b"\x0a\x02so\x12\x02ns\x1a\x10\x0a\x08endpoint\x12\x04jobs"
    ref = api.ScaledObjectRef.FromString(raw)
    assert (ref.name, ref.namespace, dict(ref.scalerMetadata)) == ("so", "ns", {"endpoint": "jobs"})
