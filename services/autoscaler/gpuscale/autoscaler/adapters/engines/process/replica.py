"""The life of one replica on this host: from the intent to start it until nothing of it is left.

    STARTING ── lived for READY_AFTER ──> READY ── asked to stop ──> DRAINING ── ended ──> STOPPED
        │       or its probe succeeded      │
        └───────────────────────────────────┴── ended by itself, or given up ──────────> FAILED

Given up is one that cannot be started, whose fence the node's agent refuses, or whose probe fails too often.

A step stands in the journal before the next one begins, so that after a crash of the adapter the next run goes on from
there: it adopts the process, and never starts a second one.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpuscale.autoscaler.adapters.admission import Admission
from gpuscale.autoscaler.adapters.engines.process import processes as procfs
from gpuscale.autoscaler.adapters.engines.process.logs import ReplicaLogs
from gpuscale.autoscaler.adapters.engines.process.probes import Health, Probe, Verdict, ask
from gpuscale.autoscaler.adapters.engines.process.processes import WorkerProcess, WorkerUser
from gpuscale.autoscaler.adapters.journal import Journal, Phase, ProcessId, Record
from gpuscale.autoscaler.adapters.templates import Launch, probe_environment
from gpuscale.autoscaler.domain.replicas import ENDED, ReplicaReport, ReplicaState
from gpuscale.common.runtime import failpoints
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.logs import get_logger

READY_AFTER = 0.2
GIVEN_UP_GRACE = 5.0
"""Seconds that a replica has to end which was given up, before it is killed."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Workshop:
    """What the replicas of an adapter share.

    Attributes:
        journal: what was started.
        logs: where replicas write to.
        clock: seconds since boot, and the boot's id.
        admission: asked before anything is started on GPUs.
        changed: called after every change that is to be reported.
        user: whom replicas run as.
    """

    journal: Journal
    logs: ReplicaLogs
    clock: Clock
    admission: Admission
    changed: Callable[[], None]
    user: WorkerUser


class LocalReplica:
    """One replica. Exactly one of `start`, `adopt` and nothing is run, once; `stop` may be called at any time."""

    def __init__(self, record: Record, workshop: Workshop) -> None:
        self._record = record
        self._workshop = workshop
        self._state = _state(record)
        self._stop_asked = record.asked_to_stop_at is not None
        self._drain_timeout: float | None = None
        self._kill_at: float | None = None
        self._killed = False
        self._given_up = ""
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        if record.phase is Phase.ENDED:
            self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether nothing of it is left."""
        return self._ended.is_set()

    def report(self) -> ReplicaReport:
        """How it stands."""
        process = self._record.process
        pid = process.pid if process and not self.ended else 0
        return ReplicaReport(self._state, pid, self._record.exit_code, self._record.reason)

    def stop(self, drain_timeout: float | None) -> None:
        """Ask it to finish its work and end; kill it so many seconds after it was asked first (None: never)."""
        self._stop_asked = True
        self._drain_timeout = drain_timeout
        self._wake.set()

    def stop_within(self, seconds: float) -> None:
        """Ask it to finish its work and end, and kill it so many seconds from now, whatever else it may take."""
        self._stop_asked = True
        self._kill_at = self._workshop.clock.now() + seconds
        self._wake.set()

    async def until_ended(self) -> None:
        """Wait until nothing of it is left."""
        await self._ended.wait()

    async def start(self, launch: Launch) -> None:
        """Start it, and see it through to its end."""
        replica = self._record.replica
        try:
            await asyncio.to_thread(self._workshop.journal.write, self._record)
            await failpoints.hit_async("adapter.start.after_intent")
            refusal = await self._workshop.admission.refusal(launch)
            if self._stop_asked:
                await self._end(failed=False, reason="it was asked to stop before it was started")
                return
            if refusal:
                await self._end(failed=True, reason=refusal)
                return
            process = await WorkerProcess.start(
                launch, self._workshop.logs.path(replica), self._workshop.user
            )
        except OSError as error:
            await self._end(failed=True, reason=f"cannot be started: {error.strerror or error}")
            return
        await failpoints.hit_async("adapter.start.after_spawn")
        _log.info("replica started", replica=replica, pid=process.id.pid, argv=list(launch.argv))
        await self._save(replace(self._record, phase=Phase.RUNNING, process=process.id))
        await failpoints.hit_async("adapter.start.after_record")
        self._given_up = await self._workshop.admission.refusal(launch, process.id.pid)
        await self._live(process)

    async def adopt(self) -> None:
        """Take over what an earlier run of the adapter left of it, and see it through to its end."""
        record = self._record
        process = record.process if record.boot_id == self._workshop.clock.boot_id else None
        if record.phase is Phase.INTENT and record.boot_id == self._workshop.clock.boot_id:
            process = await asyncio.to_thread(procfs.find_leader, record.replica, self._workshop.user.uid)
        adopted = await WorkerProcess.adopt(process) if process else None
        if process is None or adopted is None:
            await self._end_unseen(process)
            return
        _log.info("replica adopted", replica=record.replica, pid=process.pid)
        await self._save(replace(record, phase=Phase.RUNNING, process=process))
        await self._live(adopted)

    async def _live(self, process: WorkerProcess) -> None:
        process.ended.add_done_callback(lambda _: self._wake.set())
        self._workshop.changed()

        def over() -> bool:
            return process.ended.done() or self._stop_asked or bool(self._given_up)

        if self._record.probe is not None:
            await self._watch(self._record.probe, over)
        else:
            await self._until(over, READY_AFTER)
            if not over():
                self._set(ReplicaState.READY)
        await self._until(over)
        if not process.ended.done():
            await (self._drain(process) if self._stop_asked else self._put_down(process))
        code = await process.ended
        asked = self._record.asked_to_stop_at is not None
        await self._clean_up(process.id)
        reason = _reason(code, asked=asked, killed=self._killed)
        if self._given_up and not asked:
            reason = self._given_up
        await self._end(failed=not asked, exit_code=code, reason=reason)

    async def _watch(self, probe: Probe, over: Callable[[], bool]) -> None:
        """Ask it until it is over: READY at the first success, given up after too many failures in a row."""
        clock, timing = self._workshop.clock, probe.timing
        health = Health(timing, clock.now(), ready=self._record.ready)
        await self._until(over, 0.0 if self._record.ready else timing.initial_delay)
        while not over():
            problem = await self._ask(probe, over)
            if over():
                return
            match health.answered(problem, clock.now()):
                case Verdict.READY:
                    await self._save(replace(self._record, ready=True))
                    self._set(ReplicaState.READY)
                case Verdict.UNHEALTHY:
                    self._given_up = f"its probe failed {timing.failures} times in a row: {problem}"
                    return
                case Verdict.GOES_ON:
                    pass
            self._say(f"its probe fails: {problem}" if problem else "")
            await self._until(over, timing.period)

    async def _ask(self, probe: Probe, over: Callable[[], bool]) -> str:
        """Ask once; cut short where it is over meanwhile."""
        user = self._workshop.user
        asking = asyncio.ensure_future(
            ask(probe, probe_environment(self._record.replica, user.environment()), user.command)
        )
        asking.add_done_callback(lambda _: self._wake.set())
        try:
            await self._until(lambda: over() or asking.done())
            return asking.result() if asking.done() else ""
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    def _say(self, reason: str) -> None:
        """Why it stands as it does, for whoever looks; not worth a write to the disk."""
        if reason != self._record.reason:
            self._record = replace(self._record, reason=reason)
            self._workshop.changed()

    async def _put_down(self, process: WorkerProcess) -> None:
        """End one that was given up: it may hang, so it is not waited for as one that drains."""
        _log.warning("replica given up", replica=self._record.replica, why=self._given_up)
        process.terminate()
        await self._until(process.ended.done, GIVEN_UP_GRACE)
        process.kill()

    async def _drain(self, process: WorkerProcess) -> None:
        """Ask it to finish, once, and wait; kill it if that takes longer than it may."""
        clock = self._workshop.clock
        if self._record.asked_to_stop_at is None:
            # Between the two lines a crash makes the next run ask again: twice is better than never.
            process.terminate()
            await self._save(replace(self._record, asked_to_stop_at=clock.now()))
        asked_at = self._record.asked_to_stop_at or clock.now()
        self._set(ReplicaState.DRAINING)
        while not process.ended.done():
            self._wake.clear()
            left = self._left_to_drain(asked_at)
            if left is not None and left <= 0:
                self._killed = True
                process.kill()
                await process.ended
                return
            await self._sleep(left)

    def _left_to_drain(self, asked_at: float) -> float | None:
        """Seconds until it is to be killed; None for ever."""
        limits = [] if self._drain_timeout is None else [asked_at + self._drain_timeout]
        if self._kill_at is not None:
            limits.append(self._kill_at)
        return min(limits) - self._workshop.clock.now() if limits else None

    async def _until(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until the condition holds, or for so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return

    async def _sleep(self, seconds: float | None) -> None:
        """Wait until something has happened since `_wake` was cleared, or for so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _end_unseen(self, process: ProcessId | None) -> None:
        """It ended, or never began, while no adapter watched."""
        if process is not None:
            await self._clean_up(process)
        if self._record.phase is Phase.INTENT:
            reason = "the adapter ended while it started it, and no process of it is there"
        else:
            reason = "it ended while the adapter was not running; its exit code is unknown"
        await self._end(failed=self._record.asked_to_stop_at is None, reason=reason)

    async def _clean_up(self, process: ProcessId) -> None:
        killed = await asyncio.to_thread(
            procfs.kill_members, self._record.replica, process, self._workshop.user.uid
        )
        if killed:
            _log.warning("killed what a replica left behind", replica=self._record.replica, processes=killed)

    async def _end(self, *, failed: bool, exit_code: int | None = None, reason: str) -> None:
        await self._save(
            replace(self._record, phase=Phase.ENDED, failed=failed, exit_code=exit_code, reason=reason)
        )
        _log.info("replica ended", replica=self._record.replica, exit_code=exit_code, why=reason)
        self._set(ReplicaState.FAILED if failed else ReplicaState.STOPPED)

    async def _save(self, record: Record) -> None:
        """Go on from this record; a full disk must not end the watch over a process that runs."""
        self._record = record
        try:
            await asyncio.to_thread(self._workshop.journal.write, record)
        except OSError as error:
            _log.error("cannot write the journal", replica=record.replica, why=error.strerror)

    def _set(self, state: ReplicaState) -> None:
        self._state = state
        if state in ENDED:
            self._ended.set()
        self._workshop.changed()


def _state(record: Record) -> ReplicaState:
    """How a replica stands that was left like this."""
    match record.phase:
        case Phase.INTENT:
            return ReplicaState.STARTING
        case Phase.RUNNING:
            if record.asked_to_stop_at is not None:
                return ReplicaState.DRAINING
            return ReplicaState.READY if record.ready or record.probe is None else ReplicaState.STARTING
        case Phase.ENDED:
            return ReplicaState.FAILED if record.failed else ReplicaState.STOPPED


def _reason(code: int | None, *, asked: bool, killed: bool) -> str:
    if killed:
        return "killed, since it had not finished its work in the time it may take"
    if code is None:
        how = "its exit code is unknown, since the adapter was restarted meanwhile"
    elif code < 0:
        how = f"by signal {-code}"
    else:
        how = f"with exit code {code}"
    if not asked:
        return f"it ended by itself, {how}"
    return "" if code == 0 else f"it ended when it was asked to, {how}"
