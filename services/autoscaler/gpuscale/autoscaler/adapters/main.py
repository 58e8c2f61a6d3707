"""The program of every adapter: it finds the requested engine and runs that engine's replicas.

    gpuscale-adapter                 processes of this host
    gpuscale-adapter ENGINE          the engine of that name
    gpuscale-ENGINE-adapter          the same, for built-in engines

Engines are the entry points of the group `gpuscale.engines`: each names a subclass of `EngineSettings`.
"""

import asyncio
import re
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path

import grpc

from gpuscale.autoscaler.adapters.connection import AutoscalerConnection
from gpuscale.autoscaler.adapters.crew import EngineCrew
from gpuscale.autoscaler.adapters.journal import Journal
from gpuscale.autoscaler.adapters.served import ServedPages
from gpuscale.autoscaler.adapters.settings import EngineSettings, Host, NodeEngineSettings
from gpuscale.autoscaler.domain.replicas import ReplicaState
from gpuscale.common.config.settings import run_program
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.rpc.meter import ProgramMeter
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.metrics_text import Family, MetricsPage, labels
from gpuscale.common.runtime.tasks import Clock, SystemClock, TaskScope
from gpuscale.common.secrets import hide_memory
from gpuscale.internal.autoscaler import v1 as autoscaler_internal

PROGRAM = "gpuscale-adapter"
ENGINES = "gpuscale.engines"
DEFAULT_ENGINE = "process"

SERVICE = "adapter"
"""Prefix of the series of every engine's adapter."""
_PREFIX = f"gpuscale_{SERVICE}"
_INFO = Family(f"{_PREFIX}_info", "gauge", "The adapter and its engine; always 1.")
_SECONDS = Family(f"{_PREFIX}_engine_seconds", "histogram", "Time spent in the engine, by operation.")
_FAILURES = Family(
    f"{_PREFIX}_engine_failures_total", "counter", "Failed operations of the engine, by reason."
)
_REPLICAS = Family(f"{_PREFIX}_replicas", "gauge", "Known replicas, by state.")
_KNOWN = Family(f"{_PREFIX}_engine_known", "gauge", "1 while the state of the engine is known.")
_SILENT = Family(
    f"{_PREFIX}_autoscaler_silent_seconds",
    "gauge",
    "How long the autoscaler has been silent; 0 while it is connected.",
)

_NAMED_FOR_ENGINE = re.compile(r"gpuscale-(\w+)-adapter")
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one adapter; `named` identifies it."""

    crew: EngineCrew
    connection: AutoscalerConnection
    named: dict[str, str]

    async def add(self, page: MetricsPage) -> None:
        """Add them to a page."""
        page.add(_INFO, labels(self.named), 1)
        for operation, histogram in sorted(self.crew.spent.items()):
            page.add_histogram(_SECONDS, {"operation": operation}, histogram)
        for (operation, reason), count in sorted(self.crew.failures.items()):
            page.add(_FAILURES, labels({"operation": operation, "reason": reason}), count)
        reports = self.crew.reports()
        page.add(_KNOWN, "", int(reports is not None))
        if reports is not None:
            states = Counter(report.state for report in reports.values())
            for state in ReplicaState:
                page.add(_REPLICAS, labels({"state": state.name}), states[state])
        page.add(_SILENT, "", round(self.connection.silence(), 3))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    program, engine = Path(sys.argv[0]).name, DEFAULT_ENGINE
    if named := _NAMED_FOR_ENGINE.fullmatch(program):
        engine = named[1]
    elif words and not words[0].startswith("-"):
        engine = words.pop(0)
        program = f"{PROGRAM} {engine}"
    else:
        program = PROGRAM
    found = {point.name: point for point in entry_points(group=ENGINES)}
    if engine not in found:
        sys.stderr.write(
            f"{program}: error: no engine {engine} is installed; there are {', '.join(sorted(found))}\n"
        )
        return 2
    settings: type[EngineSettings] = found[engine].load()
    hide_memory()
    return run_program(settings, serve, words, program=program, description=settings.description)


async def serve(settings: EngineSettings, stop: asyncio.Event) -> None:
    """Run replicas until `stop` is set; GpuscaleError if the directory, its content or the engine is unusable."""
    with DirectoryLock(settings.data_dir):
        async with AsyncExitStack() as stack:
            opened = settings.open_channel(settings.autoscaler_address, urgent=True)
            autoscaler = await stack.enter_async_context(opened)
            agent = None
            if isinstance(settings, NodeEngineSettings) and (found := settings.open_agent_channel()):
                agent = await stack.enter_async_context(found)
            meter = ProgramMeter(SERVICE)
            await stack.enter_async_context(
                open_adapter(settings, autoscaler=autoscaler, agent=agent, clock=SystemClock(), meter=meter)
            )
            await stack.enter_async_context(settings.observed(meter))
            _log.info("running", adapter=settings.adapter_id, autoscaler=settings.autoscaler_address)
            await stop.wait()


@asynccontextmanager
async def open_adapter(
    settings: EngineSettings,
    *,
    autoscaler: grpc.aio.Channel,
    clock: Clock,
    agent: grpc.aio.Channel | None = None,
    meter: ProgramMeter | None = None,
) -> AsyncGenerator[None]:
    """Drive an engine for the autoscaler until the block ends; it serves nothing itself.

    The caller holds the lock on `settings.data_dir` and owns the channels; `agent` leads to the node's agent, `meter` exports
    figures. FailedPreconditionError if the journal cannot be read, or the engine cannot be used.
    """
    if settings.library and find_spec(settings.library) is None:
        raise FailedPreconditionError(
            f"the Python package {settings.library} is missing: pip install 'gpuscale[{settings.kind}]'",
            reason="LIBRARY_MISSING",
        )
    journal, changed = Journal(settings.data_dir / "replicas"), asyncio.Event()
    records = tuple(await asyncio.to_thread(journal.load))
    async with settings.open_engine(Host(clock, records, agent)) as opened, TaskScope() as tasks:
        crew = EngineCrew(opened.engine, journal, records, clock, changed, max_replicas=settings.max_replicas)
        register = autoscaler_internal.Register(
            adapter=settings.adapter_id,
            kind=settings.kind,
            node=opened.node,
            templates=settings.template_names,
            max_replicas=settings.max_replicas,
            version=version("gpuscale"),
            capabilities=opened.capabilities,
            workers={name: workers.to_wire() for name, workers in settings.workers.items()},
        )
        why = partial(settings.why_unavailable, settings.autoscaler_address)
        served = ServedPages(crew.metrics, clock, changed.set)
        connection = AutoscalerConnection(autoscaler, register, crew, changed, why, served, opened.read_log)
        tasks.spawn("replicas on the engine", crew.run())
        tasks.spawn("connection to the autoscaler", connection.run())
        tasks.spawn("metrics of replicas", served.run())
        named = {"adapter": settings.adapter_id, "engine": settings.kind, "version": register.version}
        figures = Figures(crew, connection, named)
        try:
            with meter.showing(figures.add) if meter is not None else nullcontext():
                yield
        finally:
            if opened.end_within is not None:
                await crew.end_all(opened.end_within)


if __name__ == "__main__":
    sys.exit(main())
