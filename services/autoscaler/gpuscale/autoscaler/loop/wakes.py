"""Who asks for a look at an endpoint, who follows it, and which queue watchers it reads."""

import asyncio
from collections.abc import Generator, Iterable
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress

from gpuscale.common.names import endpoint_name


class Wake:
    """The call of one endpoint. `waiting`: it lacks GPUs or an adapter."""

    def __init__(self) -> None:
        self.waiting = False
        self._event = asyncio.Event()
        self._evaluate = False

    def call(self, *, evaluate: bool = False) -> None:
        """Ask for a look, and for an evaluation of the rules where the spec changed."""
        self._evaluate = self._evaluate or evaluate
        self._event.set()

    @property
    def called(self) -> bool:
        """Whether somebody called since the last look began."""
        return self._event.is_set()

    def answer(self) -> bool:
        """Begin to look; whether an evaluation was asked for."""
        evaluate, self._evaluate = self._evaluate, False
        self._event.clear()
        return evaluate

    async def wait(self, seconds: float) -> None:
        """Until somebody calls, or so many seconds have passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._event.wait()


class Wakes:
    """The calls of all endpoints."""

    def __init__(self) -> None:
        self._wakes: dict[str, Wake] = {}
        self._arrived: asyncio.Queue[str] = asyncio.Queue()

    def call(self, endpoint: str, *, evaluate: bool = False) -> None:
        """Ask for a look at an endpoint; one that was not known before is announced by `arrival`."""
        if endpoint not in self._wakes:
            self._wakes[endpoint] = Wake()
            self._arrived.put_nowait(endpoint)
        self._wakes[endpoint].call(evaluate=evaluate)

    def call_each(self, endpoints: Iterable[str]) -> None:
        """Ask for a look at these."""
        for endpoint in sorted(endpoints):
            self.call(endpoint)

    def call_all(self) -> None:
        """Ask for a look at every endpoint: it may concern any."""
        self.call_each(list(self._wakes))

    def call_waiting(self) -> None:
        """Ask for a look at those that lack something: GPUs or an adapter may have become free."""
        self.call_each([endpoint for endpoint, wake in self._wakes.items() if wake.waiting])

    async def arrival(self) -> tuple[str, Wake]:
        """The next endpoint that was not known before."""
        endpoint = await self._arrived.get()
        return endpoint, self._wakes[endpoint]

    def forget(self, endpoint: str) -> None:
        """The endpoint is gone; a call after this one announces it anew."""
        self._wakes.pop(endpoint, None)


class Followers:
    """Who follows which endpoint. Any number of changes before somebody looks are one."""

    def __init__(self) -> None:
        self._followers: dict[str, set[asyncio.Event]] = {}

    def tell(self, endpoint: str) -> None:
        """The endpoint may have changed, or be gone; what changed is on disk."""
        for event in self._followers.get(endpoint, ()):
            event.set()

    @contextmanager
    def follow(self, endpoint: str) -> Generator[asyncio.Event]:
        """An event that every change sets from now on; its owner clears it before each look."""
        event = asyncio.Event()
        followers = self._followers.setdefault(endpoint, set())
        followers.add(event)
        try:
            yield event
        finally:
            followers.discard(event)
            if not followers and self._followers.get(endpoint) is followers:
                del self._followers[endpoint]


class WatcherUses:
    """Kept beside the stored specs: a watcher is entered before a spec that names it is stored."""

    def __init__(self) -> None:
        self._watchers: dict[str, AbstractSet[str]] = {}

    def of(self, watcher: str) -> list[str]:
        """Names of the endpoints that read a watcher."""
        return [endpoint_name(one) for one, watchers in sorted(self._watchers.items()) if watcher in watchers]

    def reads(self, endpoint: str) -> AbstractSet[str]:
        """Ids of the watchers that an endpoint reads."""
        return self._watchers.get(endpoint, frozenset())

    def set(self, endpoint: str, watchers: AbstractSet[str]) -> None:
        """What an endpoint reads from now on; nothing for one that is gone."""
        if watchers:
            self._watchers[endpoint] = watchers
        else:
            self._watchers.pop(endpoint, None)
