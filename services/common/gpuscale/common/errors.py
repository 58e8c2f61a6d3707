"""The error tree: every failure that a caller can act on is a `GpuscaleError`, of one of the classes below.

`gpuscale.common.rpc.status` maps each class to a gRPC status code and back. Rooms raise these, or subclasses of them.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Self, TypeVar

from gpuscale.common.sizes import duration_text

_NO_METADATA: Mapping[str, str] = MappingProxyType({})
T = TypeVar("T")


class FieldViolation(NamedTuple):
    """A field with an invalid value."""

    field: str
    """Path of the field as the contract writes it, such as `gpu_filter.min_memory_bytes`."""
    description: str
    """What is wrong with it; never echoes the value."""


class GpuscaleError(Exception):
    """A failure that a caller can act on.

    Attributes:
        message: one sentence for people.
        reason: UPPER_SNAKE_CASE word for programs; stable, unlike the message.
        metadata: more facts for programs, such as the name of the resource.
        retry_after: seconds to wait before a retry; None if unknown.
    """

    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] = _NO_METADATA,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason: str = reason or self.default_reason
        # A copy that can be pickled: errors leave process pools.
        self.metadata: Mapping[str, str] = dict(metadata)
        self.retry_after = retry_after

    def lines(self) -> list[str]:
        """Lines for people: the message, the invalid fields, when to retry."""
        fields = self.violations if isinstance(self, InvalidArgumentError) else ()
        again, after = list[str](), self.retry_after
        if after is not None:
            long = after >= 600
            when = duration_text(60 * math.ceil(after / 60)) if long else f"{math.ceil(10 * after) / 10:g} s"
            again = [f"  try again in {when}"]
        told = [
            f"  {one.field}: {one.description}"
            for one in fields
            if one.description not in self.message or one.field.rpartition(".")[2] not in self.message
        ]
        return [f"error: {self.message}", *told, *again]

    _render_traceback_ = lines
    """IPython shows this in place of a traceback."""


class InvalidArgumentError(GpuscaleError):
    """The request is wrong in any state of the server.

    Attributes:
        violations: the invalid fields; empty if no single field is at fault.
    """

    default_reason = "INVALID_ARGUMENT"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        violations: Sequence[FieldViolation] = (),
        reason: str | None = None,
        metadata: Mapping[str, str] = _NO_METADATA,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata, retry_after=retry_after)
        own = () if field is None else (FieldViolation(field, message),)
        self.violations: tuple[FieldViolation, ...] = (*own, *violations)

    @classmethod
    def of(cls, violations: Sequence[FieldViolation]) -> Self:
        """The error of one or more invalid fields; its message is about the first."""
        return cls(f"{violations[0].field} {violations[0].description}", violations=violations)


class OutOfRangeError(GpuscaleError):
    """The requested position or value is outside the current range."""

    default_reason = "OUT_OF_RANGE"


class UnauthenticatedError(GpuscaleError):
    """The caller has no valid identity."""

    default_reason = "UNAUTHENTICATED"


class PermissionDeniedError(GpuscaleError):
    """The caller lacks the permission."""

    default_reason = "PERMISSION_DENIED"


class NotFoundError(GpuscaleError):
    """There is no such resource."""

    default_reason = "NOT_FOUND"

    @classmethod
    def of(cls, name: str) -> Self:
        """The error of a resource name that nothing has."""
        return cls(f"there is no {name}", metadata={"name": name})

    @classmethod
    def unless(cls, found: T | None, name: str) -> T:
        """What was found by a resource name; raises if that is nothing."""
        if found is None:
            raise cls.of(name)
        return found


class AlreadyExistsError(GpuscaleError):
    """The resource exists, or the request id was used with other arguments."""

    default_reason = "ALREADY_EXISTS"


class FailedPreconditionError(GpuscaleError):
    """The state forbids it; repeating the request unchanged will not help."""

    default_reason = "FAILED_PRECONDITION"


class AbortedError(GpuscaleError):
    """Somebody else changed the resource meanwhile; read it again and retry."""

    default_reason = "ABORTED"


class ResourceExhaustedError(GpuscaleError):
    """Nothing is left now; the same request may succeed later."""

    default_reason = "RESOURCE_EXHAUSTED"


class UnavailableError(GpuscaleError):
    """The service is unreachable, stopping, or cannot write its state."""

    default_reason = "UNAVAILABLE"


class DeadlineExceededError(GpuscaleError):
    """No answer came in time. The call may have taken effect."""

    default_reason = "DEADLINE_EXCEEDED"


class CancelledCallError(GpuscaleError):
    """The caller or the server cancelled the call."""

    default_reason = "CANCELLED"


class UnimplementedError(GpuscaleError):
    """The server has no such method."""

    default_reason = "UNIMPLEMENTED"


class InternalError(GpuscaleError):
    """A bug in the program. The caller gets the request id, the log has the rest."""

    default_reason = "INTERNAL"


UNANSWERED = (UnavailableError, DeadlineExceededError, UnimplementedError)
"""Errors after which another server, or a later call, may still answer."""
REFUSALS = (FailedPreconditionError, NotFoundError, PermissionDeniedError, UnauthenticatedError)
"""Errors of a lease that make all further calls futile: it is over, or another's."""


def request_id_reused(request_id: str) -> AlreadyExistsError:
    """The error for a request id that came before with other arguments, or from another caller."""
    return AlreadyExistsError(
        f"request_id {request_id} was used before with other arguments or by another caller;"
        " use a new UUID for each new request",
        reason="REQUEST_ID_REUSED",
        metadata={"request_id": request_id},
    )


def expect_etag(name: str, etag: str, current: str) -> None:
    """Raise AbortedError (ETAG_MISMATCH) unless `etag` is empty or the current one."""
    if etag and etag != current:
        raise AbortedError(f"{name} was changed meanwhile", reason="ETAG_MISMATCH", metadata={"name": name})
