"""Errors on the wire: the table of gRPC status codes for the error tree, and error details.

An error is sent as google.rpc.Status (AIP-193) in the trailing metadata: ErrorInfo with its reason, BadRequest with the
invalid fields, RetryInfo with the time to wait.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from gpuscale.common import errors, wire

DOMAIN = "gpuscale"
DETAILS_KEY = "grpc-status-details-bin"
REQUEST_ID_KEY = "gpuscale-request-id"
"""Metadata of requests, and trailing metadata: the request id in log and audit lines."""
VERSION_KEY, VIA_KEY, ROLE_KEY = "gpuscale-version", "gpuscale-via", "gpuscale-role"
"""Trailing metadata with the version of the service, and of its gateway, and the caller's role; for authenticated callers."""
LEADER_KEY = "gpuscale-leader"
"""Trailing metadata with the address of the process that leads, where there are standbys; for admins."""
PROBLEM_KEY = "gpuscale-problem"
"""Trailing metadata of a service while it cannot write its state; why, for admins."""

# By the default reason of each error of the tree, which is the name of its code.
_CODES: Mapping[type[errors.GpuscaleError], grpc.StatusCode] = {
    error: grpc.StatusCode[error.default_reason]
    for error in errors.GpuscaleError.__subclasses__()
    if error.__module__ == errors.__name__
}
# Codes without an error here (UNKNOWN, DATA_LOSS) become InternalError.
_ERRORS = {code: error for error, code in _CODES.items()}


@dataclass(frozen=True)
class RpcStatus(grpc.Status):
    """A status for `ServicerContext.abort_with_status`."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def status_code(error: errors.GpuscaleError) -> grpc.StatusCode:
    """The code of an error; a subclass has the code of its nearest base class."""
    for cls in type(error).__mro__:
        if cls in _CODES:
            return _CODES[cls]
    return grpc.StatusCode.INTERNAL


def to_rpc_status(error: errors.GpuscaleError) -> RpcStatus:
    """The status of an error, with its details in the trailing metadata."""
    code = status_code(error)
    number: int = code.value[0]
    packed = status_pb2.Status(code=number, message=error.message)
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    ]
    if isinstance(error, errors.InvalidArgumentError) and error.violations:
        violation = error_details_pb2.BadRequest.FieldViolation
        fields = [violation(field=field, description=what) for field, what in error.violations]
        details.append(error_details_pb2.BadRequest(field_violations=fields))
    if error.retry_after is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=wire.to_duration(error.retry_after)))
    for detail in details:
        packed.details.add().Pack(detail)
    return RpcStatus(code, error.message, ((DETAILS_KEY, packed.SerializeToString()),))


def from_rpc_error(error: grpc.RpcError) -> errors.GpuscaleError:
    """The error for a failed call, sync or async."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return errors.InternalError(f"the call failed without a status: {type(error).__name__}")
    info, request_id = error_details_pb2.ErrorInfo(), ""
    bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    violations, retry_after = list[errors.FieldViolation](), None
    for key, value in error.trailing_metadata() or ():  # without what is unknown or malformed
        if key == REQUEST_ID_KEY and isinstance(value, str):
            request_id = value
        if key == DETAILS_KEY and isinstance(value, bytes):
            with suppress(DecodeError):
                for packed in status_pb2.Status.FromString(value).details:
                    if packed.Unpack(retry_info):
                        retry_after = wire.seconds(retry_info.retry_delay)
                    elif packed.Unpack(bad_request):
                        violations = [
                            errors.FieldViolation(one.field, one.description)
                            for one in bad_request.field_violations
                        ]
                    else:
                        packed.Unpack(info)
    cls = _ERRORS.get(error.code(), errors.InternalError)
    message = error.details() or error.code().name
    reason = info.reason if info.domain == DOMAIN else None
    metadata = dict(info.metadata) if reason else {}
    if cls is errors.InternalError and request_id:
        metadata["request_id"] = request_id
        if request_id not in message:
            message += f", request {request_id}"
    failure = cls(message, reason=reason, metadata=metadata, retry_after=retry_after)
    if isinstance(failure, errors.InvalidArgumentError):
        failure.violations = tuple(violations)
    return failure


@contextmanager
def rpc_errors() -> Generator[None]:
    """Raise the `GpuscaleError` for a failed gRPC call in the block, of any kind, sync or async."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
