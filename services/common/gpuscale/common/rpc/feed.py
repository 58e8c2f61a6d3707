"""A resumable watch: all resources, then changes, for any number of readers.

A room puts changed resources into a `ResourceFeed`, by name; a servicer streams from it. A message is encoded when first read,
once for all readers. For a slow reader the feed keeps one name per changed resource, and sends its latest state.

A deleted resource is sent as removed. One that ended but is still known is sent once, in its last state, and not in the first
round of a new reader. A limited number of both is kept for readers that resume; a reader that was away for longer, or whose
token is from another process, is reset.

Encoded messages of one type can be concatenated: later scalar fields win, repeated fields are appended (protobuf.dev,
"Encoding", last one wins). So a response is joined from parts that were each encoded once.
"""

import asyncio
import hashlib
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any, Final, Generic, NoReturn, TypeVar

from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import BytesValue

from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.filters import compile_filter
from gpuscale.common.wire import seconds

HEARTBEAT: Final = 30.0
"""Seconds without changes after which a reader gets an empty message with a new token."""
KEPT: Final = 10_000
"""Number of removed resources that are kept."""
PERIOD: Final = 1.0
"""Seconds between two looks of a `LookedAtFeed`."""
MESSAGE_BYTES: Final = 1 << 17
"""Size at which a message is sent, so that other work runs between two messages."""
_NOT_SEALED: Final = ("resume_token", "min_interval")
_TOKEN: Final = re.compile(r"(?P<life>[0-9a-f]{16})\.(?P<revision>[0-9]{1,18})\.(?P<seal>[0-9a-f]{8})")

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class FeedView(Generic[V]):
    """What one reader sees: `of` filters resources, `matches` their messages, and `kind` selects the form of a message.

    `brief` gets a resource and its own last result for it (None at first). It returns what the reader knows now, and a shorter
    response than the full message, or None.
    """

    of: Callable[[V], bool] | None = None
    matches: Callable[[Message], bool] | None = None
    kind: Callable[[V], str] = lambda _: ""
    brief: Callable[[V, Any], tuple[Any, bytes | None]] | None = None


@dataclass(slots=True)
class _Entry(Generic[V]):
    """A resource, None if deleted, with its messages by kind and the times they were made."""

    value: V | None
    revision: int
    messages: dict[str, tuple[Message, float]] = field(default_factory=dict[str, tuple[Message, float]])
    encoded: dict[str, tuple[bytes, float]] = field(default_factory=dict[str, tuple[bytes, float]])


class _Reader:
    """The names pending for one reader, oldest first; `known` has the results of `FeedView.brief`."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self._names: dict[str, None] = {}
        self._some = asyncio.Event()

    def mark(self, name: str) -> None:
        self._names[name] = None
        self._some.set()

    async def take(self, until: float) -> Collection[str]:
        """Wait for pending names until a time of the loop, and take them."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._some.wait()
        self._some.clear()
        taken, self._names = self._names, {}
        return taken.keys()


@dataclass(eq=False)
class ResourceFeed(Generic[V]):
    """All resources of one type.

    Args:
        response: class of the streamed responses: the list of resources as field 1, full, removed, resume_token, reset.
        show: makes the message of a resource, in the form of `FeedView.kind`.
        shared: seconds for which an unchanged message is reused; for messages with ages.
        kept: number of removed resources that are kept.
    """

    response: Callable[..., Message]
    show: Callable[[V, str], Message]
    shared: float = inf
    kept: int = KEPT

    def __post_init__(self) -> None:
        self._life = secrets.token_hex(8)
        self._revision = 0
        self._forgotten = 0
        self._live: dict[str, _Entry[V]] = {}
        self._gone: OrderedDict[str, _Entry[V]] = OrderedDict()
        self._readers: set[_Reader] = set()

    @property
    def watched(self) -> bool:
        """Whether there are readers."""
        return bool(self._readers)

    @property
    def reader_count(self) -> int:
        """Number of readers."""
        return len(self._readers)

    @property
    def names(self) -> Collection[str]:
        """The names of all resources."""
        return self._live.keys()

    def get(self, name: str) -> V | None:
        """The resource of a name, or None."""
        entry = self._live.get(name)
        return None if entry is None else entry.value

    def put(self, name: str, value: V, *, wakes: bool = True) -> None:
        """Add or change a resource; not `wakes` for a change that readers need not see now, such as a deadline."""
        entry = self._live.get(name)
        if entry is None:
            self._gone.pop(name, None)
            self._live[name] = _Entry(value, self._next(name))
            return
        entry.value = value
        entry.messages.clear()
        entry.encoded.clear()
        if wakes:
            entry.revision = self._next(name)

    def remove(self, name: str, last: V | None = None) -> None:
        """Remove a resource; readers get its final state `last` if given."""
        if self._live.pop(name, None) is None and last is None:
            return
        self._gone.pop(name, None)
        self._gone[name] = _Entry(last, self._next(name))
        if len(self._gone) > self.kept:
            self._forgotten = self._gone.popitem(last=False)[1].revision

    async def stream(self, request: Any, view: FeedView[V] | None = None) -> AsyncGenerator[bytes]:
        """Stream encoded responses without end; `view` None shows everything. Tokens are bound to the request's other fields.

        Raises InvalidArgumentError: the token is malformed, or of another watch.
        """
        seen: FeedView[V] = view or FeedView()
        since, seal = self._left_off(request)
        least = seconds(request.min_interval) if "min_interval" in request.DESCRIPTOR.fields_by_name else 0.0
        reader, clock = _Reader(), asyncio.get_running_loop().time
        self._readers.add(reader)
        try:
            reset = request.resume_token and since is None
            begin = self.response(reset=True).SerializeToString() if reset else b""
            # Names that a filtered reader may know: those it saw when it left off, or may have seen.
            told: set[str] | None = None
            if seen.of is not None or seen.matches is not None:
                told = set()
                if since is not None:
                    told.update(self._since(since))
                    told.update(
                        name
                        for name, one in self._live.items()
                        if one.revision <= since and self._is_seen(one, seen)
                    )
            tail = self.response(full=True, resume_token=self._token(seal)).SerializeToString()
            for message in self._messages(
                list(self._live) if since is None else self._since(since), seen, told, tail, reader.known
            ):
                yield begin + message
                begin = b""
            due = clock() + HEARTBEAT
            while True:
                await asyncio.sleep(least)
                names = await reader.take(due)
                tail = self.response(resume_token=self._token(seal)).SerializeToString()
                for message in self._messages(names, seen, told, tail, reader.known):
                    if message != tail or clock() >= due:
                        yield message
                        due = clock() + HEARTBEAT
        finally:
            self._readers.discard(reader)

    def _next(self, name: str) -> int:
        """Note a change for all readers; returns its revision."""
        for reader in self._readers:
            reader.mark(name)
        self._revision += 1
        return self._revision

    def _since(self, revision: int) -> list[str]:
        """Names changed after a revision, in order."""
        changed = [one for one in (*self._live.items(), *self._gone.items()) if one[1].revision > revision]
        return [name for name, _ in sorted(changed, key=lambda one: one[1].revision)]

    def _messages(
        self,
        names: Iterable[str],
        view: FeedView[V],
        told: set[str] | None,
        tail: bytes,
        known: dict[str, Any],
    ) -> Iterator[bytes]:
        """Messages about names, in their state when sent; `tail` is appended to the last."""
        parts: list[bytes] = []
        size = 0
        for name in names:
            parts.append(self._part(name, view, told, known))
            size += len(parts[-1])
            if size >= MESSAGE_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
        yield b"".join((*parts, tail))

    def _part(self, name: str, view: FeedView[V], told: set[str] | None, known: dict[str, Any]) -> bytes:
        """The part of a response about a name: the resource, its removal, or nothing."""
        entry = self._live.get(name) or self._gone.get(name)
        if entry is not None and entry.value is not None and self._is_seen(entry, view):
            if told is not None and name in self._live:
                told.add(name)
            elif told is not None:
                told.discard(name)
            if view.brief is not None:
                known[name], brief = view.brief(entry.value, known.get(name))
                if brief is not None:
                    return brief
            kind = view.kind(entry.value)
            made = entry.encoded.get(kind)
            if made is None or monotonic() - made[1] > self.shared:
                message = self._message(entry, entry.value, view).SerializeToString()
                # As a response with it alone, of which field 1 is the list, but without a copy of the message.
                made = BytesValue(value=message).SerializeToString(), monotonic()
                entry.encoded[kind] = made
            return made[0]
        known.pop(name, None)
        if told is not None:
            if name not in told:
                return b""
            told.remove(name)
        return self.response(removed=[name]).SerializeToString()

    def _is_seen(self, entry: _Entry[V], view: FeedView[V]) -> bool:
        value = entry.value
        if value is None or (view.of is not None and not view.of(value)):
            return False
        return view.matches is None or view.matches(self._message(entry, value, view))

    def _message(self, entry: _Entry[V], value: V, view: FeedView[V]) -> Message:
        """The message of a resource; cached if readers filter by messages."""
        kind = view.kind(value)
        made = entry.messages.get(kind)
        if made is None or monotonic() - made[1] > self.shared:
            made = self.show(value, kind), monotonic()
            if view.matches is not None:
                entry.messages[kind] = made
        return made[0]

    def _token(self, seal: str) -> str:
        return f"{self._life}.{self._revision}.{seal}"

    def _left_off(self, request: Any) -> tuple[int | None, str]:
        """The revision at which a reader left off, None if unknown; and the seal of its tokens."""
        rest = type(request)()
        rest.CopyFrom(request)
        for name in _NOT_SEALED:
            if name in rest.DESCRIPTOR.fields_by_name:
                rest.ClearField(name)
        seal = hashlib.sha256(rest.SerializeToString(deterministic=True)).hexdigest()[:8]
        if not request.resume_token:
            return None, seal
        found = _TOKEN.fullmatch(request.resume_token)
        if found is None:
            raise InvalidArgumentError("resume_token is not one that a watch gave", field="resume_token")
        if found["life"] != self._life:
            return None, seal
        if found["seal"] != seal:
            raise InvalidArgumentError(
                "resume_token is not of this watch: repeat the filter that it was given with",
                field="resume_token",
            )
        revision = int(found["revision"])
        return (revision if self._forgotten <= revision <= self._revision else None), seal


class LookedAtFeed(Generic[V]):
    """The feed of one kind of resource that reports no change, so that it is polled while somebody reads. `run` must run.

    Its Watch method streams `response`. `every` returns the current values by name, and `show` makes the message `of` one; equal
    values count as unchanged.
    """

    def __init__(
        self,
        response: Callable[..., Message],
        of: type[Message],
        every: Callable[[], Mapping[str, V]],
        show: Callable[[V], Message],
    ) -> None:
        self._feed: ResourceFeed[V] = ResourceFeed(response, lambda one, _: show(one))
        self._of = of
        self._every = every
        self._begun = asyncio.Event()

    async def stream(self, request: Any) -> AsyncGenerator[bytes]:
        """Encoded responses, without end; InvalidArgumentError for an invalid filter or resume_token."""
        matches = compile_filter(request.filter, self._of) if request.filter.strip() else None
        self._look()
        self._begun.set()
        async for message in self._feed.stream(request, FeedView(matches=matches)):
            yield message

    async def run(self) -> NoReturn:
        """Keep the feed current while it is read."""
        while True:
            await self._begun.wait()
            self._begun.clear()
            while self._feed.watched:
                await asyncio.sleep(PERIOD)
                self._look()

    def _look(self) -> None:
        now = self._every()
        for name in [name for name in self._feed.names if name not in now]:
            self._feed.remove(name)
        for name, one in now.items():
            if self._feed.get(name) != one:
                self._feed.put(name, one)
