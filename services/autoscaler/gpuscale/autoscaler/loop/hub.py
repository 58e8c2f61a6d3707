"""All worker adapters: connections, reports, desired state, log reads; and the wake-ups that follow from their news.

A silent or absent adapter proves nothing about its replicas: they become UNKNOWN, and nothing is stopped or started in their
place until it is heard of again (Ray #58933: a failed listing was taken for "no workers").
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Final, NamedTuple

from gpuscale.autoscaler.domain.planning import AdapterFacts
from gpuscale.autoscaler.domain.replicas import (
    MOST_AT_ONCE,
    DesiredReplica,
    EndReason,
    Goal,
    LogPart,
    Moment,
    Replica,
    ReplicaReport,
    ReplicaState,
    desired_state,
    ended,
    reported,
    stopped,
    unknown_to,
)
from gpuscale.autoscaler.state import store
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common import errors
from gpuscale.common.names import adapter_name, replica_name
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock, uninterrupted, wait_at_most
from gpuscale.common.store.store import Store

ROUNDED = 0.001
"""The resolution of uvloop's timers in seconds: a timer that fires early causes a useless look."""


class Wake:
    """The wake-up of one endpoint. `waiting`: it lacks GPUs or an adapter."""

    def __init__(self) -> None:
        self.waiting = False
        self._event = asyncio.Event()
        self._evaluate = False
        self._changed = False

    def call(self, *, evaluate: bool, changed: bool) -> None:
        """Request a look, and an evaluation of the rules if the spec changed."""
        self._evaluate = self._evaluate or evaluate
        self._changed = self._changed or changed
        self._event.set()

    @property
    def called(self) -> bool:
        """Whether a look was requested since the last one began."""
        return self._event.is_set()

    def answer(self) -> dict[str, bool]:
        """Begin a look; as its arguments: whether an evaluation was requested, and what is on disk may have changed."""
        said = {"evaluate": self._evaluate, "changed": self._changed}
        self._evaluate = self._changed = False
        self._event.clear()
        return said

    async def wait(self, seconds: float) -> None:
        """Wait for a request, at most `seconds`."""
        late = seconds + ROUNDED if seconds > 0.0 else 0.0
        timer = asyncio.get_running_loop().call_later(late, self._event.set)
        try:
            await self._event.wait()
        finally:
            timer.cancel()


class Wakes:
    """The wake-ups of all endpoints."""

    def __init__(self) -> None:
        self._wakes: dict[str, Wake] = {}
        self._arrived: asyncio.Queue[str] = asyncio.Queue()

    def call(self, endpoint: str, *, evaluate: bool = False, changed: bool = True) -> None:
        """Request a look at an endpoint; a new one is announced by `arrival`.

        After writing an endpoint to disk, call it as `changed`.
        """
        if endpoint not in self._wakes:
            self._wakes[endpoint] = Wake()
            self._arrived.put_nowait(endpoint)
        self._wakes[endpoint].call(evaluate=evaluate, changed=changed)

    def call_each(self, endpoints: Iterable[str], *, changed: bool = True) -> None:
        """Request a look at these."""
        for endpoint in sorted(endpoints):
            self.call(endpoint, changed=changed)

    def call_all(self) -> None:
        """Request a look at every endpoint: changes of an adapter may concern any."""
        self.call_each(list(self._wakes), changed=False)

    def call_waiting(self) -> None:
        """Request a look at those that lack GPUs or an adapter, which may have become free."""
        self.call_each([endpoint for endpoint, wake in self._wakes.items() if wake.waiting], changed=False)

    async def arrival(self) -> tuple[str, Wake]:
        """The next new endpoint."""
        endpoint = await self._arrived.get()
        return endpoint, self._wakes[endpoint]

    def forget(self, endpoint: str) -> None:
        """Remove a deleted endpoint; a later request announces it again."""
        self._wakes.pop(endpoint, None)


class Followers:
    """The followers of endpoints. Changes before a look are merged.

    `looked_at` has the endpoints that were changed, or looked at, since they were last taken out; `some` is set if there are any.
    """

    def __init__(self) -> None:
        self._followers: dict[str, set[asyncio.Event]] = {}
        self.looked_at: set[str] = set()
        self.some = asyncio.Event()

    def looked(self, endpoint: str) -> None:
        """Note a look at the endpoint, after which any field of it may have changed, on disk."""
        self.looked_at.add(endpoint)
        self.some.set()

    def tell(self, endpoint: str) -> None:
        """The endpoint may have changed or be gone, on disk."""
        self.looked(endpoint)
        for event in self._followers.get(endpoint, ()):
            event.set()

    @contextmanager
    def follow(self, endpoint: str) -> Generator[asyncio.Event]:
        """An event that every later change sets; its owner clears it before each look."""
        event = asyncio.Event()
        followers = self._followers.setdefault(endpoint, set())
        followers.add(event)
        try:
            yield event
        finally:
            followers.discard(event)
            if not followers and self._followers.get(endpoint) is followers:
                del self._followers[endpoint]


TIMEOUT: Final = 5.0
"""Seconds to wait for an adapter's answer."""


class LogQuestion(NamedTuple):
    """Asks for at most `most` bytes of a replica's log from `offset`; None: from its end."""

    number: int
    replica: str
    offset: int | None
    most: int


RESEND = 2.0
"""Seconds after which an unacknowledged state is sent again."""


class AdapterSession:
    """A connection of an adapter; `facts.live` is unused here. `next_revision` only grows."""

    def __init__(self, facts: AdapterFacts, next_revision: Callable[[], int]) -> None:
        self.facts = facts
        self.reported: Mapping[str, ReplicaReport] | None = None
        self.unknown_since: dict[str, float] = {}
        self._next_revision = next_revision
        self._revision = 0
        self._acknowledged = 0
        self._lines: Sequence[DesiredReplica] | None = None
        self._stop_told: dict[str, int] = {}
        self._asked = 0
        self._unsent: dict[int, LogQuestion] = {}
        self._answers: dict[int, asyncio.Future[LogPart]] = {}
        self._changed = asyncio.Event()
        self._closed = False
        self._error: errors.GpuscaleError | None = None

    def heard(self, revision: int, reported: Mapping[str, ReplicaReport]) -> frozenset[str]:
        """Take a report; returns the replicas this adapter does not have although it knows they should stop."""
        self.reported = reported
        self._acknowledged = revision
        told = (name for name, since in self._stop_told.items() if revision >= since and name not in reported)
        return frozenset(told)

    def tell(self, lines: Sequence[DesiredReplica]) -> None:
        """Send this state if it differs from the last one sent."""
        if lines == self._lines:
            return
        self._lines = lines
        self._revision = self._next_revision()
        self._stop_told = {name: self._stop_told.get(name, self._revision) for name in stopped(lines)}
        self._changed.set()

    async def read_log(self, replica: str, offset: int | None, most: int) -> LogPart:
        """Ask the adapter for part of a replica's log; ResourceExhaustedError, UnavailableError."""
        if self._closed:
            raise _disconnected()
        if len(self._answers) >= MOST_AT_ONCE:
            busy = f"{MOST_AT_ONCE} parts of logs are being read from this adapter: try again"
            raise errors.ResourceExhaustedError(busy, reason="LOGS_BUSY", retry_after=1.0)
        self._asked = number = self._asked + 1
        self._unsent[number] = LogQuestion(number, replica, offset, most)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._changed.set()
        try:
            async with asyncio.timeout(TIMEOUT):
                return await self._answers[number]
        except TimeoutError:
            text = f"the adapter of {replica} did not answer within {TIMEOUT:g} s"
            raise errors.UnavailableError(text, reason="ADAPTER_SILENT") from None
        finally:
            del self._answers[number]
            self._unsent.pop(number, None)  # over a blocked stream they could accumulate

    def answer(self, number: int, part: LogPart) -> None:
        """Take part of a log; it is dropped if nobody awaits it any more."""
        future = self._answers.get(number)
        if future is not None and not future.done():
            future.set_result(part)

    def close(self, error: errors.GpuscaleError | None = None) -> None:
        """End `updates`, with an optional error. Only the first call counts."""
        if not self._closed:
            self._closed, self._error = True, error
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(_disconnected())
            self._changed.set()

    async def updates(self) -> AsyncGenerator[tuple[int, Sequence[DesiredReplica]] | LogQuestion]:
        """Changes of the state, repeated until acknowledged, and log questions; raises the error given to `close`."""
        while not self._closed:
            self._changed.clear()
            for number in tuple(self._unsent):  # later ones come after the state
                if (question := self._unsent.pop(number, None)) is not None:
                    yield question
            if self._lines is not None and self._acknowledged < self._revision:
                yield self._revision, self._lines
                if self._changed.is_set():
                    continue
            await wait_at_most(self._changed, RESEND)
        if self._error is not None:
            raise self._error


def _disconnected() -> errors.UnavailableError:
    return errors.UnavailableError("the connection of the adapter ended", reason="ADAPTER_DISCONNECTED")


SILENT = 15.0
"""Seconds without a report after which an adapter is silent."""
STRAY = 5.0
"""Seconds for which an adapter reports an unknown replica before it is told to stop it."""
_REVISIONS_PER_START = 1_000_000_000

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterView:
    """An adapter for display: its facts, its report, and when it was last heard of."""

    facts: AdapterFacts
    replica_count: int
    last_seen: datetime


class AdapterHub:
    """Manages adapter connections. `starts`: how often this program was started, so that revisions grow."""

    def __init__(self, store: Store, clock: Clock, starts: int, wakes: Wakes) -> None:
        self._store = store
        self._clock = clock
        self._revision = starts * _REVISIONS_PER_START
        self._wakes = wakes
        self._sessions: dict[str, AdapterSession] = {}
        self._known: dict[str, AdapterFacts] = {}
        self._seen: dict[str, Moment] = {}

    def connect(self, facts: AdapterFacts) -> AdapterSession:
        """Open a connection; an earlier one of the adapter ends with AbortedError.

        FailedPreconditionError if that one is of another kind: two adapters share an id, and each would start the other's
        replicas.
        """
        before, name = self._sessions.get(facts.id), adapter_name(facts.id)
        if before is not None:
            if before.facts.kind != facts.kind:
                raise errors.FailedPreconditionError(
                    f"{name} is connected, and of kind {before.facts.kind}: use another id for kind {facts.kind}",
                    reason="OTHER_KIND",
                    metadata={"name": name},
                )
            before.close(errors.AbortedError(f"another connection of {name} took over", reason="TAKEN_OVER"))
        session = AdapterSession(facts, self._next_revision)
        self._sessions[facts.id] = session
        self._known[facts.id] = facts
        self._seen[facts.id] = self._moment()
        _log.info(
            "adapter connected",
            adapter=facts.id,
            kind=facts.kind,
            node=facts.node,
            took_over=before is not None,
        )
        return session

    def disconnect(self, session: AdapterSession) -> None:
        """Close a connection; harmless if another one took over."""
        session.close()
        adapter = session.facts.id
        if self._sessions.get(adapter) is session:
            del self._sessions[adapter]
            _log.info("adapter disconnected", adapter=adapter)
            self._wakes.call_all()

    @uninterrupted
    async def report(
        self, session: AdapterSession, revision: int, reports: Mapping[str, ReplicaReport]
    ) -> None:
        """Take a report of all replicas of an adapter, by name; UnavailableError if it cannot be stored."""
        adapter = session.facts.id
        if self._sessions.get(adapter) is not session:
            return
        first = session.reported is None
        at = self._seen[adapter] = self._moment()
        absent = session.heard(revision, reports)

        def take(connection: Connection) -> set[str]:
            """Update the adapter's replicas; returns the endpoints of those that changed."""
            changed: set[str] = set()
            for before in store.of_adapter(connection, adapter):
                name = replica_name(before.endpoint, before.id)
                report, after = reports.get(name), before
                if report is not None:
                    after = reported(before, report, at)
                elif name in absent and before.goal is Goal.STOP:
                    reason = before.reason or "its adapter does not have it"
                    after = ended(before, ReplicaState.STOPPED, reason, at)
                if after != before:
                    store.save_replica(connection, after)
                    changed.add(after.endpoint)
            return changed

        changed = await self._store.write(take, frees=True)
        await self.refresh([adapter])
        self._wakes.call_each(changed)
        if first:
            self._wakes.call_all()

    async def refresh(self, adapters: Iterable[str]) -> None:
        """Send these adapters their current desired state. One that has not reported yet gets nothing."""
        for adapter in sorted(adapters):
            session = self._sessions.get(adapter)
            if session is None or session.reported is None:
                continue
            rows = await self._store.read(partial(store.of_adapter, adapter=adapter))
            own = {replica_name(replica.endpoint, replica.id): replica for replica in rows}
            now = self._clock.now()
            session.unknown_since = unknown_to(own, session.reported, session.unknown_since, now)
            strays = {name for name, since in session.unknown_since.items() if now - since > STRAY}
            session.tell(desired_state(own, session.reported, strays))

    def facts(self) -> list[AdapterFacts]:
        """Every adapter that was ever connected, and whether it is live; by id."""
        return [replace(self._known[id_], live=self.live(id_)) for id_ in sorted(self._known)]

    def live(self, adapter: str) -> bool:
        """Whether the state of an adapter's replicas is known: it is connected, and has reported recently."""
        session = self._sessions.get(adapter)
        if session is None or session.reported is None:
            return False
        return self._clock.now() - self._seen[adapter].now <= SILENT

    def silent(self, replicas: Iterable[Replica]) -> set[str]:
        """The adapters of these replicas that are not live."""
        return {one.adapter for one in replicas if one.adapter and not self.live(one.adapter)}

    @uninterrupted
    async def forget(self, adapter: str) -> list[str]:
        """Give up an adapter that never comes back: its replicas end without its report; returns their names.

        FailedPreconditionError while it is connected, NotFoundError if it was never heard of and has no replicas.
        """
        name = adapter_name(adapter)
        if adapter in self._sessions:
            raise errors.FailedPreconditionError(
                f"{name} is connected: it can still report on its replicas",
                reason="ADAPTER_CONNECTED",
                metadata={"name": name},
            )
        at = self._moment()
        reason = f"adapter {adapter} was given up by an operator; whether it runs on is unknown"

        def give_up(connection: Connection) -> list[Replica]:
            rows = store.of_adapter(connection, adapter)
            lost = (ended(one, ReplicaState.FAILED, reason, at, EndReason.ADAPTER_FORGOTTEN) for one in rows)
            store.save_replicas(connection, lost)
            return rows

        lost = await self._store.write(give_up, frees=True)
        if not lost and adapter not in self._known:
            raise errors.NotFoundError.of(name)
        # It may have come back meanwhile: then what it still runs is stopped.
        if adapter not in self._sessions:
            self._known.pop(adapter, None)
            self._seen.pop(adapter, None)
        _log.warning("adapter forgotten", adapter=adapter, replicas=len(lost))
        self._wakes.call_each({replica.endpoint for replica in lost})
        return [replica_name(replica.endpoint, replica.id) for replica in lost]

    async def read_log(self, one: Replica, offset: int | None, most: int) -> LogPart:
        """Ask the adapter of a replica, if it keeps logs, for part of the replica's log; raises like the session's."""
        name, session = adapter_name(one.adapter), self._sessions.get(one.adapter)
        if session is None:
            raise errors.UnavailableError(f"{name} is not connected", reason="ADAPTER_DISCONNECTED")
        if not session.facts.capabilities.logs:
            raise errors.FailedPreconditionError(f"{name} keeps no logs of replicas", reason="NO_LOG")
        return await session.read_log(replica_name(one.endpoint, one.id), offset, most)

    def views(self) -> list[AdapterView]:
        """Every adapter for display, by id."""
        counts = {id_: len(session.reported or ()) for id_, session in self._sessions.items()}
        return [
            AdapterView(facts, counts.get(facts.id, 0), self._seen[facts.id].wall) for facts in self.facts()
        ]

    def _next_revision(self) -> int:
        self._revision += 1
        return self._revision

    def _moment(self) -> Moment:
        return Moment(self._clock.now(), self._clock.wall())
