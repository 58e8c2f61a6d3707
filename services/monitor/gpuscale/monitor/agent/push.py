"""The agent's stream to the fleet, reopened whenever it ends.

After Hello and the fleet's answer, a stream sends a whole snapshot of a new reading, then changes, with whole snapshots now and
then and when the fleet asks. Only the newest snapshot waits to be sent.
"""

import asyncio
from collections import Counter
from contextlib import aclosing
from random import SystemRandom
from typing import Final

import grpc

from gpuscale.common import VERSION
from gpuscale.common.errors import DeadlineExceededError, GpuscaleError, UnavailableError
from gpuscale.common.rpc.diagnosis import Explain
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.rpc.wrapped_channel import send
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff, Clock, pause_before_retry
from gpuscale.common.wire import to_datetime, to_timestamp
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.agent.collector import Collector, Sampler
from gpuscale.monitor.agent.deltas import Deltas
from gpuscale.monitor.agent.events import FaultLog
from gpuscale.monitor.model.readings import Quarantine
from gpuscale.monitor.wire import to_snapshot

# The fleet acknowledges at least every 20 s of snapshots; after a longer silence the stream is dead.
SILENCE_SECONDS = 45.0
SILENCE_PERIODS = 3
FULL_EVERY_SECONDS = 60.0
"""About how often a whole snapshot is sent; with jitter."""
LONGEST_REFUSED_SECONDS: Final = 30.0
"""Maximum wait after a refused snapshot; below the silence that ends a stream."""
_Call = grpc.aio.StreamStreamCall[
    monitor_internal.StreamTelemetryRequest, monitor_internal.StreamTelemetryResponse
]
_log = get_logger(__name__)
_random = SystemRandom()


class RefusalBackoff:
    """Leaves out a snapshot after a second refusal in a row, and waits twice as long after each further one."""

    def __init__(self, period: float) -> None:
        self._period, self._refused, self._until = period, 0, 0.0

    def answered(self, now: float, *, refused: bool) -> None:
        """Take in an answer of the fleet."""
        self._refused = self._refused + 1 if refused else 0
        wait = self._period * 2 ** min(self._refused - 1, 10) if self._refused > 1 else 0.0
        self._until = now + min(LONGEST_REFUSED_SECONDS, wait)

    def waits(self, now: float) -> bool:
        """Whether it is too soon for another snapshot."""
        return now < self._until


class FleetPush:
    """Streams the snapshots of a sampler and the driver's faults to the fleet.

    `explain` finds out why the fleet cannot be reached. `failures` counts ended streams by reason.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        sampler: Sampler,
        collector: Collector,
        clock: Clock,
        faults: FaultLog,
        explain: Explain,
    ) -> None:
        self._stub = monitor_internal.TelemetryServiceStub(channel)
        self._sampler = sampler
        self._faults = faults
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self._deltas = Deltas(FULL_EVERY_SECONDS * _random.uniform(0.75, 1.25))
        self._clock = clock
        self._collector = collector
        self._silence = SILENCE_SECONDS + SILENCE_PERIODS * collector.period
        self._explain = explain
        self._backoff = Backoff()
        self._refusals = RefusalBackoff(collector.period)
        self.connected = False
        self.failures: Counter[str] = Counter()
        self._hello = monitor_internal.Hello(
            node=collector.node,
            epoch=collector.epoch,
            agent_version=VERSION,
            start_time=to_timestamp(collector.start_time),
        )

    async def run(self) -> None:
        """Stream until cancelled."""
        while True:
            call = self._stub.StreamTelemetry()
            self._deltas.reset()
            self._refusals.answered(self._clock.now(), refused=False)
            welcome = asyncio.Event()
            try:
                async with asyncio.TaskGroup() as group:
                    begun = asyncio.Event()
                    writers = (
                        group.create_task(self._write(call, welcome, begun), name="agent push writer"),
                        group.create_task(self._write_faults(call, begun), name="agent push of faults"),
                    )
                    error = await self._read(call, welcome)
                    for writer in writers:
                        writer.cancel()
            finally:
                self.connected = False
                call.cancel()
            if isinstance(error, UnavailableError):
                error = await asyncio.to_thread(self._explain, error)
            self.failures[error.reason] += 1
            wait = self._backoff.after(error)
            _log.warning(
                "the stream to the fleet ended",
                reason=error.reason,
                error=error.message,
                retry_in=round(wait, 1),
            )
            await pause_before_retry(wait)

    async def _write(self, call: _Call, welcome: asyncio.Event, begun: asyncio.Event) -> None:
        try:
            await send(call, monitor_internal.StreamTelemetryRequest(hello=self._hello))
            await welcome.wait()
            await self._sampler.get(max_age=0.0)
            async with aclosing(self._sampler.snapshots.follow()) as snapshots:
                async for snapshot, _ in snapshots:
                    if self._refusals.waits(self._clock.now()):
                        continue
                    async with self._writing:
                        now = self._clock.now()
                        delta = self._deltas.next(snapshot, now)
                        whole = to_snapshot(snapshot, now) if delta is None else None
                        await send(call, monitor_internal.StreamTelemetryRequest(snapshot=whole, delta=delta))
                    self._faults.saw(snapshot.gpus)
                    begun.set()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream has ended: `_read` learns why

    async def _write_faults(self, call: _Call, begun: asyncio.Event) -> None:
        """Report faults as they occur, once the fleet knows the GPUs."""
        last = -1
        await begun.wait()
        try:
            while True:
                await self._faults.after(last)
                message = self._faults.message(last, self._clock.now())
                async with self._writing:
                    await send(call, monitor_internal.StreamTelemetryRequest(faults=message))
                last = message.faults[-1].seq
                self._faults.told(last)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def _read(self, call: _Call, welcome: asyncio.Event) -> GpuscaleError:
        """Read acknowledgements until the stream ends; returns why it did. The first one sets `welcome`."""
        rejected, reason = 0, ""
        try:
            with rpc_errors():
                while True:
                    async with asyncio.timeout(self._silence):
                        answer = await call.read()
                    if not isinstance(answer, monitor_internal.StreamTelemetryResponse):
                        return UnavailableError("the fleet ended the stream", reason="STREAM_ENDED")
                    if answer.resync:
                        self._deltas.reset()
                    self._collector.quarantines = {
                        quarantine.uuid: Quarantine(quarantine.reason, to_datetime(quarantine.start_time))
                        for quarantine in answer.quarantines
                    }
                    welcome.set()
                    self.connected = True
                    refused = answer.rejected_count > rejected
                    rejected = answer.rejected_count
                    self._refusals.answered(self._clock.now(), refused=refused)
                    if answer.acked_seq < 0:
                        _log.info("streaming to the fleet", node=self._hello.node)
                    else:
                        self._backoff.reset()
                    if refused:
                        self._deltas.refused(self._clock.now())
                        if answer.rejected_reason != reason:
                            reason = answer.rejected_reason
                            _log.warning("the fleet rejects snapshots", reason=reason)
        except TimeoutError:
            return DeadlineExceededError("the fleet acknowledges nothing", reason="NO_ACKNOWLEDGEMENT")
        except GpuscaleError as error:
            return error
