"""What every method of a fake server does first: checks the request by the contract, and fails where a test wants that."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.status import to_rpc_status
from gpuscale.common.rpc.validation import validate

# The class is generic to type checkers only; which method takes which message is known at run time.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Faults:
    """Errors that calls are to be answered with, by the name of the method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: defaultdict[str, deque[GpuscaleError]] = defaultdict(deque)

    def plan(self, method: str, error: GpuscaleError, times: int) -> None:
        """The next `times` calls of a method fail."""
        with self._lock:
            self._planned[method].extend([error] * times)

    def raise_next(self, method: str) -> None:
        """Fail, if that is planned.

        Raises:
            GpuscaleError: it is.
        """
        with self._lock:
            planned = self._planned[method]
            error = planned.popleft() if planned else None
        if error is not None:
            raise error


class Handlers(grpc.GenericRpcHandler):
    """The methods that some servicers have; others of their services are answered UNIMPLEMENTED."""

    def __init__(self, faults: Faults, *servicers: Any) -> None:
        self._faults = faults
        self._methods = {
            f"/{servicer.service}/{method.name}": self._handler(method, getattr(servicer, method.name))
            for servicer in servicers
            for method in descriptor_pool.Default().FindServiceByName(servicer.service).methods
            if hasattr(servicer, method.name)
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "_Handler | None":
        """The handler of a method; None for a method that there is not."""
        return self._methods.get(handler_call_details.method)

    def _handler(self, method: MethodDescriptor, work: Callable[[Any, Any], Any]) -> _Handler:
        def one(request: Any, context: grpc.ServicerContext) -> Any:
            with _answered(context):
                self._check(method, request)
                return work(request, context)

        def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with _answered(context):
                self._check(method, request)
                yield from work(request, context)

        decode = message_factory.GetMessageClass(method.input_type).FromString
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, decode, _encode)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, decode, _encode)
        return grpc.unary_unary_rpc_method_handler(one, decode, _encode)

    def _check(self, method: MethodDescriptor, request: object) -> None:
        self._faults.raise_next(method.name)
        if isinstance(request, Message):
            validate(request)


@contextmanager
def _answered(context: grpc.ServicerContext) -> Generator[None]:
    """Errors of the tree end the call with their status."""
    try:
        yield
    except GpuscaleError as error:
        _fail(context, error)


def _fail(context: grpc.ServicerContext, error: GpuscaleError) -> NoReturn:
    context.abort_with_status(to_rpc_status(error))


def _encode(message: Message) -> bytes:
    return message.SerializeToString()
