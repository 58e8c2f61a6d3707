"""The life of one replica on this host: from its start until nothing of it is left.

    WAITING ── admitted and started ──> STARTING ── lived for READY_AFTER, or its probe succeeded ──> READY
        │                                   │                                                        │
        └───────────────────────────────────┴── ended, or given up ── what it left is killed ────────┴──> ENDED

A replica is given up if it cannot be started, the node's agent refuses its fence, or its probe fails too often. Its sightings
identify its process, so that the next run adopts it after a crash of the adapter.

Terms and semantics of probes are those of Kubernetes, with a single probe for readiness and liveness: the first success makes a
replica READY, and `failures` in a row make it FAILED. Until the first success, failures only count once `start_timeout` is
over, so that a model may load slowly while a hanging replica is still noticed quickly afterwards.

Its output is in <directory>/<endpoint>/<replica>.log. It appends to this file itself, so it can outlive the adapter, which checks
the files every few seconds: a file beyond the limit is copied to <replica>.log.1, replacing the previous copy, and truncated. So
a replica keeps at most twice the limit plus what it writes between two checks; what it writes between copy and truncation is
lost. For ended replicas, the newest `KEPT` files of each endpoint stay, at most `keep` seconds after their last write; empty
folders are removed after the same time, so that deleted endpoints leave nothing behind.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Coroutine, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import JsonValue, TypeAdapter

from gpuscale.autoscaler.adapters.admission import Admission
from gpuscale.autoscaler.adapters.engine import ReplicaOrder, Sighting, WorkerLife
from gpuscale.autoscaler.adapters.engines.process.processes import (
    ProcessId,
    WorkerProcess,
    WorkerUser,
    kill_members,
)
from gpuscale.autoscaler.adapters.templates import INHERITED, Launch, parse_argument
from gpuscale.autoscaler.domain.replicas import LogPart
from gpuscale.common.names import REPLICA, match
from gpuscale.common.runtime import tasks
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.sizes import counted

HTTP_PORT = 80
_MAX_STATUS_LINE = 4096
_END_SECONDS = 1.0
_WELL = range(200, 400)


class ProbeKind(Enum):
    """The kind of a probe."""

    EXEC = "exec"
    """A program that ends with 0."""
    TCP = "tcp"
    """A connection to HOST:PORT."""
    HTTP = "http"
    """A GET of an http:// URL that is answered with a status of 200 to 399."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The timing of checks: seconds, and consecutive failures."""

    initial_delay: float = 0.0
    period: float = 5.0
    timeout: float = 1.0
    failures: int = 3
    start_timeout: float = 300.0


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe with all values filled in: a program's arguments, or one address."""

    kind: ProbeKind
    target: tuple[str, ...]
    timing: Timing


class Verdict(Enum):
    """What an answer means for a replica."""

    GOES_ON = "goes on"
    READY = "ready"
    UNHEALTHY = "unhealthy"


class Health:
    """The answers of a replica started, or taken over, at `since`, in seconds since boot like every time here."""

    def __init__(self, timing: Timing, since: float, *, ready: bool) -> None:
        self._timing = timing
        self._start_ends = since + timing.start_timeout
        self._ready = ready
        self._failures = 0

    def answered(self, problem: str, now: float) -> Verdict:
        """Take an answer; `problem` is empty if it is healthy."""
        if not problem:
            first, self._ready, self._failures = not self._ready, True, 0
            return Verdict.READY if first else Verdict.GOES_ON
        if self._ready or now >= self._start_ends:
            self._failures += 1
        return Verdict.UNHEALTHY if self._failures >= self._timing.failures else Verdict.GOES_ON


def check_address(kind: ProbeKind, address: str) -> None:
    """Check a probe's address, placeholders included; ValueError if it is not HOST:PORT or an http:// URL."""
    if kind is ProbeKind.HTTP and not address.startswith("http://"):
        raise ValueError("must begin with http://")
    if kind is ProbeKind.TCP and not address.rpartition(":")[0]:
        raise ValueError("must be HOST:PORT")
    if not address.isprintable() or " " in address:
        raise ValueError("must hold printable characters and no space")
    parse_argument(address)


def probe_environment(replica: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a probe's program: without the template's variables, which may hold passwords."""
    own = {name: environment[name] for name in INHERITED if name in environment}
    return {**own, "GPUSCALE_REPLICA": replica}


async def ask(
    probe: Probe, env: Mapping[str, str], become: Callable[[tuple[str, ...]], tuple[str, ...]]
) -> str:
    """Check once, within the probe's timeout; returns why the replica is not healthy, or nothing."""
    try:
        async with asyncio.timeout(probe.timing.timeout):
            match probe.kind:
                case ProbeKind.EXEC:
                    return await _run(become(probe.target), env)
                case ProbeKind.TCP:
                    host, _, port = probe.target[0].rpartition(":")
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                    writer.close()
                    return ""
                case ProbeKind.HTTP:
                    return await _get(probe.target[0])
    except TimeoutError:
        return f"no answer within {probe.timing.timeout:g} s"
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        reason = error.strerror if isinstance(error, OSError) else ""
        return reason or str(error) or type(error).__name__


async def _run(argv: tuple[str, ...], env: Mapping[str, str]) -> str:
    nothing = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=nothing, stdout=nothing, stderr=nothing, env=env
    )
    try:
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            # A process that hangs in the kernel, as anything that calls a GPU's driver may, does not end.
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await process.wait()
    return "" if code == 0 else f"the program ended with {code}"


async def _get(url: str) -> str:
    """A minimal HTTP request: a complete client costs too much for probing a host's replicas."""
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or HTTP_PORT, limit=_MAX_STATUS_LINE
    )
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        words = (await reader.readuntil(b"\n")).split(maxsplit=2)
    finally:
        writer.close()
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        return "the answer is not HTTP"
    status = int(words[1])
    return "" if status in _WELL else f"HTTP status {status}"


READY_AFTER = 0.2
GIVEN_UP_GRACE = 5.0
"""Seconds before a given-up replica is killed."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaContext:
    """Shared by the replicas of an adapter."""

    logs: ReplicaLogs  # where replicas write their logs
    clock: Clock  # seconds since boot, and the boot's id
    admission: Admission  # asked before anything starts on GPUs
    changed: Callable[[], None]  # called after every visible change
    user: WorkerUser  # the user of replicas


@dataclass(frozen=True, slots=True)
class KeptProcess:
    """What the next run of the adapter needs to adopt a replica."""

    process: ProcessId
    probe: Probe | None = None
    ready: bool = False
    metrics: str = ""


KEPT_PROCESS: TypeAdapter[KeptProcess] = TypeAdapter(KeptProcess)


@dataclass(eq=False)
class LocalReplica:
    """One replica. Run exactly one of `start`, `adopt` and `end_unseen`, once; call the rest at any time."""

    name: str
    context: ReplicaContext
    probe: Probe | None = None
    metrics: str = ""
    finishing: bool = False

    def __post_init__(self) -> None:
        self._dropped = False
        self._process: WorkerProcess | None = None
        self._ready = False
        self._problem = ""
        self._given_up = ""
        self._wake = asyncio.Event()
        self._end: Sighting | None = None
        self._kept: Mapping[str, JsonValue] | None = None
        self._life = WorkerLife.WAITING

    @property
    def ended(self) -> bool:
        """Whether nothing of it is left."""
        return self._end is not None

    def sighting(self) -> Sighting:
        """Its state."""
        if self._end is not None:
            return self._end
        pid = self._process.id.pid if self._process else 0
        return Sighting(self._life, None, self._problem, pid, self.metrics, self._kept)

    def finish(self) -> None:
        """Ask it to finish its work and to end."""
        self.finishing = True
        if self._process is not None:
            self._process.terminate()
        self._wake.set()

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()

    async def drop(self) -> bool:
        """Cancel its start; returns False if it already runs."""
        if self._process is not None:
            return False
        self._dropped = True
        await self._until(lambda: self.ended)
        return True

    async def start(self, order: ReplicaOrder, launch: Launch) -> None:
        """Start it, and supervise it to its end."""
        admission = self.context.admission
        await tasks.hit_async("adapter.start.after_intent")
        if refusal := await admission.refusal(order):
            self._ended(None, refusal)
            return
        if self._dropped:
            self._ended(None, "it was stopped before it started")
            return
        try:
            process = await WorkerProcess.start(launch, self.context.logs.path(self.name), self.context.user)
        except OSError as error:
            why = filter(None, ("cannot be started", error.filename, error.strerror or error))
            self._ended(None, ": ".join(map(str, why)))
            return
        await tasks.hit_async("adapter.start.after_spawn")
        _log.info("replica started", replica=self.name, pid=process.id.pid, argv=list(launch.argv))
        if self._dropped:
            process.kill()
        self._runs(process)
        self._given_up = await admission.refusal(order, process.id.pid, tasks.pid_namespace())
        await self._live(process)

    def adopt(self, process: WorkerProcess, *, ready: bool) -> Coroutine[None, None, None]:
        """Take over a process of an earlier run of the adapter; the returned coroutine supervises it to its end."""
        _log.info("replica adopted", replica=self.name, pid=process.id.pid)
        self._ready = ready
        self._runs(process)
        return self._live(process)

    def end_unseen(self, process: ProcessId | None) -> Coroutine[None, None, None]:
        """It ended while no adapter watched; the returned coroutine kills what it left behind."""
        self._life = WorkerLife.STARTING

        async def end() -> None:
            if process is not None:
                await self._clean_up(process)
            self._ended(None, "it ended while the adapter was not running; its exit code is unknown")

        return end()

    def _runs(self, process: WorkerProcess) -> None:
        self._process = process
        process.ended.add_done_callback(lambda _: self._wake.set())
        self._set_ready(ready=self._ready)

    async def _live(self, process: WorkerProcess) -> None:
        def over() -> bool:
            return process.ended.done() or self.finishing or bool(self._given_up)

        if self.probe is not None:
            await self._watch(self.probe, over)
        elif not self._ready:
            await self._until(over, READY_AFTER)
            if not over():
                self._set_ready(ready=True)
        await self._until(over)
        if self._given_up and not self.finishing and not process.ended.done():
            # It may hang, so it gets no drain time.
            _log.warning("replica given up", replica=self.name, why=self._given_up)
            process.terminate()
            await self._until(process.ended.done, GIVEN_UP_GRACE)
            process.kill()
        code = await process.ended
        await self._clean_up(process.id)
        if code is None:
            how = "its exit code is unknown, since the adapter was restarted meanwhile"
        else:
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        if not self.finishing:
            self._ended(code, self._given_up or f"it ended by itself, {how}")
        else:
            self._ended(code, "" if code == 0 else f"it ended when it was asked to, {how}")

    async def _watch(self, probe: Probe, over: Callable[[], bool]) -> None:
        """Probe it until it ends: READY at the first success, given up after too many consecutive failures."""
        clock, timing = self.context.clock, probe.timing
        health = Health(timing, clock.now(), ready=self._ready)
        await self._until(over, 0.0 if self._ready else timing.initial_delay)
        while not over():
            problem = await self._ask(probe, over)
            if over():
                return
            match health.answered(problem, clock.now()):
                case Verdict.READY:
                    self._set_ready(ready=True)
                case Verdict.UNHEALTHY:
                    times = counted(timing.failures, "time")
                    self._given_up = f"its probe failed {times} in a row: {problem}"
                    return
                case Verdict.GOES_ON:
                    pass
            self._problem = f"its probe fails: {problem}" if problem else ""
            self.context.changed()
            await self._until(over, timing.period)

    async def _ask(self, probe: Probe, over: Callable[[], bool]) -> str:
        """Probe once; cancelled if it ends meanwhile."""
        user = self.context.user
        environment = probe_environment(self.name, user.environment())
        asking = asyncio.ensure_future(ask(probe, environment, user.command))
        asking.add_done_callback(lambda _: self._wake.set())
        try:
            await self._until(lambda: over() or asking.done())
            return asking.result() if asking.done() else ""
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    async def _until(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return

    async def _clean_up(self, process: ProcessId) -> None:
        killed = await asyncio.to_thread(kill_members, self.name, process, self.context.user.uid)
        if killed:
            _log.warning("killed what a replica left behind", replica=self.name, processes=killed)

    def _set_ready(self, *, ready: bool) -> None:
        if self._process is None:
            return
        self._ready = ready
        self._life = WorkerLife.READY if ready else WorkerLife.STARTING
        kept = KeptProcess(self._process.id, self.probe, ready, self.metrics)
        self._kept = KEPT_PROCESS.dump_python(kept, mode="json")
        self.context.changed()

    def _ended(self, exit_code: int | None, reason: str) -> None:
        self._end = Sighting(WorkerLife.ENDED, exit_code, reason)
        self._wake.set()
        self.context.changed()


KEPT = 50
KEPT_SECONDS = 14 * 86_400.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_READS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ReplicaLogs:
    """The logs in a directory (blocking: call it in a thread), none much larger than twice `max_bytes`; for ended replicas none older than `keep` seconds."""

    def __init__(self, directory: Path, max_bytes: int, keep: float = KEPT_SECONDS) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._keep = keep

    def path(self, replica: str) -> Path:
        """Where endpoints/{endpoint}/replicas/{replica} writes to."""
        _, endpoint, _, own = replica.split("/")
        return self._directory / endpoint / f"{own}.log"

    def read(self, replica: str, offset: int | None, most: int) -> LogPart:
        """At most `most` bytes of a replica's log, from `offset`, or the last ones; from the beginning if less is kept.

        A replica may replace its file with anything: only regular files are read.
        """
        if match(REPLICA, replica) is None:
            return LogPart(problem="it is not a replica's name")
        try:
            file = os.open(self.path(replica), _READS)
        except FileNotFoundError:
            return LogPart(problem="it was not kept, or the replica has written nothing yet")
        except OSError as error:
            return LogPart(problem=str(error.strerror))
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return LogPart(problem="it is not a file")
            begin = max(0, status.st_size - most) if offset is None else offset
            if begin > status.st_size:  # it was truncated meanwhile
                begin = 0
            return LogPart(os.pread(file, most, begin), begin)
        except OSError as error:
            return LogPart(problem=str(error.strerror))
        finally:
            os.close(file)

    def bound(self, running: AbstractSet[str]) -> None:
        """Truncate what is too large, and remove what is too old and of no running replica; OSError at the end."""
        in_use = {self.path(replica) for replica in running}
        problem: OSError | None = None
        for endpoint in self._directory.glob("*/"):
            ended: list[tuple[float, Path]] = []
            for path in endpoint.glob("*.log"):
                try:
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and status.st_size > self._max_bytes:
                        _cut(path)
                except OSError as error:
                    problem = error
                    continue
                if path not in in_use:
                    ended.append((status.st_mtime, path))
            oldest = time.time() - self._keep
            try:
                for place, (written, path) in enumerate(sorted(ended, reverse=True)):
                    if place >= KEPT or written < oldest:
                        path.unlink(missing_ok=True)
                        _older(path).unlink(missing_ok=True)
                if endpoint.lstat().st_mtime < oldest and not any(endpoint.iterdir()):
                    endpoint.rmdir()
            except OSError as error:
                problem = error
        if problem is not None:
            raise problem


def _cut(path: Path) -> None:
    """Copy a file over the previous copy, and truncate it, even if the disk is too full for the copy."""
    older = _older(path)
    older.unlink(missing_ok=True)
    try:
        shutil.copyfile(path, older)
    except OSError as error:
        older.unlink(missing_ok=True)
        if error.errno not in _FULL:
            raise
    os.truncate(path, 0)


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
