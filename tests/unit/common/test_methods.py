"""Every method of the contract has a role, and nothing else but health and reflection may be called."""

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from gpuscale.api.allocator import v1 as _allocator  # noqa: F401  (fills the pool)
from gpuscale.common.security.auth import MethodInfo, Role, find_method


def test_a_method_of_ours_has_the_role_that_the_contract_gives() -> None:
    path = "/gpuscale.api.allocator.v1.AllocatorService/Reserve"
    assert find_method(path) == MethodInfo(path, Role.OPERATOR, ours=True)


def test_methods_of_others() -> None:
    health = find_method("/grpc.health.v1.Health/Watch")
    assert health is not None
    assert health.role is None
    reflection = find_method("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    assert reflection is not None
    assert reflection.role is Role.VIEWER


@pytest.mark.parametrize(
    "path",
    [
        "/gpuscale.api.allocator.v1.AllocatorService/NoSuch",
        "/gpuscale.api.allocator.v1.AllocatorService",
        "/grpc.health.v1.Health/Other",
        "/grpc.channelz.v1.Channelz/GetServers",
        "",
        "/",
        "//",
        "/\x00",
    ],
)
def test_anything_else(path: str) -> None:
    assert find_method(path) is None


def test_a_method_that_was_given_no_role() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="test/forgotten.proto", package="test", syntax="proto3")
    file.dependency.append("google/protobuf/duration.proto")
    service = file.service.add(name="ForgottenService")
    service.method.add(
        name="Do", input_type=".google.protobuf.Duration", output_type=".google.protobuf.Duration"
    )
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    assert find_method("/test.ForgottenService/Do") is None
