"""Which health events last is what the table of checks says of all that an agent ever showed, whatever it showed when."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

import pytest

from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.agent.deltas import Deltas
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.model.readings import GpuIdentity, GpuReading, GpuState, GpuView, RecoveryAction
from gpuscale.monitor.observing.health_servicer import HealthWatch
from gpuscale.monitor.state.saver import event_from_text, event_to_text
from gpuscale.monitor.wire import to_snapshot
from tests.support.clock import ManualClock
from tests.support.monitor_values import GIB, hello, snapshot_read, telemetry

# Seconds until a finding is an event, seconds until it is resolved, and whether it keeps work away: docs/monitoring.md.
TABLE = {
    "ECC_UNCORRECTED": (0, 30, True),
    "ROW_REMAP_FAILURE": (0, 30, True),
    "MEMORY_REPAIR_PENDING": (0, 30, False),
    "GPU_LOST": (2, 30, True),
    "RESET_REQUIRED": (0, 30, True),
    "GPU_HUNG": (0, 30, True),
    "RECOVERY_ACTION": (0, 30, True),
    "THERMAL_SLOWDOWN": (10, 60, False),
}
LOOK_EACH = 5
"""Seconds from look to look; what is told may differ once, but not twice in a row."""
AS_NVML_SPELLS = ("GPU-8F6A0c1e-{n}", "MIG-GPU-8f6a0C1E-{n}/7/0", "MIG-8f6a0c1e-{n}", "gpu-8f6a0c1e-{n}")

_T = TypeVar("_T")


def said(state: GpuState, reading: GpuReading) -> dict[str, bool]:
    """What each check says of a GPU; no entry where it cannot tell."""
    found: dict[str, bool] = {}
    if state in {GpuState.OK, GpuState.DEGRADED}:
        found = {"GPU_LOST": False, "RESET_REQUIRED": False, "GPU_HUNG": False}
    elif state is GpuState.LOST:
        found = {"GPU_LOST": True, "GPU_HUNG": False}
    elif state is GpuState.RESET_REQUIRED:
        found = {"GPU_LOST": False, "RESET_REQUIRED": True, "GPU_HUNG": False}
    elif state is GpuState.HUNG:
        found = {"GPU_HUNG": True}
    if reading.ecc_volatile_uncorrected_count is not None:
        found["ECC_UNCORRECTED"] = reading.ecc_volatile_uncorrected_count > 0
    if reading.remapped_rows_failed is not None:
        found["ROW_REMAP_FAILURE"] = reading.remapped_rows_failed
    pending = {reading.remapped_rows_pending, reading.retired_pages_pending} - {None}
    if pending:
        found["MEMORY_REPAIR_PENDING"] = True in pending
    if reading.recovery_action is not None:
        found["RECOVERY_ACTION"] = reading.recovery_action is not RecoveryAction.NONE
    if reading.throttle_reason_mask is not None:
        found["THERMAL_SLOWDOWN"] = bool(reading.throttle_reason_mask & 0xE0)
    return found


def random_reading(source: Random) -> GpuReading:
    def one(well: _T, *ill: _T) -> _T | None:
        return None if source.random() < 0.15 else source.choice(ill) if source.random() < 0.1 else well

    return GpuReading(
        utilization_percent=source.random() * 100,
        memory_total_bytes=80 * GIB,
        ecc_volatile_uncorrected_count=one(0, 1, 7),
        remapped_rows_failed=one(False, True),  # noqa: FBT003
        remapped_rows_pending=one(False, True),  # noqa: FBT003
        retired_pages_pending=one(False, True),  # noqa: FBT003
        recovery_action=one(RecoveryAction.NONE, RecoveryAction.NODE_REBOOT, RecoveryAction.GPU_RESET),
        throttle_reason_mask=one(0, 4, 0x40, 0x80, 0x24),
    )


@dataclass
class Gpu:
    """A GPU, and what each check said of it, second by second."""

    uuid: str
    reading: GpuReading = field(default_factory=GpuReading)
    state: GpuState = GpuState.OK
    shown: bool = True
    last: dict[str, bool] = field(default_factory=dict[str, bool])
    heard: dict[str, list[tuple[float, bool]]] = field(default_factory=dict[str, list[tuple[float, bool]]])
    restored: set[str] = field(default_factory=set[str])
    differed: int = 0

    def hear(self, now: float) -> None:
        """What was said last stands; of a GPU that is not shown nothing good is said."""
        for check, bad in self.last.items():
            if bad or self.shown:
                self.heard.setdefault(check, []).append((now, bad))

    def lasting(self) -> set[str]:
        """The events that last, from all that was heard."""
        heard = {check: self.heard.get(check, []) for check in TABLE}
        return {check for check in TABLE if lasts(heard[check], *TABLE[check][:2], check in self.restored)}


def lasts(heard: list[tuple[float, bool]], raise_after: float, resolve_after: float, lasting: bool) -> bool:
    since, before = 0.0, not heard[0][1] if heard else False
    for at, bad in heard:
        since, before = (at if bad is not before else since), bad
        if bad and at - since >= raise_after:
            lasting = True
        elif not bad and at - since >= resolve_after:
            lasting = False
    return lasting


class Site:
    """A fleet, and an agent that sends it what changes."""

    def __init__(self, source: Random, stack: ExitStack) -> None:
        self.source, self.stack, self.clock = source, stack, ManualClock(source.choice((3.0, 1000.0)))
        self.gpus = [
            Gpu(source.choice(AS_NVML_SPELLS).format(n=number)) for number in range(source.randrange(1, 4))
        ]
        self.deltas = Deltas(full_every=source.choice((5.0, 30.0, 60.0)))
        self.seq = self.silent = 0
        self.start([])

    def start(self, saved: list[str]) -> None:
        """The fleet begins, with events of a run before."""
        self.nodes = Nodes(self.clock, 10)
        self.health = HealthWatch(self.clock, self.nodes)
        self.events = self.health.register.events
        self.events.restore([event_from_text(text, 0.0) for text in saved])
        self.health.resume()
        self.nodes.observers = (self.health.observe,)
        self.stream = self.stack.enter_context(self.nodes.connected(hello(), lambda: None))
        self.deltas.reset()

    def restart(self) -> None:
        """What lasted goes on; for how long something was well, or ill, is counted anew."""
        for gpu in self.gpus:
            gpu.heard, gpu.last, gpu.restored = {}, {}, self.told(gpu)
        self.start([event_to_text(event, 0.0) for event in self.events.newest_first()])

    def second(self) -> None:
        self.clock.advance(1.0)
        for gpu in self.gpus:
            if self.source.random() < 0.04:
                gpu.reading = random_reading(self.source)
            if self.source.random() < 0.02:
                ill = [
                    GpuState.LOST, GpuState.RESET_REQUIRED, GpuState.HUNG, GpuState.SLOW, GpuState.RELEASED,
                ]  # fmt: skip
                gpu.state = self.source.choice([GpuState.OK] * 4 + [GpuState.DEGRADED] + ill)
            if self.source.random() < 0.006:
                gpu.shown = not gpu.shown
        self.silent = max(self.silent - 1, 0) or (
            self.source.randrange(2, 100) if self.source.random() < 0.004 else 0
        )
        if not self.silent:
            if self.source.random() < 0.002:
                self.restart()
            self.send()
        self.health.tick()
        if not self.silent or not dict(self.nodes.silence(self.clock.now()))["alpha"]:
            for gpu in self.gpus:
                gpu.hear(self.clock.now())

    def send(self) -> None:
        self.seq, now = self.seq + 1, self.clock.now()
        shown = [(gpu, GpuIdentity(gpu.uuid, 0, "Test GPU")) for gpu in self.gpus if gpu.shown]
        views = [GpuView(one, gpu.state, gpu.reading, now - 0.1, "") for gpu, one in shown]
        snapshot = snapshot_read(now, seq=self.seq, gpus=tuple(views))
        delta = self.deltas.next(snapshot, now)
        whole = telemetry(to_snapshot(snapshot, now)) if delta is None else None
        assert self.nodes.take(self.stream, whole or monitor_internal.StreamTelemetryRequest(delta=delta))
        for gpu in self.gpus:
            if gpu.shown:
                gpu.last = said(gpu.state, gpu.reading)

    def told(self, gpu: Gpu) -> set[str]:
        """What the fleet says that lasts."""
        return {event.check.name for event in self.events.lasting() if event.uuid == gpu.uuid}

    def check(self) -> None:
        quarantined = self.health.register.quarantines("alpha")
        for gpu in self.gpus:
            told = self.told(gpu)
            gpu.differed = gpu.differed + 1 if told != gpu.lasting() else 0
            assert gpu.differed <= 1, (gpu.uuid, told, gpu.lasting())
            assert (gpu.uuid.lower() in quarantined) is any(TABLE[check][2] for check in told)


@pytest.mark.parametrize("seed", range(20))
def test_what_lasts_is_what_was_shown(seed: int) -> None:
    source = Random(seed)
    with ExitStack() as stack:
        site = Site(source, stack)
        for second in range(source.randrange(50, 500)):
            site.second()
            if second % LOOK_EACH == 0:
                site.check()
