"""The guard of every server, which handles all RPCs.

In this order, it authenticates the caller and checks its role against the contract; rejects calls whose deadline has
passed; rejects unary calls above the limit; decodes the request and validates it unless it is a stream; and gives unary
calls without a deadline one. Any failure becomes a status with details, never UNKNOWN or the text of an exception.

Messages of request streams are decoded but not validated: see `gpuscale.common.rpc.validation`. Handlers without a request
deserializer (of a gateway, which forwards) get the bytes; everything else applies to them too.

The handlers given to gRPC are coroutines even for streams, so that an interruption of a stream, even during a write, is
handled here and the servicer's generator is closed at once. Interceptors that iterate over the result of a stream handler
(such as OpenTelemetry's) must therefore run inside this one. To gRPC the guards are a generic handler: it would run an
interceptor as an extra coroutine in each call.
"""

import asyncio
import inspect
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from gpuscale.common import VERSION, errors, wire
from gpuscale.common.rpc.limits import Connections, Refusals
from gpuscale.common.rpc.meter import CallWatcher
from gpuscale.common.rpc.status import REQUEST_ID_KEY, ROLE_KEY, VERSION_KEY, to_rpc_status
from gpuscale.common.rpc.validation import quick_check_of, validate
from gpuscale.common.runtime.logs import call_id, get_logger
from gpuscale.common.runtime.tasks import begin_call
from gpuscale.common.security.auth import (
    Authenticator,
    Context,
    KeysNeededError,
    Metadata,
    MethodInfo,
    Principal,
    Role,
    find_method,
    find_principal,
    for_caller,
    require_for,
    set_principal,
)

RECHECK_PERIOD = 60.0
"""Seconds between two checks of the credentials of an open stream."""

# gRPC's class is generic to type checkers only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Divert: TypeAlias = "Callable[[grpc.HandlerCallDetails], Handler | None]"
"""The handler of a call that is answered elsewhere, such as by forwarding; None for other calls."""
_Task = asyncio.Task[Any]
_Named = tuple[tuple[str, str], ...]

_TOLD = {role: ((VERSION_KEY, VERSION), (ROLE_KEY, role.name)) for role in Role}
"""Trailing metadata of pages for authenticated callers, by role; other answers would pay for it with a tenth of a forwarded call."""
_log = get_logger(__name__)


forwarded_metadata: ContextVar[Metadata] = ContextVar("gpuscale_forwarded_metadata")
"""The metadata of the current call, for a handler that forwards it: gRPC decodes it each time it is asked."""
OVERLOADED_RETRY = 1.0
"""Seconds after which a rejected caller should retry."""
MOST_UNKNOWN_CALLS: Final = 16
"""Maximum concurrent calls of our public methods, which anybody may call."""
MOST_UNKNOWN_BYTES: Final = 16_384
"""Maximum request size of such a call."""


class OpenCalls:
    """The open calls. Unary calls are limited in number; streams, which stay open, are not.

    Calls of public methods are accepted while the server stops. Except for health checks they have a small limit of their
    own, so that unknown callers do not use up the limit of authenticated ones.
    """

    def __init__(self, max_unary: int) -> None:
        self._max_unary = max_unary
        self._stopping: errors.GpuscaleError | None = None
        self._ended: dict[_Task, errors.GpuscaleError] = {}
        self.unary: set[_Task] = set()
        self.streams: set[_Task] = set()
        self.public: set[_Task] = set()
        self._unknown: set[_Task] = set()

    def enter_unary(self, task: _Task) -> None:
        """Register a unary call. Raises ResourceExhaustedError (OVERLOADED) or UnavailableError (SHUTTING_DOWN)."""
        if self._stopping is not None:
            self._refuse_when_stopping()
        if len(self.unary) >= self._max_unary:
            raise errors.ResourceExhaustedError(
                f"{self._max_unary} calls are already under way",
                reason="OVERLOADED",
                retry_after=OVERLOADED_RETRY,
            )
        self.unary.add(task)

    def enter_unknown(self, task: _Task, size: int) -> None:
        """Register a unary call of a public method except health checks, with a request of `size` bytes.

        Raises:
            InvalidArgumentError: it is too large (reason REQUEST_TOO_LARGE).
            ResourceExhaustedError: too many calls (reason OVERLOADED).
        """
        if size > MOST_UNKNOWN_BYTES:
            raise errors.InvalidArgumentError(
                f"the request has {size} bytes; without a caller at most {MOST_UNKNOWN_BYTES} are read",
                reason="REQUEST_TOO_LARGE",
            )
        if len(self._unknown) >= MOST_UNKNOWN_CALLS:
            raise errors.ResourceExhaustedError(
                f"{MOST_UNKNOWN_CALLS} calls that need no caller are already under way",
                reason="OVERLOADED",
                retry_after=OVERLOADED_RETRY,
            )
        self._unknown.add(task)

    def enter_stream(self, task: _Task) -> None:
        """Register a stream. Raises UnavailableError (SHUTTING_DOWN)."""
        self._refuse_when_stopping()
        self.streams.add(task)

    def leave(self, task: _Task) -> None:
        """Unregister a call."""
        self.unary.discard(task)
        self.streams.discard(task)
        if task in self.public:
            self.public.remove(task)
            self._unknown.discard(task)
        self._ended.pop(task, None)

    def end(self, tasks: Iterable[_Task], error: errors.GpuscaleError) -> None:
        """Cancel open calls; each is answered with `error`."""
        for task in tuple(tasks):
            self._ended[task] = error
            task.cancel()

    def why_cancelled(self, task: _Task) -> errors.GpuscaleError | None:
        """The error of a call that `end` cancelled; None if something else did."""
        return self._ended.get(task)

    def stop(self) -> errors.GpuscaleError:
        """Reject all new calls; returns the error for callers."""
        self._stopping = errors.UnavailableError("the server is shutting down", reason="SHUTTING_DOWN")
        return self._stopping

    def _refuse_when_stopping(self) -> None:
        if self._stopping is not None:
            raise errors.UnavailableError(self._stopping.message, reason=self._stopping.reason)


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """Shared by all guards of a server. `default_deadline` is in seconds."""

    authenticator: Authenticator
    calls: OpenCalls
    default_deadline: float
    watcher: CallWatcher | None = None
    connections: Connections = field(default_factory=Connections)
    refusals: Refusals = field(default_factory=Refusals)


class Guard:
    """Guards a handler of any of the four kinds; without `info`, nobody may call it.

    The handler is a coroutine function or, for response streams, an async generator function.
    """

    def __init__(self, path: str, info: MethodInfo | None, handler: Handler, settings: GuardSettings) -> None:
        self._path = path
        self._info = info
        self._settings = settings
        self._deserialize = handler.request_deserializer
        self._serialize = handler.response_serializer
        checked = info if info is not None and info.ours and self._deserialize is not None else None
        self._is_right = None if checked is None else quick_check_of(wire.find_method(path).input_type)
        self._pages = checked is not None and checked.pages
        self._tells = info is not None and info.pages
        self._streams_requests = handler.request_streaming
        self._streams_responses = handler.response_streaming
        self._behavior = behavior_of(handler)
        self._generates = inspect.isasyncgenfunction(self._behavior)
        self._implemented = self._generates or inspect.iscoroutinefunction(self._behavior)
        self._unary_responses = not (handler.request_streaming or handler.response_streaming)
        self.handler = self._guarded(handler)

    def _guarded(self, handler: Handler) -> Handler:
        """The handler for gRPC, which decodes and encodes single messages itself to catch errors."""
        info = self._info
        known = info is not None and (info.ours or info.role is not None)
        call = self._watched if self._settings.watcher is not None and known else self._answer
        streams = handler.request_streaming, handler.response_streaming
        decode = self._decode if handler.request_streaming and self._deserialize is not None else None
        return handler_of(
            *streams, call, decode, partial(encoded, self._serialize) if handler.response_streaming else None
        )

    async def _watched(self, request: Any, context: Context) -> Any:
        watcher, info = self._settings.watcher, self._info
        if watcher is None or info is None:
            return await self._answer(request, context)
        answer: Any = None
        began, code = time.monotonic(), grpc.StatusCode.CANCELLED
        watcher.begun()
        try:
            answer = await self._answer(request, context)
            code = grpc.StatusCode.OK
        except grpc.aio.BaseError:
            code = context.code()
            raise
        finally:
            watcher.ended(info, find_principal(), context, request, answer, code, time.monotonic() - began)
        return answer

    async def _answer(self, request: Any, context: Context) -> Any:
        task = asyncio.current_task()
        if task is None:  # gRPC runs each call in a task of its own
            raise RuntimeError("a guarded handler runs in a task")
        begin_call()
        metadata = context.invocation_metadata() or ()
        request_id = request_id_of(metadata)
        call_id.set(request_id)
        named = ((REQUEST_ID_KEY, request_id),)
        try:
            try:
                principal = self._admit(context, metadata)
            except KeysNeededError as needed:
                await needed.fetch()
                principal = self._admit(context, metadata)
            remaining = self._accept(context, principal, metadata, named)
            if self._unary_responses:
                return await self._unary(request, context, task, principal, in_time=remaining is not None)
            return await self._stream(request, context, task, principal)
        except asyncio.CancelledError:
            ended = self._settings.calls.why_cancelled(task)
            if ended is None and task.cancelling():
                raise  # cancelled by the caller
            # Not cancelled itself: the handler leaked another cancellation, which gRPC would leave unanswered.
            failure = ended or self._incident(None)
        except grpc.aio.BaseError as error:
            if not isinstance(error, grpc.aio.UsageError):
                raise  # the handler aborted the call, or the connection is lost
            failure = self._incident(error)
        except Exception as error:  # noqa: BLE001
            failure = _expected(error) or self._incident(error)
        finally:
            self._settings.calls.leave(task)
        if isinstance(failure, errors.UnauthenticatedError):
            self._settings.refusals.note(context.peer(), failure, time.monotonic())
        if self._settings.watcher is not None:
            self._settings.watcher.failed(self._info, failure)
        if not context.done():
            status = to_rpc_status(for_caller(failure))
            trailing = (*status.trailing_metadata, *named)
            await context.abort_with_status(replace(status, trailing_metadata=trailing))
        return None

    def _accept(
        self, context: Context, principal: Principal | None, metadata: Metadata, named: _Named
    ) -> Any:
        """Name the answer of a call that can still be served; returns the seconds left, None without a deadline."""
        if self._deserialize is None:  # the answer to a forwarded call brings metadata of its own
            forwarded_metadata.set(metadata)
        else:
            told = _TOLD[principal.role] if self._tells and principal is not None else ()
            context.set_trailing_metadata((*named, *told))
        remaining: Any = context.time_remaining()  # None without a deadline, unlike in gRPC's stub
        if remaining is not None and remaining <= 0:
            raise errors.DeadlineExceededError("the deadline passed before the call started")
        if not self._implemented:
            raise errors.UnimplementedError(f"{self._path} is not implemented here")
        return remaining

    def _admit(self, context: Context, metadata: Metadata, *, again: bool = False) -> Principal | None:
        """The authorized caller; None in public methods for an unknown one. `again` for an open stream."""
        info = self._info
        if info is None:
            raise errors.PermissionDeniedError(
                f"the contract gives no role for {self._path}", reason="METHOD_WITHOUT_ROLE"
            )
        settings, peer = self._settings, context.peer()
        try:
            principal = settings.authenticator.identify(context, self._path, peer, metadata)
        except errors.UnauthenticatedError:
            if info.role is not None:
                raise
            return None
        if principal.kind != "lease":  # anybody can make one up
            settings.connections.vouched.setdefault(peer, 1)
        if info.role is None:  # credentials keep even a connection for health checks open
            return None
        set_principal(principal)
        if principal.role < info.role or principal.kind == "lease":
            require_for(principal, info)
        if settings.watcher is not None and not again:
            settings.watcher.admit(principal)
        return principal

    async def _unary(
        self, request: bytes, context: Context, task: _Task, principal: Principal | None, *, in_time: bool
    ) -> Any:
        """Handle a unary call; `in_time` if the caller set a deadline."""
        calls = self._settings.calls
        if principal is None or principal.kind == "lease":
            calls.public.add(task)
            if self._info is not None and self._info.ours:
                calls.enter_unknown(task, len(request))
        else:
            calls.enter_unary(task)
        message: Any = request if self._deserialize is None else self._decode(request)
        if self._is_right is not None and not self._is_right(message):
            validate(message)
        seal = wire.open_page(message) if self._pages else ""
        if in_time:
            response = await self._behavior(message, context)
        else:
            # A call that waits has longer; one that waits upstream of a gateway has no deadline here.
            seconds = self._settings.default_deadline
            wait = self._info.wait if self._info is not None else None
            if wait is not None and self._deserialize is not None:
                asked = wire.optional_seconds(message, wait.field)
                seconds += wait.default if asked is None else asked
            limit = asyncio.timeout(seconds if wait is None or self._deserialize is not None else None)
            try:
                async with limit:
                    response = await self._behavior(message, context)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise errors.DeadlineExceededError(
                    f"no answer within {seconds:g} s; the call had no deadline"
                ) from None
        if seal and response.next_page_token:
            response.next_page_token += seal
        return response if self._serialize is None else self._serialize(response)

    async def _stream(self, request: Any, context: Context, task: _Task, principal: Principal | None) -> Any:
        """Handle a call with a stream in either direction; returns the response unless it is a stream."""
        close = self._open_stream(context, task, principal)
        try:
            message = request
            if not (self._streams_requests or self._deserialize is None):
                message = self._decode(request)
                if self._is_right is not None:
                    validate(message)
            if not self._generates:
                response = await self._behavior(message, context)
                if self._streams_responses or self._serialize is None:
                    return response
                return self._serialize(response)
            async with aclosing(self._behavior(message, context)) as responses:
                async for response in responses:
                    await context.write(response)
        finally:
            if close is not None:
                close()
        return None

    def _open_stream(
        self, context: Context, task: _Task, principal: Principal | None
    ) -> Callable[[], None] | None:
        """Register a stream, which ends soon after its token or certificate expires or is revoked; what closes it, if any."""
        calls = self._settings.calls
        if principal is None:
            calls.public.add(task)
        else:
            calls.enter_stream(task)
        if principal is None or principal.kind not in {"token", "certificate", "gateway"}:
            return None
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def check_again() -> None:
            nonlocal timer
            try:
                self._admit(context, context.invocation_metadata() or (), again=True)
            except errors.GpuscaleError as error:
                calls.end((task,), error)
            else:
                timer = loop.call_later(RECHECK_PERIOD, check_again)

        def close() -> None:
            timer.cancel()

        timer = loop.call_later(RECHECK_PERIOD, check_again)
        return close

    def _decode(self, raw: bytes) -> Any:
        """Decode a message. For request streams gRPC calls this, and its error is raised in the handler."""
        try:
            return self._deserialize(raw) if self._deserialize is not None else raw
        except DecodeError:
            raise errors.InvalidArgumentError(
                "the request is not a valid message of the method's request type", reason="MALFORMED_MESSAGE"
            ) from None

    def _incident(self, error: Exception | None) -> errors.GpuscaleError:
        """Log a bug; the caller gets only the request id, which is in the log line."""
        _log.error("call failed unexpectedly", method=self._path, exc_info=error or True)
        return errors.InternalError(f"internal error, request {call_id.get()}")


_REQUEST_ID_KEYS: Final = (REQUEST_ID_KEY, "x-request-id")
_ids: Final = Random()  # noqa: S311 - ids, not secrets
os.register_at_fork(after_in_child=_ids.seed)
_SANE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def request_id_of(metadata: Metadata) -> str:
    """The caller's request id if it has at most 64 plain characters, else a new one."""
    found = ""
    for key, value in metadata:
        if key in _REQUEST_ID_KEYS and isinstance(value, str) and _SANE_ID.fullmatch(value):
            if key == REQUEST_ID_KEY:
                return value
            found = value
    return found or _ids.getrandbits(64).to_bytes(8, "big").hex()


_MAKERS: Final[Mapping[tuple[bool, bool], Callable[..., Handler]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def handler_of(
    streams_requests: bool,
    streams_responses: bool,
    behavior: Callable[[Any, Context], Any],
    decode: Callable[[bytes], Any] | None,
    encode: Callable[[Any], bytes] | None,
) -> Handler:
    """Make a handler of any of the four kinds."""
    return _MAKERS[streams_requests, streams_responses](behavior, decode, encode)


def behavior_of(handler: Handler) -> Callable[[Any, Context], Any]:
    """The servicer's method; gRPC's stub covers only methods of its threaded server."""
    of: Any = handler
    behavior: Callable[[Any, Context], Any] = (
        of.unary_unary or of.unary_stream or of.stream_unary or of.stream_stream
    )
    return behavior


def _expected(error: Exception) -> errors.GpuscaleError | None:
    """The GpuscaleError, also if it is alone in an exception group; None for other errors."""
    grouped: tuple[Exception, ...] = getattr(error, "exceptions", ())
    if len(grouped) == 1:
        return _expected(grouped[0])
    return error if isinstance(error, errors.GpuscaleError) else None


def encoded(serialize: Callable[[Any], bytes] | None, response: Any) -> bytes:
    """Encode a message of a response stream, unless it is encoded already."""
    raw: bytes = response if serialize is None or isinstance(response, bytes) else serialize(response)
    return raw


class Guards(grpc.GenericRpcHandler):
    """The handlers of a server, each in a `Guard` that is created once per method with a role; `divert` is asked first."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._guarded: dict[str, Handler] = {}
        self._diverted: dict[str, tuple[Handler, Handler]] = {}
        self.divert: Divert | None = None

    def add(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Add handlers of services."""
        self._handlers += handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "Handler | None":
        """The guarded handler of a method; None if it is not served (gRPC answers UNIMPLEMENTED)."""
        path = handler_call_details.method
        other = None if self.divert is None else self.divert(handler_call_details)
        if other is not None:
            if path not in self._diverted or self._diverted[path][0] is not other:
                self._diverted[path] = other, Guard(path, find_method(path), other, self._settings).handler
            return self._diverted[path][1]
        guarded = self._guarded.get(path)
        if guarded is not None:
            return guarded
        found = (one.service(handler_call_details) for one in self._handlers)
        handler = next((one for one in found if one is not None), None)
        if handler is None:
            return None
        info = find_method(path)
        guard = Guard(path, info, handler, self._settings)
        if info is not None:  # do not cache unknown methods: their number is unbounded
            self._guarded[path] = guard.handler
        return guard.handler
