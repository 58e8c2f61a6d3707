"""What the fleet makes of the snapshots it takes in: recordings, history and health, and their services."""

import asyncio
from collections.abc import Sequence
from functools import partial

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.rpc.server import Registration
from gpuscale.common.runtime.clock import Clock
from gpuscale.monitor.fleet.directory import Directory
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.health.servicer import HealthServicer
from gpuscale.monitor.health.watching import HealthWatch
from gpuscale.monitor.history.history import History
from gpuscale.monitor.history.series import Tier
from gpuscale.monitor.history.servicer import HistoryServicer
from gpuscale.monitor.model.health import Event
from gpuscale.monitor.recording.observer import SampleObserver
from gpuscale.monitor.recording.recordings import Recordings
from gpuscale.monitor.recording.servicer import Keep, RecordingServicer, forget

RECORDING_SERVICE = "gpuscale.api.monitor.v1.RecordingService"
HISTORY_SERVICE = "gpuscale.api.monitor.v1.HistoryService"
HEALTH_SERVICE = "gpuscale.api.monitor.v1.HealthService"
TICK_SECONDS = 1.0


class Observing:
    """Observes an index of nodes from when it is made.

    Attributes:
        history: what nodes and GPUs did.
        recordings: what was asked to be recorded.
        events: what is, or was, wrong.
    """

    def __init__(self, nodes: Nodes, clock: Clock, tiers: Sequence[Tier], history_bytes: int) -> None:
        self._nodes = nodes
        self._clock = clock
        self.history = History(tiers, history_bytes)
        self.recordings = Recordings()
        self._health = HealthWatch(clock, nodes)
        self.events = self._health.register.events
        self._samples = SampleObserver(self.history, self.recordings)
        nodes.observers = (*nodes.observers, self._samples.observe, self._health.observe)
        nodes.fault_observers = (*nodes.fault_observers, self._health.hear)

    async def run(self) -> None:
        """Let time pass for what only time changes, for ever."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._health.tick()
            self.history.forget_ended(self._clock.now())
            self._samples.forget_unknown(self._nodes)

    def resume(self) -> None:
        """What was wrong when a run before ended still is; to be called first, once the events were restored."""
        self._health.resume()

    def lasting_events(self) -> list[Event]:
        """The health events that are not resolved."""
        return self.events.lasting()

    def registrations(self, keep: Keep = forget) -> tuple[Registration, ...]:
        """The three services. `keep` makes a recording last, by id, before its caller is answered."""
        directory = Directory(self._nodes)
        recording = RecordingServicer(self.recordings, directory, self._clock, keep)
        history = HistoryServicer(self.history, directory, self._clock)
        health = HealthServicer(self._health, directory, self._clock)
        return (
            Registration(
                RECORDING_SERVICE, partial(monitor_api.add_RecordingServiceServicer_to_server, recording)
            ),
            Registration(HISTORY_SERVICE, partial(monitor_api.add_HistoryServiceServicer_to_server, history)),
            Registration(HEALTH_SERVICE, partial(monitor_api.add_HealthServiceServicer_to_server, health)),
        )
