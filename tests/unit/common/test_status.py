"""Errors survive the way over the wire, and what others send is read with care."""

import copy
import gc
import pickle
import runpy

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import AioRpcError, Metadata

from gpuscale.common import errors
from gpuscale.common.rpc import status


def over_the_wire(error: errors.GpuscaleError) -> errors.GpuscaleError:
    sent = status.to_rpc_status(error)
    return status.from_rpc_error(
        AioRpcError(sent.code, Metadata(), Metadata(*sent.trailing_metadata), details=sent.details)
    )


TREE = errors.GpuscaleError.__subclasses__()


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_every_error_of_the_tree_comes_back_as_itself(cls: type[errors.GpuscaleError]) -> None:
    sent = cls("no such thing", reason="BECAUSE", metadata={"name": "nodes/a"}, retry_after=1.5)
    received = over_the_wire(sent)
    assert type(received) is cls
    assert (received.message, received.reason) == ("no such thing", "BECAUSE")
    assert (received.metadata, received.retry_after) == ({"name": "nodes/a"}, 1.5)


def test_a_bug_is_told_by_the_id_of_its_request() -> None:
    """Also one that only gRPC tells of."""
    trailing = Metadata((status.REQUEST_ID_KEY, "r-1"))
    for code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        received = status.from_rpc_error(AioRpcError(code, Metadata(), trailing, details="broken"))
        assert (received.message, received.metadata) == ("broken, request r-1", {"request_id": "r-1"})
    gone = AioRpcError(grpc.StatusCode.NOT_FOUND, Metadata(), trailing, details="gone")
    assert status.from_rpc_error(gone).message == "gone"


def test_every_status_code_but_ok_unknown_and_data_loss_is_in_the_table() -> None:
    codes = {status.status_code(cls("x")) for cls in TREE}
    assert len(codes) == len(TREE), "no two errors share one"
    left = set(grpc.StatusCode) - codes
    assert left == {grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}


def test_an_error_of_a_room_takes_no_code_of_the_tree_although_imported_before() -> None:
    stray = type("Stray", (errors.GpuscaleError,), {"default_reason": "NOT_FOUND"})
    assert runpy.run_path(status.__file__)["_ERRORS"][grpc.StatusCode.NOT_FOUND] is errors.NotFoundError
    del stray
    gc.collect()  # other tests ask for all subclasses


def test_field_violations_travel_with_their_paths() -> None:
    violations = (errors.FieldViolation("a.b", "too large"), errors.FieldViolation("c", "missing"))
    received = over_the_wire(errors.InvalidArgumentError("two fields", violations=violations))
    assert isinstance(received, errors.InvalidArgumentError)
    assert received.violations == violations


def test_field_argument_is_a_violation_with_the_message() -> None:
    assert errors.InvalidArgumentError("must be set", field="node").violations == (("node", "must be set"),)


def test_a_subclass_has_the_code_of_its_parent() -> None:
    class FenceError(errors.FailedPreconditionError):
        default_reason = "FENCE"

    sent = status.to_rpc_status(FenceError("old fence"))
    assert sent.code is grpc.StatusCode.FAILED_PRECONDITION
    assert over_the_wire(FenceError("old fence")).reason == "FENCE"


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS])
def test_codes_that_we_do_not_send_are_faults_of_the_server(code: grpc.StatusCode) -> None:
    error = status.from_rpc_error(AioRpcError(code, Metadata(), Metadata(), details="boom"))
    assert type(error) is errors.InternalError
    assert error.message == "boom"


def test_error_without_details_has_the_default_reason() -> None:
    error = status.from_rpc_error(AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata()))
    assert type(error) is errors.UnavailableError
    assert (error.reason, error.message) == ("UNAVAILABLE", "UNAVAILABLE")


def test_reasons_of_another_domain_are_not_taken_for_ours() -> None:
    packed = status_pb2.Status()
    packed.details.add().Pack(error_details_pb2.ErrorInfo(reason="DISK_FULL", domain="example.com"))
    metadata = Metadata((status.DETAILS_KEY, packed.SerializeToString()))
    error = status.from_rpc_error(AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), metadata))
    assert error.reason == "UNAVAILABLE"
    assert error.metadata == {}


BROKEN = status_pb2.Status()
BROKEN.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff\xff")


@pytest.mark.parametrize("details", [b"\xff\xff\xff", BROKEN.SerializeToString()])
def test_details_that_cannot_be_read_are_left_out(details: bytes) -> None:
    metadata = Metadata((status.DETAILS_KEY, details))
    error = status.from_rpc_error(
        AioRpcError(grpc.StatusCode.NOT_FOUND, Metadata(), metadata, details="gone")
    )
    assert (type(error), error.message, error.retry_after) == (errors.NotFoundError, "gone", None)


def test_rpc_errors_turns_a_failed_call_into_the_tree_and_keeps_it_as_cause() -> None:
    failed = AioRpcError(grpc.StatusCode.NOT_FOUND, Metadata(), Metadata(), details="no node a")
    with pytest.raises(errors.NotFoundError, match="no node a") as caught, status.rpc_errors():
        raise failed
    assert caught.value.__cause__ is failed


def test_rpc_errors_leaves_other_errors_alone() -> None:
    with pytest.raises(KeyError), status.rpc_errors():
        raise KeyError("x")


def test_a_bare_rpc_error_is_an_internal_error() -> None:
    assert type(status.from_rpc_error(grpc.RpcError())) is errors.InternalError


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_errors_leave_process_pools_as_they_are(cls: type[errors.GpuscaleError]) -> None:
    """A worker of a pool sends its error pickled; one that cannot be read again breaks the whole pool."""
    for sent in (cls("no"), cls("no", reason="BECAUSE", metadata={"name": "nodes/a"}, retry_after=1.5)):
        for received in (pickle.loads(pickle.dumps(sent)), copy.copy(sent)):
            assert type(received) is cls
            assert vars(received) == vars(sent)
    fields = errors.InvalidArgumentError("no", field="name")
    assert pickle.loads(pickle.dumps(fields)).violations == fields.violations
