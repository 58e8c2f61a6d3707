"""The life of one replica on this host: from its start until nothing of it is left.

    WAITING ── admitted and started ──> STARTING ── lived for READY_AFTER, or its probe succeeded ──> READY
        │                                   │                                                        │
        └───────────────────────────────────┴── ended, or given up ── what it left is killed ────────┴──> ENDED

A replica is given up if it cannot be started, the node's agent refuses its fence, or its probe fails too often. Its sightings
identify its process, so that the next run adopts it after a crash of the adapter.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass

from pydantic import JsonValue, TypeAdapter

from gpuscale.autoscaler.adapters.admission import Admission
from gpuscale.autoscaler.adapters.engine import ReplicaOrder, Sighting, WorkerLife
from gpuscale.autoscaler.adapters.engines.process.logs import ReplicaLogs
from gpuscale.autoscaler.adapters.engines.process.probes import Health, Probe, Verdict, ask, probe_environment
from gpuscale.autoscaler.adapters.engines.process.processes import (
    ProcessId,
    WorkerProcess,
    WorkerUser,
    kill_members,
)
from gpuscale.autoscaler.adapters.templates import Launch
from gpuscale.common.runtime import tasks
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock

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


KEPT: TypeAdapter[KeptProcess] = TypeAdapter(KeptProcess)


class LocalReplica:
    """One replica. Run exactly one of `start`, `adopt` and `end_unseen`, once; call the rest at any time."""

    def __init__(
        self,
        name: str,
        context: ReplicaContext,
        probe: Probe | None = None,
        metrics: str = "",
        *,
        finishing: bool = False,
    ) -> None:
        self._name = name
        self._context = context
        self._probe = probe
        self._metrics = metrics
        self._finishing = finishing
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
        return Sighting(self._life, None, self._problem, pid, self._metrics, self._kept)

    def finish(self) -> None:
        """Ask it to finish its work and to end."""
        self._finishing = True
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
        admission = self._context.admission
        await tasks.hit_async("adapter.start.after_intent")
        if refusal := await admission.refusal(order):
            self._ended(None, refusal)
            return
        if self._dropped:
            self._ended(None, "it was stopped before it started")
            return
        try:
            process = await WorkerProcess.start(
                launch, self._context.logs.path(self._name), self._context.user
            )
        except OSError as error:
            self._ended(None, f"cannot be started: {error.strerror or error}")
            return
        await tasks.hit_async("adapter.start.after_spawn")
        _log.info("replica started", replica=self._name, pid=process.id.pid, argv=list(launch.argv))
        if self._dropped:
            process.kill()
        self._runs(process)
        self._given_up = await admission.refusal(order, process.id.pid, tasks.pid_namespace())
        await self._live(process)

    def adopt(self, process: WorkerProcess, *, ready: bool) -> Coroutine[None, None, None]:
        """Take over a process of an earlier run of the adapter; the returned coroutine supervises it to its end."""
        _log.info("replica adopted", replica=self._name, pid=process.id.pid)
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
            return process.ended.done() or self._finishing or bool(self._given_up)

        if self._probe is not None:
            await self._watch(self._probe, over)
        elif not self._ready:
            await self._until(over, READY_AFTER)
            if not over():
                self._set_ready(ready=True)
        await self._until(over)
        if self._given_up and not self._finishing and not process.ended.done():
            # It may hang, so it gets no drain time.
            _log.warning("replica given up", replica=self._name, why=self._given_up)
            process.terminate()
            await self._until(process.ended.done, GIVEN_UP_GRACE)
            process.kill()
        code = await process.ended
        await self._clean_up(process.id)
        if self._given_up and not self._finishing:
            self._ended(code, self._given_up)
        else:
            self._ended(code, _why_ended(code, asked=self._finishing))

    async def _watch(self, probe: Probe, over: Callable[[], bool]) -> None:
        """Probe it until it ends: READY at the first success, given up after too many consecutive failures."""
        clock, timing = self._context.clock, probe.timing
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
                    self._given_up = f"its probe failed {timing.failures} times in a row: {problem}"
                    return
                case Verdict.GOES_ON:
                    pass
            self._problem = f"its probe fails: {problem}" if problem else ""
            self._context.changed()
            await self._until(over, timing.period)

    async def _ask(self, probe: Probe, over: Callable[[], bool]) -> str:
        """Probe once; cancelled if it ends meanwhile."""
        user = self._context.user
        environment = probe_environment(self._name, user.environment())
        asking = asyncio.ensure_future(ask(probe, environment, user.command))
        asking.add_done_callback(lambda _: self._wake.set())
        try:
            await self._until(lambda: over() or asking.done())
            return asking.result() if asking.done() else ""
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    async def _until(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until the condition holds, or for `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return

    async def _clean_up(self, process: ProcessId) -> None:
        killed = await asyncio.to_thread(kill_members, self._name, process, self._context.user.uid)
        if killed:
            _log.warning("killed what a replica left behind", replica=self._name, processes=killed)

    def _set_ready(self, *, ready: bool) -> None:
        if self._process is None:
            return
        self._ready = ready
        self._life = WorkerLife.READY if ready else WorkerLife.STARTING
        kept = KeptProcess(self._process.id, self._probe, ready, self._metrics)
        self._kept = KEPT.dump_python(kept, mode="json")
        self._context.changed()

    def _ended(self, exit_code: int | None, reason: str) -> None:
        self._end = Sighting(WorkerLife.ENDED, exit_code, reason)
        self._wake.set()
        self._context.changed()


def _why_ended(code: int | None, *, asked: bool) -> str:
    if code is None:
        how = "its exit code is unknown, since the adapter was restarted meanwhile"
    elif code < 0:
        how = f"by signal {-code}"
    else:
        how = f"with exit code {code}"
    if not asked:
        return f"it ended by itself, {how}"
    return "" if code == 0 else f"it ended when it was asked to, {how}"
