"""Sending notifications: an outbox on disk, at-least-once delivery with back-off, and dead letters for what cannot be sent.

A letter is written in the transaction of its event, and deleted once its target accepted it: after a kill in between, it is
sent again with the same id. Targets do not wait for each other. Each attempt resolves the target's address once, and connects
to the address that was checked: no rebinding of names, no redirects, no proxy.
"""

import asyncio
import heapq
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias
from urllib.parse import urlsplit

from gpuscale.allocator.domain import notifications
from gpuscale.allocator.domain.model import Node, NodeState, Reservation
from gpuscale.allocator.state.policies import Letter, PolicyStore
from gpuscale.allocator.usecases.declarations import Declarations
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.names import gpu_name, node_name
from gpuscale.common.runtime.logs import Attempts, get_logger
from gpuscale.common.runtime.tasks import Clock, TaskScope, hit_async, wait_at_most

if TYPE_CHECKING:
    import httpx

MOST_WAITING = 10_000
"""Most letters waiting, over all targets; further events are dropped and logged."""
MOST_DEAD = 1000
MOST_ATTEMPTS = 14
"""Attempts before a letter is dead: about eight hours with these waits."""
FIRST_WAIT, LONGEST_WAIT = 2.0, 3600.0
TIMEOUT = 10.0
"""Seconds for an attempt."""
DOWN_AFTER = 60.0
"""Seconds without a node until it is reported as down: a restarted fleet knows none at first."""
_SILENT = f"down: nothing was heard of it for {DOWN_AFTER:g} s"
LOOK = 5.0
_log = get_logger(__name__)
_Dues: TypeAlias = list[tuple[float, int]]


@dataclass(eq=False)
class Notifying:
    """Sends notifications. `open_notifying` makes one; then `run` must run."""

    targets: Declarations[notifications.Webhook]
    store: PolicyStore
    clock: Clock
    allowed: notifications.Networks
    ca_file: Path | None = None
    _letters: dict[int, Letter] = field(default_factory=dict[int, Letter], init=False)
    _due: dict[str, _Dues] = field(default_factory=dict[str, _Dues], init=False)
    _number: int = field(default=0, init=False)
    _dropped: int = field(default=0, init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _down: dict[str, float] = field(default_factory=dict[str, float], init=False)
    _bad: dict[str, str] = field(default_factory=dict[str, str], init=False)
    _told: set[str] = field(default_factory=set[str], init=False)

    async def load(self) -> None:
        """Load what is on disk; pending letters are sent soon."""
        await self.targets.load()
        self._told = await self.store.told()
        self._down = {one: self.clock.now() for one in self._told if "/gpus/" not in one}
        self.targets.changed = self._forget
        self.posted(await self.store.letters())
        # Receivers drop numbers they have seen: each run continues from its start time, as delivered letters are gone.
        micros = int(self.clock.wall().timestamp() * 1e6)
        self._number = max(*self._letters, self._number, micros)

    def _forget(self) -> None:
        """Targets have changed: drop what belongs to removed ones."""
        for one in self.every():
            if self.targets.spec(one.target) is None:
                del self._letters[one.number]
        self._due = {key: due for key, due in self._due.items() if self.targets.spec(key) is not None}
        self._wake.set()

    def letters(self, events: Sequence[notifications.NotifiedEvent]) -> list[Letter]:
        """The letters to write for events, one for each target that wants them; `posted` then sends them."""
        found: list[Letter] = []
        for event in events:
            for key, _, target in self.targets.specs():
                if not target.wants(event):
                    continue
                if len(self._letters) + len(found) >= MOST_WAITING + MOST_DEAD:
                    self._dropped += 1
                    _log.warning("too many pending notifications", target=key, dropped=self._dropped)
                    continue
                self._number += 1
                found.append(Letter(self._number, key, event))
        return found

    def of_changes(self, pairs: Sequence[tuple[Reservation | None, Reservation]]) -> list[Letter]:
        """The letters to write with changed reservations; each comes with its earlier value."""
        if not len(self.targets):
            return []
        now, wall = self.clock.now(), self.clock.wall()
        return self.letters(
            [event for was, one in pairs for event in notifications.of_change(was, one, now, wall)]
        )

    def posted(self, letters: Sequence[Letter]) -> None:
        """These letters are on disk now."""
        for one in letters:
            self._letters[one.number] = one
            if not one.dead:
                self._put(one, 0.0)

    def every(self) -> list[Letter]:
        """The undelivered letters, oldest first."""
        return [self._letters[number] for number in sorted(self._letters)]

    def seen(self, nodes: Sequence[Node]) -> None:
        """The view has taken in nodes: `run` reports their new problems."""
        now = self.clock.now()
        for node in nodes:
            if node.state is not NodeState.OFFLINE or node.forgotten:
                self._down.pop(node_name(node.id), None)
            else:
                self._down.setdefault(node_name(node.id), now)
            for gpu in node.gpus:
                name = gpu_name(node.id, gpu.uuid)
                if gpu.quarantine or name in self._bad or name in self._told:  # few of the fleet's GPUs
                    self._bad[name] = gpu.quarantine
            if node.forgotten:
                gone = f"{node_name(node.id)}/"
                self._bad |= dict.fromkeys((one for one in self._told if one.startswith(gone)), "")

    async def run(self, followed: Callable[[], bool]) -> NoReturn:
        """Send for ever, one letter at a time to each target; `followed` says whether the fleet is connected."""
        busy: dict[str, asyncio.Task[None]] = {}
        posting = Attempts(_log, "cannot write notifications", GpuscaleError)
        async with TaskScope() as scope:
            while True:
                if followed():
                    with posting:
                        await self._tell_of_nodes()
                loop = asyncio.get_running_loop()
                busy = {key: task for key, task in busy.items() if not task.done()}
                for key, due in self._due.items():
                    if key not in busy and due and due[0][0] <= loop.time():
                        busy[key] = scope.start(f"notify {key}", self._send_due(key))
                self._wake.clear()
                idle = [due for key, due in self._due.items() if due and key not in busy]
                first = min((due[0][0] for due in idle), default=0.0)
                pause = min(LOOK, max(0.05, first - loop.time())) if first else LOOK
                await wait_at_most(self._wake, pause)

    async def _tell_of_nodes(self) -> None:
        """Report nodes that are down and GPUs in quarantine, and record it: a restart knows what was reported."""
        now, wall = self.clock.now(), self.clock.wall()
        bad = {name: f"quarantined: {text}" for name, text in self._bad.items() if text}
        bad |= {node: _SILENT for node, since in self._down.items() if since <= now - DOWN_AFTER}
        over = [
            one
            for one in self._told - bad.keys()  # a GPU not seen since the start may still be in quarantine
            if (one in self._bad if "/gpus/" in one else one not in self._down)
        ]
        kinds = notifications.EventKind.NODE_DOWN, notifications.EventKind.GPU_QUARANTINED
        events = [
            notifications.NotifiedEvent(kinds["/gpus/" in name], name, f"{name} is {text}", wall)
            for name, text in bad.items()
            if name not in self._told
        ]
        if not (events or over):
            return
        letters = self.letters(events)
        await hit_async("allocator.notify.before_post")
        await self.store.post(letters, [one.subject for one in events], over)
        self._told |= {one.subject for one in events}
        self._told -= set(over)
        self.posted(letters)

    async def _send_due(self, key: str) -> None:
        """Send what is due to a target, oldest first; after a failure the others go on."""
        loop, due = asyncio.get_running_loop(), self._due[key]
        while due and due[0][0] <= loop.time():
            _, number = heapq.heappop(due)
            letter, target = self._letters.get(number), self.targets.spec(key)
            if target is None or letter is None or letter.dead:
                continue
            problem = await self._send(target, letter)
            try:
                if not problem:
                    await self.store.settle([letter.number], [])
                    self._letters.pop(letter.number, None)
                    continue
                _log.warning("a target did not accept a notification", target=key, problem=problem)
                attempts = letter.attempts + 1
                failed = replace(letter, attempts=attempts, problem=problem, dead=attempts >= MOST_ATTEMPTS)
                dead = (
                    [one.number for one in self.every() if one.dead][: -MOST_DEAD + 1] if failed.dead else []
                )
                await self.store.settle(dead, [failed])
                for one in dead:
                    del self._letters[one]
                self._letters[letter.number] = failed
                if not failed.dead:
                    self._put(failed, min(LONGEST_WAIT, FIRST_WAIT * 2.0**letter.attempts))
            except GpuscaleError as error:
                _log.warning("cannot write the results of notifications", problem=error.message)
                self._put(letter, LONGEST_WAIT if not problem else FIRST_WAIT)
        self._wake.set()

    def _put(self, letter: Letter, wait: float) -> None:
        at = asyncio.get_running_loop().time() + wait
        heapq.heappush(self._due.setdefault(letter.target, []), (at, letter.number))
        self._wake.set()

    async def _send(self, target: notifications.Webhook, letter: Letter) -> str:
        """Send once; the problem, without the address, which may be a secret. Empty if the target accepted it."""
        import httpx

        body, seconds = notifications.body_of(letter.event, letter.number), int(self.clock.wall().timestamp())
        headers = {"content-type": "application/json", "user-agent": "gpuscale"}
        if target.secret:
            headers[notifications.SIGNATURE] = notifications.signature(target.secret, body, seconds)
        try:
            async with asyncio.timeout(TIMEOUT):
                url = httpx.URL(target.url)
                port = url.port or (443 if url.scheme == "https" else 80)
                found = await asyncio.get_running_loop().getaddrinfo(url.host, port)
                addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
                if not addresses or not all(notifications.permitted(one, self.allowed) for one in addresses):
                    return f"{url.host} has no address that allocator.notify_networks allows"
                request = self._client.stream(
                    "POST",
                    url.copy_with(host=addresses[0]),
                    content=body,
                    headers={**headers, "host": url.netloc.decode()},
                    extensions={"sni_hostname": url.host},
                )
                async with request as response:
                    return "" if response.is_success else f"it answered {response.status_code}"
        except TimeoutError:
            return f"no answer within {TIMEOUT:g} s"
        except httpx.RemoteProtocolError:
            return "it gave no answer in HTTP"
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return _why_unreachable(error)

    @cached_property
    def _client(self) -> "httpx.AsyncClient":
        import httpx

        trusted = httpx.create_ssl_context(trust_env=False)
        if self.ca_file is not None:
            trusted.load_verify_locations(self.ca_file)
        alone = httpx.Limits(max_keepalive_connections=0)  # a connection was verified for one host
        return httpx.AsyncClient(
            verify=trusted, trust_env=False, follow_redirects=False, timeout=TIMEOUT, limits=alone
        )


def _why_unreachable(error: BaseException) -> str:
    """Why a request failed, by the cause that the system named: texts of HTTP errors may have the address."""
    while (number := getattr(error, "errno", None)) is None and (why := error.__cause__ or error.__context__):
        error = why
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):  # its number is none of the system
        return f"cannot be reached over TLS: {(error.reason or 'no reason').replace('_', ' ').lower()}"
    if isinstance(error, OSError) and number is not None:  # of names that are not found: negative
        return f"cannot be reached: {os.strerror(number) if number > 0 else error.strerror}"
    return f"cannot be reached: {type(error).__name__}"


async def open_notifying(
    store: PolicyStore,
    decode: Callable[[str], notifications.Webhook],
    clock: Clock,
    allowed: Sequence[str],
    ca_file: Path | None,
) -> Notifying:
    """A sender to the stored targets, also to addresses in the `allowed` networks and to certificates of the authority `ca_file`."""
    targets = Declarations("targets", store, decode, clock)
    found = Notifying(targets, store, clock, notifications.networks(allowed), ca_file)
    await found.load()
    return found


def url_problem(url: str) -> str:
    """What is wrong with the address of a target; empty if nothing is."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "must look like https://HOST/PATH"
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0 or not url.isascii():
        return "must look like https://HOST/PATH"
    return "must not hold a user or password" if "@" in parts.netloc else ""
