"""All replicas of one adapter: what should run, what does, and the way from one to the other."""

import asyncio
import sys
from collections.abc import Iterable, Mapping

from gpuscale.autoscaler.adapters.engine import Desired, Goal
from gpuscale.autoscaler.adapters.engines.process.replica import LocalReplica, Workshop
from gpuscale.autoscaler.adapters.journal import Phase, Record
from gpuscale.autoscaler.adapters.templates import LaunchRefusedError, Template, launch
from gpuscale.autoscaler.domain.replicas import ReplicaReport
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import TaskScope

BOUND_LOGS_PERIOD = 10.0
_CLEAN_UP_SECONDS = 1.0

_log = get_logger(__name__)


class Supervisor:
    """Starts, watches, stops and forgets replicas; one task for each that has not ended."""

    def __init__(
        self,
        templates: Mapping[str, Template],
        workshop: Workshop,
        tasks: TaskScope,
        *,
        max_replicas: int = 0,
    ) -> None:
        self._templates = templates
        self._workshop = workshop
        self._tasks = tasks
        self._max_replicas = max_replicas
        self._replicas: dict[str, LocalReplica] = {}
        self._stopping = False

    async def recover(self) -> None:
        """Take over what earlier runs of the adapter left.

        Raises:
            FailedPreconditionError: the journal cannot be read.
        """
        for record in await asyncio.to_thread(self._workshop.journal.load):
            replica = self._add(record)
            if record.phase is not Phase.ENDED:
                self._tasks.start(record.replica, replica.adopt())

    def apply(self, desired: Iterable[Desired]) -> None:
        """Work towards what is wanted. Replicas that are not named go on as they are."""
        for item in desired:
            replica = self._replicas.get(item.order.replica)
            match item.goal:
                case Goal.RUN if replica is None and not self._stopping:
                    self._start(item)
                case Goal.STOP if replica is None:
                    self._add(self._ended(item.order.replica, "it was never started here"))
                case Goal.STOP if replica is not None and not self._stopping:
                    replica.stop(item.drain_timeout)
                case Goal.FORGET if replica is not None and replica.ended:
                    del self._replicas[item.order.replica]
                    self._tasks.start(f"forget {item.order.replica}", self._forget(item.order.replica))
                case _:
                    pass

    def reports(self) -> dict[str, ReplicaReport]:
        """Every replica that was not forgotten, by name."""
        return {name: replica.report() for name, replica in self._replicas.items()}

    async def stop_all(self, grace: float) -> None:
        """Ask every replica to finish, and kill those that have not ended after `grace` seconds."""
        self._stopping = True
        running = {name: replica for name, replica in self._replicas.items() if not replica.ended}
        for replica in running.values():
            replica.stop_within(grace)
        try:
            async with asyncio.timeout(grace + _CLEAN_UP_SECONDS):
                for replica in running.values():
                    await replica.until_ended()
        except TimeoutError:
            left = sorted(name for name, replica in running.items() if not replica.ended)
            _log.error("replicas run on; the next run of the adapter takes them over", replicas=left)

    async def bound_logs(self) -> None:
        """Keep the replicas' logs within their limits, for ever."""
        while True:
            await asyncio.sleep(BOUND_LOGS_PERIOD)
            running = {name for name, replica in self._replicas.items() if not replica.ended}
            try:
                await asyncio.to_thread(self._workshop.logs.bound, running)
            except OSError as error:
                _log.warning("cannot bound the logs of replicas", why=error.strerror)

    def _start(self, desired: Desired) -> None:
        order = desired.order
        try:
            prepared = launch(
                self._template(desired.template), order, sys.executable, self._workshop.user.environment()
            )
            self._check_room()
        except LaunchRefusedError as error:
            self._add(self._ended(order.replica, str(error), failed=True))
            _log.warning("replica refused", replica=order.replica, why=str(error))
            return
        intent = Record(order.replica, Phase.INTENT, self._workshop.clock.boot_id, probe=prepared.probe)
        replica = self._add(intent)
        self._tasks.start(order.replica, replica.start(prepared))

    def _template(self, name: str) -> Template:
        if name not in self._templates:
            raise LaunchRefusedError(f"this adapter has no template {name!r}")
        return self._templates[name]

    def _check_room(self) -> None:
        running = sum(not replica.ended for replica in self._replicas.values())
        if self._max_replicas and running >= self._max_replicas:
            raise LaunchRefusedError(f"this adapter runs {self._max_replicas} replicas at most")

    def _add(self, record: Record) -> LocalReplica:
        replica = LocalReplica(record, self._workshop)
        self._replicas[record.replica] = replica
        return replica

    def _ended(self, replica: str, reason: str, *, failed: bool = False) -> Record:
        """A replica that was never started: nothing of it stands in the journal, and asked again it ends the same."""
        return Record(replica, Phase.ENDED, self._workshop.clock.boot_id, failed=failed, reason=reason)

    async def _forget(self, replica: str) -> None:
        try:
            await asyncio.to_thread(self._workshop.journal.remove, replica)
        except OSError as error:
            _log.warning("cannot remove a replica from the journal", replica=replica, why=error.strerror)
