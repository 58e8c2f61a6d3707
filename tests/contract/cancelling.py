"""Services of one room without a network, whose calls a test cancels at any await, over copies of their state."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from types import coroutine
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import message_factory
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from gpuscale.common import wire
from gpuscale.common.rpc.interceptor import Guard, GuardSettings, OpenCalls
from gpuscale.common.rpc.server import HandlerCollector, Registration
from gpuscale.common.rpc.status import DETAILS_KEY
from gpuscale.common.security.auth import Authenticator, find_method

Opened: TypeAlias = AbstractAsyncContextManager[tuple[Registration, ...]]


class RefusedError(Exception):
    """A call ended with a status: its code, reason and message."""


class Context:
    """What a handler is told of its call: one of this host, with time."""

    def __init__(self, requests: Sequence[Message]) -> None:
        self.written: list[Any] = []
        self._requests = _stream(requests)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_trailing_metadata(self, metadata: object) -> None:
        """Only what adds to it reads it."""

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> float:
        return 30.0

    def done(self) -> bool:
        return False

    async def read(self) -> Any:
        return await anext(self._requests, grpc.aio.EOF)

    async def write(self, message: Any) -> None:
        self.written.append(message)
        await asyncio.sleep(0)

    async def abort_with_status(self, status: Any) -> NoReturn:
        info, sent = error_details_pb2.ErrorInfo(), dict(status.trailing_metadata)[DETAILS_KEY]
        status_pb2.Status.FromString(sent).details[0].Unpack(info)
        raise RefusedError(f"{status.code}: {info.reason}: {status.details}")


class Room:
    """The guarded handlers of one room, called by path."""

    def __init__(self, registrations: Sequence[Registration]) -> None:
        found = HandlerCollector()
        for registration in registrations:
            found.add(registration)
        settings = GuardSettings(Authenticator(), OpenCalls(100), 30.0)
        self.handlers = {
            path: (handler, Guard(path, find_method(path), handler, settings).handler)
            for path, handler in found.handlers.items()
        }

    async def call(self, path: str, *requests: Message) -> Any:
        """Call a method; returns its answer, or the last one of a stream."""
        return await asyncio.create_task(self._call(path, *requests))  # as gRPC, in a task of its own

    async def cancelled(self, at: int, path: str, *requests: Message) -> bool:
        """Call a method and cancel it at the await of that number; False where it has fewer."""
        return await asyncio.create_task(_cancelled(self._call(path, *requests), at))

    async def _call(self, path: str, *requests: Message) -> Any:
        handler, guarded = self.handlers[path]
        context: Any = Context(requests)
        if handler.request_streaming and handler.response_streaming:
            await guarded.stream_stream(_stream(requests), context)
        elif handler.request_streaming:
            raw = await guarded.stream_unary(_stream(requests), context)
            return _response_class(path).FromString(raw)
        elif handler.response_streaming:
            await guarded.unary_stream(requests[0].SerializeToString(), context)
        else:
            raw = await guarded.unary_unary(requests[0].SerializeToString(), context)
            return _response_class(path).FromString(raw)
        return context.written[-1] if context.written else None


def _response_class(path: str) -> type[Message]:
    method = wire.find_method(path)
    return message_factory.GetMessageClass(method.output_type)


async def _stream(messages: Sequence[Message]) -> AsyncIterator[Message]:
    for message in messages:
        yield message
    await asyncio.sleep(0.05)


async def _cancelled(work: Coroutine[Any, Any, Any], at: int) -> bool:
    reached: list[int] = []
    try:
        await _stepped(work, at, reached)
    except (asyncio.CancelledError, RefusedError):
        if not reached:
            raise
    return bool(reached)


@coroutine
def _stepped(work: Coroutine[Any, Any, Any], at: int, reached: list[int]) -> Generator[Any, None, Any]:
    """Run a coroutine in this task, and cancel the task when it is suspended for the time of that number."""
    resume: Callable[[], Any] = partial(work.send, None)
    for step in itertools.count(1):
        try:
            future = resume()
        except StopIteration as ended:
            return ended.value
        if step == at:
            reached.append(step)
            task = asyncio.current_task()
            task.cancel()
        try:
            yield future
            resume = partial(work.send, None)
        except BaseException as error:  # noqa: BLE001 - passed on
            resume = partial(work.throw, error)
    return None


@asynccontextmanager
async def opened(opening: Opened) -> AsyncGenerator[Room]:
    async with opening as registrations:
        yield Room(registrations)


def copied(state: Path, to: Path) -> Path:
    """The state as a kill at this moment would leave it."""
    to.mkdir(mode=0o700)
    for file in state.iterdir():
        if file.suffix == ".db":
            source = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
            target = sqlite3.connect(to / file.name)
            with closing(source), closing(target):
                source.backup(target)
        elif not file.name.endswith(("-wal", "-shm")):
            shutil.copy(file, to)
    return to
