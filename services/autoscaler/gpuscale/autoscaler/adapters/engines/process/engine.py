"""Replicas as processes of this host: settings, engine, and how it is opened."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters import templates
from gpuscale.autoscaler.adapters.admission import Admission
from gpuscale.autoscaler.adapters.engine import (
    EngineUnavailableError,
    Finish,
    Sighting,
    Start,
    StepwiseEngine,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.engines.process import processes
from gpuscale.autoscaler.adapters.engines.process.replica import (
    KEPT_PROCESS,
    KEPT_SECONDS,
    KeptProcess,
    LocalReplica,
    Probe,
    ProbeKind,
    ReplicaContext,
    ReplicaLogs,
    Timing,
    check_address,
)
from gpuscale.autoscaler.adapters.journal import JournalRecord, Phase
from gpuscale.autoscaler.adapters.served import with_free_port
from gpuscale.autoscaler.adapters.settings import Host, NodeEngineSettings, OpenEngine
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import TaskScope, wait_at_most

STOP_GRACE = 5.0
POLL = 5.0
"""Seconds between two observations if nothing changes."""
BOUND_LOGS_PERIOD = 10.0

_DEFAULT = Timing()
_log = get_logger(__name__)


class ProbeSettings(BaseModel):
    """A table [templates.NAME.probe]: how to check a replica's health; set one of exec, tcp and http."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    exec: tuple[str, ...] | None = None
    """A program and its arguments, as in `command`; exit code 0 is healthy."""
    tcp: str | None = None
    """HOST:PORT, which must accept a connection."""
    http: str | None = None
    """http:// URL, which must answer a GET with a status of 200 to 399."""
    initial_delay: float = Field(_DEFAULT.initial_delay, ge=0, le=3600)
    """Seconds from its start to the first check."""
    period: float = Field(_DEFAULT.period, ge=0.1, le=3600)
    """Seconds between checks."""
    timeout: float = Field(_DEFAULT.timeout, ge=0.1, le=60)
    """Seconds to wait for an answer."""
    failures: int = Field(_DEFAULT.failures, ge=1, le=1000)
    """Consecutive failures after which it is ended as FAILED."""
    start_timeout: float = Field(_DEFAULT.start_timeout, ge=0, le=86_400)
    """Seconds after its start during which failures do not count, until the first success."""

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        match [way for way in (self.exec, self.tcp, self.http) if way is not None]:
            case [str(address)]:
                check_address(self.kind, address)
            case [tuple(command)]:
                templates.check_command(command)
            case _:
                raise ValueError("set one of exec, tcp and http")
        return self

    @property
    def kind(self) -> ProbeKind:
        """The kind of check."""
        if self.exec is not None:
            return ProbeKind.EXEC
        return ProbeKind.TCP if self.tcp is not None else ProbeKind.HTTP

    @property
    def target(self) -> tuple[str, ...]:
        """A program's arguments, or one address; with placeholders."""
        return self.exec or (self.tcp or self.http or "",)

    def filled(self, target: tuple[str, ...]) -> Probe:
        """The probe of a replica, with values filled in."""
        timing = Timing(self.initial_delay, self.period, self.timeout, self.failures, self.start_timeout)
        return Probe(self.kind, target, timing)


class ProcessTemplate(templates.CommandTemplate):
    """A table [templates.NAME]: how replicas of endpoints that name it are started."""

    probe: ProbeSettings | None = None
    """When a replica counts as ready, and as failed although it runs; without one it is ready after a moment of running."""
    metrics: templates.ServedMetrics | None = None
    """Where its server exposes metrics for signals `llm:...`, on 127.0.0.1."""


class ProcessSettings(NodeEngineSettings):
    """Settings of the process adapter."""

    section: ClassVar[str] = "adapter"
    kind: ClassVar[str] = "process"
    description: ClassVar[str] = (
        "Starts and stops replicas as processes of this host. Give the name of another engine first to use that."
    )
    templates_field: ClassVar[str] = "templates"

    adapter: str = Field("", description="id of this adapter; the node's id when empty")
    data_dir: Path = Field(description="directory of its journal and the logs, for one adapter")
    worker_user: str = Field("", description="user that replicas run as; the adapter's own when empty")
    replica_log_keep_seconds: float = Field(
        KEPT_SECONDS,
        gt=0,
        description="how long logs of ended replicas are kept at most, also of deleted endpoints",
    )
    end_replicas: bool = Field(
        default=False,
        description="end replicas when the adapter ends; else they run on, and its next run adopts them",
    )
    templates: dict[str, ProcessTemplate] = Field(
        default_factory=dict[str, ProcessTemplate], description="command templates by name"
    )

    @property
    def adapter_id(self) -> str:
        """The id of this adapter."""
        return self.adapter or self.node

    @asynccontextmanager
    async def open_engine(self, host: Host, /) -> AsyncGenerator[OpenEngine]:
        """With `end_replicas`, replicas end with the engine: asked to finish, and killed after `STOP_GRACE` seconds."""
        changed = asyncio.Event()
        logs = ReplicaLogs(self.data_dir / "logs", self.replica_log_max_bytes, self.replica_log_keep_seconds)
        context = ReplicaContext(
            logs=logs,
            clock=host.clock,
            admission=Admission(host.agent, required=self.require_admission),
            changed=changed.set,
            user=await asyncio.to_thread(processes.WorkerUser.of, self.worker_user),
        )
        async with TaskScope() as tasks:
            engine = ProcessEngine(self.templates, context, changed, tasks)
            await engine.adopt(host.records)
            tasks.spawn("bounds of the replicas' logs", engine.bound_logs())
            capabilities = api.AdapterCapabilities(
                picks_victims=True,
                drains=True,
                probes=any(template.probe for template in self.templates.values()),
                logs=True,
            )
            end_within = STOP_GRACE if self.end_replicas else None
            yield OpenEngine(engine, capabilities, self.node, logs.read, end_within)


@dataclass(eq=False)
class ProcessEngine(StepwiseEngine):
    """The processes of one adapter. Each replica that has not ended has a task."""

    templates: Mapping[str, ProcessTemplate]
    context: ReplicaContext
    changed: asyncio.Event
    tasks: TaskScope

    def __post_init__(self) -> None:
        self._replicas: dict[str, LocalReplica] = {}
        self._found: dict[str, processes.ProcessId] = {}

    async def adopt(self, records: Iterable[JournalRecord]) -> None:
        """Adopt the replicas of earlier runs of the adapter.

        Of a replica that was being started only the name is known. Its process, if any, is adopted once its order arrives again
        and says how to probe it; without a process it is started again.
        """
        clock, user = self.context.clock, self.context.user.uid
        for record in records:
            name, here = record.replica, record.boot_id == clock.boot_id
            if record.phase is Phase.RUNNING:
                kept = KEPT_PROCESS.validate_python(record.kept) if record.kept and here else None
                await self._take_over(name, kept, finishing=record.asked_to_stop_at is not None)
            if record.phase is Phase.INTENT and here:
                leader = await asyncio.to_thread(processes.find_leader, name, user)
                if leader is not None:
                    self._found[name] = leader

    async def _take_over(self, name: str, kept: KeptProcess | None, *, finishing: bool = False) -> None:
        probe, metrics = (kept.probe, kept.metrics) if kept else (None, "")
        replica = LocalReplica(name, self.context, probe, metrics, finishing=finishing)
        self._replicas[name] = replica
        process = await processes.WorkerProcess.adopt(kept.process) if kept else None
        if kept is None or process is None:
            life = replica.end_unseen(kept.process if kept else None)
        else:
            life = replica.adopt(process, ready=kept.ready or probe is None)
        self.tasks.start(name, life)

    async def observe(self) -> Mapping[str, Sighting]:
        """See `Engine.observe`."""
        found = Sighting(WorkerLife.WAITING, reason="its process is being taken over")
        return dict.fromkeys(self._found, found) | {
            name: replica.sighting() for name, replica in self._replicas.items()
        }

    async def start(self, step: Start) -> None:
        """See `StepwiseEngine.start`; the start continues after this returns."""
        template, name = step.template, step.replica
        if name in self._replicas:
            return
        table = templates.template_named(self.templates, template)
        shown = (f"http://127.0.0.1:{table.metrics.port}{table.metrics.path}",) if table.metrics else ()
        target = (*(table.probe.target if table.probe else ()), *shown)
        order = with_free_port(step.order, (*table.command, *target))
        environment = self.context.user.environment()
        prepared = templates.launch(template, table, order, sys.executable, environment, also=target)
        asked = templates.fill_arguments(template, target, order, sys.executable, also=table.command)
        metrics = asked[-1] if shown else ""
        probe = table.probe.filled(asked[: len(asked) - len(shown)]) if table.probe else None
        if found := self._found.pop(name, None):
            await self._take_over(name, KeptProcess(found, probe, metrics=metrics))
        else:
            replica = self._replicas[name] = LocalReplica(name, self.context, probe, metrics)
            self.tasks.start(name, replica.start(order, prepared))

    async def finish(self, step: Finish) -> None:
        """See `StepwiseEngine.finish`."""
        if step.replica in self._replicas:
            self._replicas[step.replica].finish()

    async def kill(self, replica: str) -> None:
        """See `StepwiseEngine.kill`."""
        if replica in self._replicas:
            self._replicas[replica].kill()

    async def remove(self, replica: str) -> None:
        """See `StepwiseEngine.remove`."""
        if replica in self._found:
            await self._take_over(replica, KeptProcess(self._found.pop(replica)))
            raise EngineUnavailableError("its process was found, and is asked to finish")
        if local := self._replicas.get(replica):
            if not local.ended and not await local.drop():
                raise EngineUnavailableError("it has just been started")
            del self._replicas[replica]

    async def watch(self) -> None:
        """See `Engine.watch`."""
        await wait_at_most(self.changed, POLL)
        self.changed.clear()

    async def bound_logs(self) -> None:
        """Keep the replicas' logs within their limits, forever."""
        while True:
            await asyncio.sleep(BOUND_LOGS_PERIOD)
            running = {name for name, replica in self._replicas.items() if not replica.ended}
            try:
                await asyncio.to_thread(self.context.logs.bound, running)
            except OSError as error:
                _log.warning("cannot rotate the logs of replicas", why=error.strerror)
