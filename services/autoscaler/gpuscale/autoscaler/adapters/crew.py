"""The control loop of an adapter: observe the engine, take the next steps, report, repeat."""

import asyncio
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from gpuscale.autoscaler.adapters.engine import (
    Desired,
    Engine,
    EngineUnavailableError,
    Kill,
    ReplicaOrder,
    Sighting,
    Step,
    StepsFailedError,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.journal import Journal, JournalRecord, Phase
from gpuscale.autoscaler.adapters.steps import NEVER_STARTED, Situation, plan_steps, refused, reports
from gpuscale.autoscaler.domain.replicas import Goal, ReplicaReport, ReplicaState
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.metrics_text import Histogram
from gpuscale.common.runtime.tasks import Backoff, Clock, hit_async

FRESH = 10.0
"""Seconds for which an observation is valid; after that nothing is reported until the engine answers again."""
OBSERVE_TIMEOUT = 30.0
APPLY_TIMEOUT = 60.0
CLEAN_UP_SECONDS = 2.0
"""Extra seconds, after their grace, to see killed replicas end."""
AT_A_TIME = 16
"""Steps between two observations, so that reports stay fresh while many steps are taken."""

Operation = Literal["observe", "apply"]
FAILURES: tuple[tuple[Operation, str], ...] = (
    ("observe", "UNAVAILABLE"),
    ("observe", "TIMEOUT"),
    ("apply", "UNAVAILABLE"),
    ("apply", "TIMEOUT"),
    ("apply", "STEP_FAILED"),
    ("apply", "REFUSED"),
    ("apply", "JOURNAL_UNWRITABLE"),
)
"""Operations that may fail, and why: counted from 0, so that the first failure is an increase."""
UNWRITABLE = "its adapter cannot write its journal"
_log = get_logger(__name__)


class EngineCrew:
    """Keeps an engine's replicas as the autoscaler wants them. They survive the adapter, except with `end_all`.

    `records` is the journal as of the adapter's start; `changed` is set whenever there is something new to report. At most
    `max_replicas` run at a time; 0 for no limit. `spent` and `failures` count time and failures per operation.
    """

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        records: Iterable[JournalRecord],
        clock: Clock,
        changed: asyncio.Event,
        *,
        max_replicas: int = 0,
    ) -> None:
        self.spent: dict[Operation, Histogram] = {"observe": Histogram(), "apply": Histogram()}
        self.failures = Counter(dict.fromkeys(FAILURES, 0))
        self._engine = engine
        self._journal = journal
        self._clock = clock
        self._changed = changed
        self._most = max_replicas
        self._wanted: dict[str, Desired] = {}
        self._seen: Mapping[str, Sighting] = {}
        self._shown: dict[str, Sighting] = {}
        self._planned_at = float("-inf")
        self._seen_at: float | None = None
        self._records = {record.replica: record for record in records}
        self._missing_since: dict[str, float] = {}
        self._killed: set[str] = set()
        self._steps: Sequence[Step] = ()
        self._failed: Mapping[str, str] = {}
        self._problems: list[OSError] = []
        self._waits: dict[str, ReplicaReport] = {}
        self._poke = asyncio.Event()
        self._looked = asyncio.Event()
        self._closing = False
        self._reported: dict[str, ReplicaReport] | None = None

    def apply(self, desired: Iterable[Desired]) -> None:
        """Set what is wanted. Replicas that are not named stay as they are."""
        if not self._closing:
            self._wanted = {item.order.replica: item for item in desired}
            self._poke.set()

    def reports(self) -> dict[str, ReplicaReport] | None:
        """Every known replica by name; None while the state of the engine is unknown."""
        if self._seen_at is None or self._clock.now() - self._seen_at > FRESH:
            return None
        running = {name for name, one in self._wanted.items() if one.goal is Goal.RUN}
        waits = {name: one for name, one in self._waits.items() if name in running}
        return reports(self._shown, self._records, self._killed) | waits

    def metrics(self) -> dict[str, str]:
        """The metrics URLs of ready replicas, by name."""
        shown = self._shown.items()
        return {name: one.metrics for name, one in shown if one.metrics and one.life is WorkerLife.READY}

    async def end_all(self, grace: float) -> None:
        """Ask every replica to finish, and kill those still running after `grace` seconds, while `run` goes on."""
        self._closing = True
        for drain, seconds in ((grace, grace), (0.0, CLEAN_UP_SECONDS)):
            now, boot_id = self._clock.now(), self._clock.boot_id
            asked = {
                name: record.asked_to_stop_at
                for name, record in self._records.items()
                if record.asked_to_stop_at is not None and record.boot_id == boot_id
            }
            self._wanted = {
                name: Desired(
                    ReplicaOrder(name, "", {}),
                    Goal.STOP,
                    drain_timeout=drain and now - asked.get(name, now) + drain,
                )
                for name in self._living()
            }
            self._poke.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while self._living():
                        self._looked.clear()
                        await self._looked.wait()
        if left := self._living():
            _log.error(
                "replicas keep running; the next run of the adapter adopts them", replicas=sorted(left)
            )

    def _living(self) -> set[str]:
        unseen = {name for name, record in self._records.items() if record.phase is not Phase.ENDED}
        seen = {name for name, sighting in self._seen.items() if sighting.life is not WorkerLife.ENDED}
        return (unseen - self._seen.keys()) | seen

    async def run(self) -> None:
        """Run forever. An engine that does not answer is asked again; silence proves nothing."""
        backoff = Backoff(initial=0.5, cap=10.0)
        silent = False
        while True:
            self._poke.clear()
            try:
                await self._round()
                silent = False
                backoff.reset()
                await self._until_something()
            except (EngineUnavailableError, TimeoutError) as error:
                if not silent:
                    _log.warning("the engine does not answer", why=str(error) or "it took too long")
                silent = True
                await asyncio.sleep(backoff.next())
            except OSError as error:
                self.failures["apply", "JOURNAL_UNWRITABLE"] += 1
                _log.error("cannot write the journal", why=error.strerror)
                await asyncio.sleep(backoff.next())

    async def _round(self) -> None:
        await self._look()
        self._planned_at = self._clock.now()
        plan = plan_steps(
            Situation(
                wanted=self._wanted,
                seen=self._seen,
                records=self._records,
                missing_since=self._missing_since,
                now=self._planned_at,
                boot_id=self._clock.boot_id,
                most=self._most,
            )
        )
        self._problems.clear()
        await self._write(plan.write)
        self._waits.clear()
        if self._problems:
            waits = ReplicaReport(ReplicaState.STARTING, reason=f"{UNWRITABLE}: {self._problems[0].strerror}")
            self._waits = {start.order.replica: waits for start in plan.starts}
        if self._closing:  # `end_all` came meanwhile, and does not know of them
            boot = self._clock.boot_id
            begun = [one.replica for one in plan.write if one.phase is Phase.INTENT]
            await self._write([JournalRecord(one, Phase.ENDED, boot, reason=NEVER_STARTED) for one in begun])
        self._tell()
        # What cannot be recorded is not started; but what should stop is stopped all the same.
        # Starts come last: they may take long, and free no capacity.
        steps = [*plan.steps, *(() if self._problems or self._closing else plan.starts)]
        failed = await self._take(steps, plan.done)
        if steps and steps != self._steps:
            self._poke.set()  # the result will be observed; a repetition can wait for `watch`
        for name in failed.keys() - self._failed.keys():
            _log.warning("a step failed and will be retried", replica=name, why=failed[name])
        self._steps, self._failed = steps, failed
        if forgotten := [name for name in plan.forget if name not in failed]:
            await asyncio.to_thread(self._journal.remove, forgotten)
            for name in forgotten:
                self._records.pop(name, None)
                self._killed.discard(name)
        self._tell()
        self._looked.set()
        if self._problems:
            raise self._problems[0]

    async def _look(self) -> None:
        with self._measured("observe"):
            async with asyncio.timeout(OBSERVE_TIMEOUT):
                seen = await self._engine.observe()
        now = self._seen_at = self._clock.now()
        missing = [name for name in self._records if name not in seen]
        self._missing_since = {name: self._missing_since.get(name, now) for name in missing}
        # A replica missing for a moment keeps its last sighting, until it counts as ended.
        stand = {
            name: self._shown[name]
            for name in missing
            if name in self._shown and self._records[name].phase is Phase.RUNNING
        }
        for name, sighting in seen.items():
            if sighting.life is WorkerLife.ENDED and self._seen.get(name) != sighting:
                _log.info("replica ended", replica=name, exit_code=sighting.exit_code, why=sighting.reason)
        self._seen, self._shown = seen, {**stand, **seen}

    async def _take(self, steps: Sequence[Step], done: Iterable[JournalRecord]) -> dict[str, str]:
        """Take steps, `AT_A_TIME`, and record their outcome; returns why some failed, by replica."""
        failed: dict[str, str] = {}
        for first in range(0, len(steps), AT_A_TIME):
            if first:
                await self._look()
                self._tell()
            batch = steps[first : first + AT_A_TIME]
            await hit_async("adapter.engine.before_apply")
            self._killed |= {step.replica for step in batch if isinstance(step, Kill)}
            try:
                with self._measured("apply"):
                    async with asyncio.timeout(APPLY_TIMEOUT):
                        refusals = await self._engine.apply(batch)
            except StepsFailedError as error:
                refusals = error.refused
                failed.update(error.failed)
                self.failures["apply", "STEP_FAILED"] += len(error.failed)
            self.failures["apply", "REFUSED"] += len(refusals)
            await hit_async("adapter.engine.after_apply")
            taken = {step.replica for step in batch} - failed.keys()
            never: list[JournalRecord] = []
            for name, why in refusals.items():
                _log.warning("replica refused", replica=name, why=why)
                never.append(refused(name, why, self._clock.boot_id))
            await self._write([*(record for record in done if record.replica in taken), *never])
        return failed

    @contextmanager
    def _measured(self, operation: Operation) -> Generator[None]:
        begun = self._clock.now()
        try:
            yield
        except TimeoutError:
            self.failures[operation, "TIMEOUT"] += 1
            raise
        except EngineUnavailableError:
            self.failures[operation, "UNAVAILABLE"] += 1
            raise
        finally:
            self.spent[operation].observe(self._clock.now() - begun)

    async def _write(self, records: Sequence[JournalRecord]) -> None:
        """Write these records, except intents that cannot be written; `_problems` says why."""
        if not records:
            return
        errors = await asyncio.to_thread(self._journal.write, records)
        for record in records:
            if record.phase is not Phase.INTENT or record.replica not in errors:
                self._records[record.replica] = record
            if record.phase is Phase.ENDED and record.replica not in self._seen:
                self._shown.pop(record.replica, None)
        self._problems.extend(errors.values())

    def _tell(self) -> None:
        now = self.reports()
        if now != self._reported:
            self._reported = now
            self._changed.set()

    async def _until_something(self) -> None:
        """Wait until the engine or the desired state may have changed, or a drain timeout expires."""
        now = self._clock.now()
        kills = [
            max(0.0, asked_at + desired.drain_timeout - now)
            for name, desired in self._wanted.items()
            if desired.goal is Goal.STOP and desired.drain_timeout is not None and name in self._records
            # A timeout that had expired when the round was planned was handled; one that expired since was not.
            if (asked_at := self._records[name].asked_to_stop_at) is not None
            and self._planned_at - asked_at < desired.drain_timeout
        ]
        timeout = min((FRESH, *kills))
        watching = asyncio.ensure_future(self._engine.watch())
        poked = asyncio.ensure_future(self._poke.wait())
        try:
            await asyncio.wait((watching, poked), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
        finally:
            for task in (watching, poked):
                task.cancel()
            await asyncio.gather(watching, poked, return_exceptions=True)
