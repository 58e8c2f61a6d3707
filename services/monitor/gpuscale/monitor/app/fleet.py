"""The program `gpuscale-fleet`: receives the streams of all agents, serves their nodes, history, recordings and health."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial

import grpc

from gpuscale.common.config.settings import run_program
from gpuscale.common.rpc.meter import CallMeter, ProgramMeter
from gpuscale.common.rpc.server import Registration, Server, registrations
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock, SystemClock, TaskScope
from gpuscale.common.security.auth import TokenFile
from gpuscale.monitor.app.settings import FleetSettings
from gpuscale.monitor.exposition.fleet import FleetPage, add_history
from gpuscale.monitor.exposition.snapshots import HolderLabels
from gpuscale.monitor.fleet import join_servicer
from gpuscale.monitor.fleet.nodes import Directory, Nodes
from gpuscale.monitor.fleet.servicer import FleetServicer
from gpuscale.monitor.history.history import History, Tier
from gpuscale.monitor.observing.health_servicer import HealthServicer, HealthWatch
from gpuscale.monitor.observing.history_servicer import HistoryServicer
from gpuscale.monitor.observing.recording_servicer import Keep, RecordingFeed, RecordingServicer, forget
from gpuscale.monitor.observing.samples import SampleObserver
from gpuscale.monitor.recording import Recordings
from gpuscale.monitor.state.saver import open_saver

TICK_SECONDS = 1.0
_log = get_logger(__name__)


class Observing:
    """Keeps the history, recordings and health of an index of nodes."""

    def __init__(self, nodes: Nodes, clock: Clock, tiers: Sequence[Tier], history_bytes: int) -> None:
        self._nodes = nodes
        self._clock = clock
        self.history = History(tiers, history_bytes)
        self._told = False
        self.recordings = Recordings()
        self._recorded = RecordingFeed(self.recordings, clock)
        self._health = HealthWatch(clock, nodes)
        self.events = self._health.register.events
        self._samples = SampleObserver(self.history, self.recordings)
        nodes.observers = (*nodes.observers, self._samples.observe, self._health.observe)
        nodes.fault_observers = (*nodes.fault_observers, self._health.hear)

    async def run(self) -> None:
        """Apply the passing of time until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._health.tick()
            self._recorded.tell()
            self.history.forget_ended(self._clock.now())
            if self.history.left_out and not self._told:
                self._told = True
                _log.warning("no memory left for the history of more GPUs", setting="history_memory_mib")
            self._samples.forget_unknown(self._nodes)

    def resume(self) -> None:
        """Resume unresolved events of the last run. Call it once, after restoring the events."""
        self._health.resume()

    def registrations(self, keep: Keep) -> Iterator[Registration]:
        """The three services. `keep` stores a recording, by id, before its caller is answered."""
        directory = Directory(self._nodes)
        return registrations(
            RecordingServicer(self._recorded, directory, self._clock, keep),
            HistoryServicer(self.history, directory, self._clock),
            HealthServicer(self._health, directory, self._clock),
        )


# How late a watcher may learn that a node is STALE.
SWEEP_SECONDS = 0.25
MIB = 1024**2


@asynccontextmanager
async def open_fleet(
    settings: FleetSettings,
    *,
    clock: Clock,
    calls: CallMeter | None = None,
    allocator: grpc.aio.Channel | None = None,
) -> AsyncGenerator[tuple[Registration, ...], None]:
    """Receive agents' streams until the block ends. Nodes are not stored: agents reconnect after a restart.

    The caller holds the lock on `settings.data_dir`, if any. `/metrics` shows `calls` too. Raises as `open_saver` and
    `HolderLabels`.
    """
    nodes = Nodes(clock, settings.max_nodes)
    observing = Observing(nodes, clock, settings.history_tiers(), settings.history_memory_mib * MIB)
    style = settings.style(many_nodes=True)
    holders = HolderLabels(allocator, clock).ask if settings.metrics_holders else None
    page = FleetPage(nodes, observing.events.lasting, clock, style, settings.metrics_max_gpus, holders)
    metrics = calls or ProgramMeter("fleet")
    async with AsyncExitStack() as stack:
        keep: Keep = forget
        saver, data_dir = None, settings.data_dir
        if data_dir is not None:
            saver = await stack.enter_async_context(
                open_saver(data_dir, observing.history, observing.recordings, observing.events, clock)
            )
            observing.resume()
            keep = saver.save_recording
        stack.enter_context(metrics.showing(page.add))
        stack.enter_context(metrics.showing(partial(add_history, observing.history, saver, data_dir)))
        await stack.enter_async_context(settings.open_metrics(metrics))
        tasks = await stack.enter_async_context(TaskScope())

        async def sweep() -> None:
            while True:
                await asyncio.sleep(SWEEP_SECONDS)
                nodes.sweep()

        tasks.spawn("fleet sweep", sweep())
        tasks.spawn("fleet health", observing.run())
        signer = settings.signer()
        joined = join_servicer.Joined(None if signer is None or data_dir is None else data_dir / "joined")
        tokens = None if settings.tokens_file is None else TokenFile(settings.tokens_file)
        yield (
            *registrations(
                FleetServicer(nodes, joined, clock),
                join_servicer.JoinServicer(signer, nodes, joined, clock),
                join_servicer.CertificateServicer(signer, joined),
                join_servicer.ServicesHostServicer(signer, joined),
                join_servicer.LoginServicer(signer, tokens, nodes, joined, clock),
            ),
            *observing.registrations(keep),
        )


PROGRAM = "gpuscale-fleet"
DESCRIPTION = "Collects the snapshots of all agents."


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(FleetSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: FleetSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. GpuscaleError if the directory, its content or the address cannot be used."""
    authenticator = settings.authenticator()
    calls = CallMeter(settings.section, authenticator) if settings.metrics_listen else None
    server = Server(settings.server_options(), authenticator, calls)
    with nullcontext() if settings.data_dir is None else DirectoryLock(settings.data_dir):
        address = server.bind()
        async with AsyncExitStack() as stack:
            allocator = None
            if settings.allocator_address:
                allocator = await stack.enter_async_context(settings.open_channel(settings.allocator_address))
            fleet = open_fleet(settings, clock=SystemClock(), calls=calls, allocator=allocator)
            server.add(*await stack.enter_async_context(fleet))
            await stack.enter_async_context(server)
            _log.info("fleet serves", address=address)
            await stop.wait()
