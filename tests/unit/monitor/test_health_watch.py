"""What the fleet shows of health: quarantines on its nodes, and that healthy GPUs are passed by quickly but not missed."""

from contextlib import ExitStack

import pytest

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import to_duration
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.translate import to_node
from gpuscale.monitor.health.checks import results
from gpuscale.monitor.health.facts import facts_of, looks_well
from gpuscale.monitor.health.watching import HealthWatch
from tests.support.clock import ManualClock
from tests.support.monitor_values import gpu, hello, snapshot, telemetry

READINGS = {
    "ecc_volatile_uncorrected_count": 1,
    "remapped_rows_failed": True,
    "remapped_rows_pending": True,
    "retired_pages_pending": True,
    "recovery_action": types_api.RecoveryAction.RECOVERY_ACTION_GPU_RESET,
    "throttle_reason_mask": 0x40,
}


class Site:
    """An index of nodes, the health of it, and one agent's stream."""

    def __init__(self, stack: ExitStack) -> None:
        self.clock = ManualClock()
        self.nodes = Nodes(self.clock, 10)
        self.health = HealthWatch(self.clock, self.nodes)
        self.nodes.observers = (self.health.observe,)
        self.nodes.fault_observers = (self.health.hear,)
        self.stream = stack.enter_context(self.nodes.connected(hello(), lambda: None))
        self.seq = 0

    def send(self, *gpus: types_api.Gpu) -> None:
        self.seq += 1
        self.clock.advance(1.0)
        assert self.nodes.take(self.stream, telemetry(snapshot(seq=self.seq, gpus=gpus)))

    def fault(self, uuid: str, seq: int, epoch: str = "") -> bool:
        fault = api.ReportedFault(uuid=uuid, xid=48, seq=seq, age=to_duration(0))
        request = api.StreamTelemetryRequest(faults=api.ReportedFaults(faults=[fault]))
        return self.nodes.take(self.stream, request)

    def shown(self) -> list[str]:
        node = to_node(self.nodes.get("alpha"), self.clock.now())
        return [one.quarantine for one in node.snapshot.gpus]


@pytest.fixture
def site() -> Site:
    with ExitStack() as stack:
        yield Site(stack)


@pytest.mark.parametrize("reading", READINGS)
def test_whatever_a_check_finds_does_not_look_well(reading: str) -> None:
    """The quick look must never pass by what the checks would find."""
    one = gpu()
    assert looks_well(one)
    setattr(one.reading, reading, READINGS[reading])
    assert any(results(facts_of(one)).values())
    assert not looks_well(one)


@pytest.mark.parametrize("state", types_api.GpuState.keys())
def test_a_state_that_a_check_knows_does_not_look_well(state: str) -> None:
    one = gpu()
    one.state = types_api.GpuState.Value(state)
    assert not (looks_well(one) and any(results(facts_of(one)).values()))


def test_a_mig_instance_shares_the_quarantine_of_its_gpu(site: Site) -> None:
    part = gpu("MIG-1", total=1000, free=1000, used=0)
    part.parent_uuid = "GPU-1"
    site.send(gpu("GPU-1"), part, gpu("GPU-2"))
    site.fault("GPU-1", 0)
    whole, instance, other = site.shown()
    assert "XID 48" in whole
    assert instance == whole
    assert other == ""


def test_a_quarantine_marks_the_node_for_watchers_and_is_on_later_snapshots(site: Site) -> None:
    site.send(gpu("GPU-1"))
    with site.nodes.watchers.watch() as watch:
        site.fault("GPU-1", 0)
        assert watch._changed == {"alpha"}
    site.send(gpu("GPU-1"))
    assert "XID 48" in site.shown()[0]


def test_a_fault_that_is_told_again_counts_once_and_one_that_breaks_a_rule_is_refused(site: Site) -> None:
    site.send(gpu("GPU-1"))
    for seq in (0, 1, 0, 1):
        assert site.fault("GPU-1", seq)
    [event] = site.health.register.events.newest_first()
    assert event.count == 2
    assert not site.fault("", 2)


def test_a_forgotten_node_ends_its_events(site: Site) -> None:
    site.send(gpu("GPU-1"))
    site.fault("GPU-1", 0)
    site.nodes._disconnect(site.stream)
    site.nodes.forget("alpha")
    site.health.tick()
    [event] = site.health.register.events.newest_first()
    assert event.resolved_at is not None
