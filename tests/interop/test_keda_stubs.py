"""Stubs made of KEDA's contract, in the process that has ours: they call what is served."""

import importlib
import sys
import uuid
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict

from gpuscale.api.autoscaler import v1 as api
from gpuscale.api.keda import v1 as ours
from gpuscale.api.types.v1 import options_pb2
from tests.support.up import Up

CONTRACT = """
syntax = "proto3";
package externalscaler;
service ExternalScaler {
  rpc IsActive(ScaledObjectRef) returns (IsActiveResponse);
  rpc StreamIsActive(ScaledObjectRef) returns (stream IsActiveResponse);
  rpc GetMetricSpec(ScaledObjectRef) returns (GetMetricSpecResponse);
  rpc GetMetrics(GetMetricsRequest) returns (GetMetricsResponse);
  rpc StreamMetricSpec(ScaledObjectRef) returns (stream GetMetricSpecResponse);
}
message ScaledObjectRef { string name = 1; string namespace = 2; map<string, string> scalerMetadata = 3; }
message IsActiveResponse { bool result = 1; }
message GetMetricSpecResponse { repeated MetricSpec metricSpecs = 1; }
message MetricSpec { string metricName = 1; int64 targetSize = 2; double targetSizeFloat = 3; }
message GetMetricsRequest { ScaledObjectRef scaledObjectRef = 1; string metricName = 2; }
message GetMetricsResponse { repeated MetricValue metricValues = 1; }
message MetricValue { string metricName = 1; int64 metricValue = 2; double metricValueFloat = 3; }
"""
"""What KEDA speaks on the wire."""


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """KEDA's messages and stub, known to this process beside ours."""
    protoc: Any = importlib.import_module("grpc_tools.protoc")
    (tmp_path / "externalscaler.proto").write_text(CONTRACT)
    outputs = [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    assert protoc.main(["protoc", f"-I{tmp_path}", *outputs, "externalscaler.proto"]) == 0
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return importlib.import_module("externalscaler_pb2"), importlib.import_module("externalscaler_pb2_grpc")


def test_ours_is_theirs_to_the_letter_and_a_viewer_may_call_it(stubs: tuple[Any, Any]) -> None:
    mine, said = ours.ScaledObjectRef.DESCRIPTOR.file, stubs[0].DESCRIPTOR
    assert shape(mine) == shape(said)
    for method in mine.services_by_name["ExternalScaler"].methods:
        assert method.GetOptions().Extensions[options_pb2.method].role == options_pb2.ROLE_VIEWER


def shape(file: Any) -> list[tuple[Any, ...]]:
    """What of a file is seen on the wire."""
    methods = file.services_by_name["ExternalScaler"].methods
    return [
        *((one.name, one.input_type.name, one.output_type.name, one.server_streaming) for one in methods),
        *(
            (name, field.number, field.type, field.is_repeated, field.name)
            for name, message in file.message_types_by_name.items()
            for field in message.fields
        ),
    ]


def test_kedas_own_stubs_are_loaded_beside_ours_and_answered(stubs: tuple[Any, Any], tmp_path: Path) -> None:
    theirs, called = stubs
    wish = api.CreateEndpointRequest(request_id=str(uuid.uuid4()))
    spec = {"minReplicas": 2, "maxReplicas": 2, "template": {"template": "w"}}
    ParseDict({"name": "endpoints/e", "spec": spec}, wish.endpoint)
    with Up(tmp_path, simulate=1) as up, grpc.insecure_channel(up.address) as channel:
        api.EndpointServiceStub(channel).CreateEndpoint(wish, timeout=60)
        for messages, stub in (
            (theirs, called.ExternalScalerStub(channel)),
            (ours, ours.ExternalScalerStub(channel)),
        ):
            ref = messages.ScaledObjectRef(scalerMetadata={"endpoint": "e"})
            [value] = stub.GetMetrics(
                messages.GetMetricsRequest(scaledObjectRef=ref), timeout=60
            ).metricValues
            assert (value.metricName, value.metricValue) == ("desired", 2)
            assert stub.IsActive(ref, timeout=60).result
