"""The client library: `from gpuscale.client import connect`.

It depends on gRPC and protobuf only. Begin with `client`: the stubs, `reserve` and `run`. `connection` finds the server, `calls` adds
deadlines and `GpuscaleError` to every call, `lease` renews reservations, `jobs` starts commands on reserved GPUs, `this_host` finds out
which node this host is, `listing` and `retries` page through lists and repeat calls, `worker` is for replicas.
"""

from gpuscale.client.asks import AskOptions, ReserveOptions, RunOptions, ask, reserve_request
from gpuscale.client.client import AsyncClient, Client
from gpuscale.client.connection import connect, connect_async, read_token
from gpuscale.client.lease import AsyncLease, AsyncReserving, Lease, LostReservationError
from gpuscale.client.listing import Mirror, pages, pages_async, watch, watch_async
from gpuscale.client.retries import wait_ready, wait_ready_async
from gpuscale.common.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledCallError,
    DeadlineExceededError,
    FailedPreconditionError,
    FieldViolation,
    GpuscaleError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from gpuscale.common.rpc.channel import ClientTls

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "AskOptions",
    "AsyncClient",
    "AsyncLease",
    "AsyncReserving",
    "CancelledCallError",
    "Client",
    "ClientTls",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "FieldViolation",
    "GpuscaleError",
    "InternalError",
    "InvalidArgumentError",
    "Lease",
    "LostReservationError",
    "Mirror",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "ReserveOptions",
    "ResourceExhaustedError",
    "RunOptions",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "ask",
    "connect",
    "connect_async",
    "pages",
    "pages_async",
    "read_token",
    "reserve_request",
    "wait_ready",
    "wait_ready_async",
    "watch",
    "watch_async",
]
