"""What the fleet shows of health: quarantines on its nodes, and that healthy GPUs are passed by quickly but not missed."""

import json
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.errors import NotFoundError
from gpuscale.common.wire import to_duration, to_token
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.record import to_node
from gpuscale.monitor.health.checks import HOLDS, MOST_REPLAYS_PER_MINUTE, Event, HealthCheck, results
from gpuscale.monitor.health.events import Events, xid_finding
from gpuscale.monitor.observing.health_servicer import (
    EVERY_SECONDS,
    HealthServicer,
    HealthWatch,
    facts_of,
    looks_well,
)
from gpuscale.monitor.state.saver import event_from_text, event_to_text
from gpuscale.monitor.wire import Change, Picture
from tests.support.clock import ManualClock
from tests.support.monitor import told_of
from tests.support.monitor_values import gpu, hello, snapshot, telemetry


class Counted(dict[str, Event]):
    """Counts what is looked up."""

    looked_at = 0

    def __getitem__(self, key: str) -> Event:
        Counted.looked_at += 1
        return super().__getitem__(key)


async def test_a_page_of_events_looks_at_what_is_on_it_however_many_there_are() -> None:
    for count in (100, 3000):
        events, xid = Events("1", most_resolved=count), xid_finding(48)
        made = [events.begin(HealthCheck.XID, "alpha", "GPU-1", xid, at, 48).id for at in range(count)]
        events._all, Counted.looked_at = Counted(events._all), 0
        watch: Any = SimpleNamespace(register=SimpleNamespace(events=events))
        page = monitor_api.ListHealthEventsRequest(
            page_size=10, page_token=to_token(json.dumps([[made[count // 2], True]]))
        )
        answer = await HealthServicer(watch, Mock(), ManualClock()).ListHealthEvents(page, Mock())
        shown = [one.name.removeprefix("healthEvents/") for one in answer.health_events]
        assert shown == made[count // 2 - 10 : count // 2][::-1]
        assert Counted.looked_at == 11


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
        self.connection = stack.enter_context(ExitStack())
        self.stream = self.connection.enter_context(self.nodes.connected(hello(), lambda: None))
        self.seq = 0

    def send(self, *gpus: types_api.Gpu) -> None:
        self.seq += 1
        self.clock.advance(1.0)
        assert self.nodes.take(self.stream, telemetry(snapshot(seq=self.seq, gpus=gpus)))

    def change(self, place: int, **readings: float) -> bool:
        """A change of one GPU, as a table of numbers."""
        self.seq += 1
        delta = monitor_internal.SnapshotDelta(seq=self.seq, base_seq=self.seq - 1)
        delta.numbers.places.append(place)
        delta.numbers.fields.extend(FIELDS[name].number for name in readings)
        delta.numbers.values.extend(readings.values())
        return self.nodes.take(self.stream, monitor_internal.StreamTelemetryRequest(delta=delta))

    def fault(self, uuid: str, seq: int) -> bool:
        fault = monitor_internal.ReportedFault(uuid=uuid, xid=48, seq=seq, age=to_duration(0))
        request = monitor_internal.StreamTelemetryRequest(
            faults=monitor_internal.ReportedFaults(faults=[fault])
        )
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


@pytest.mark.parametrize("action", [*range(2, len(types_api.RecoveryAction.keys())), 99])
def test_whatever_the_driver_asks_for_is_found_even_what_only_a_newer_agent_knows(action: int) -> None:
    one = gpu()
    one.reading.recovery_action = types_api.RecoveryAction.ValueType(action)
    assert results(facts_of(one))[HealthCheck.RECOVERY_ACTION] is not None
    assert not looks_well(one)


@pytest.mark.parametrize("state", types_api.GpuState.keys())
def test_a_state_that_a_check_knows_does_not_look_well(state: str) -> None:
    one = gpu()
    one.state = types_api.GpuState.Value(state)
    assert not (looks_well(one) and any(results(facts_of(one)).values()))


FIELDS = types_api.GpuReading.DESCRIPTOR.fields_by_name


@pytest.mark.parametrize("reading", READINGS)
def test_a_change_of_a_reading_that_matters_is_looked_at_at_once(
    site: Site, reading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most changes are of readings that no check needs; those are passed by, as are GPUs that did not change."""
    looked: list[str] = []

    def look(one: types_api.Gpu) -> bool:
        looked.append(one.uuid)
        return looks_well(one)

    monkeypatch.setattr("gpuscale.monitor.observing.health_servicer.looks_well", look)
    site.send(gpu("GPU-1"), gpu("GPU-2"))
    site.clock.advance(1.0)
    looked.clear()
    assert site.change(1, utilization_percent=50.0)
    assert looked == []
    assert site.change(1, **{reading: float(READINGS[reading])})
    assert looked == ["GPU-2"]
    assert site.change(1, utilization_percent=51.0)


def test_an_error_that_comes_as_a_change_quarantines_at_once(site: Site) -> None:
    site.send(gpu("GPU-1"), gpu("GPU-2"))
    assert site.change(1, ecc_volatile_uncorrected_count=1.0)
    assert [bool(one) for one in site.shown()] == [False, True]
    delta = monitor_internal.SnapshotDelta(seq=site.seq + 1, base_seq=site.seq)
    delta.gpus.add(place=0, state=types_api.GpuState.GPU_STATE_RESET_REQUIRED)
    assert site.nodes.take(site.stream, monitor_internal.StreamTelemetryRequest(delta=delta))
    assert [bool(one) for one in site.shown()] == [True, True]


def test_a_table_of_all_gpus_is_looked_at_at_once(site: Site) -> None:
    """A table without places is about every GPU."""
    site.send(gpu("GPU-1"), gpu("GPU-2"))
    delta = monitor_internal.SnapshotDelta(seq=site.seq + 1, base_seq=site.seq)
    delta.numbers.fields.append(FIELDS["ecc_volatile_uncorrected_count"].number)
    delta.numbers.values.extend([0.0, 1.0])
    assert site.nodes.take(site.stream, monitor_internal.StreamTelemetryRequest(delta=delta))
    assert [bool(one) for one in site.shown()] == [False, True]


def test_what_a_check_compares_with_before_is_looked_at_twice_a_minute(site: Site) -> None:
    """No change of links is looked at for itself. Packets sent again count from the last look, however long all was as before."""
    gpus = gpu("GPU-1"), gpu("GPU-2")
    for one in gpus:
        one.reading.nvlink_active_count, one.reading.pcie_replay_count = 4, 5
    site.send(*gpus)
    pass_quietly(site, 20 * EVERY_SECONDS)
    assert site.change(0, nvlink_active_count=2.0)
    assert site.change(1, pcie_replay_count=5.0 + 2 * MOST_REPLAYS_PER_MINUTE)
    pass_quietly(site, 2 * EVERY_SECONDS)
    assert checks_told(site) == {HealthCheck.NVLINK_DOWN, HealthCheck.PCIE_REPLAY}
    assert site.change(0, nvlink_active_count=4.0)  # of a GPU that something was found of it is
    pass_quietly(site, HOLDS[HealthCheck.NVLINK_DOWN].resolve_after)
    assert checks_told(site) == {HealthCheck.PCIE_REPLAY}


def test_a_gpu_that_something_is_found_of_is_looked_at_with_every_change(site: Site) -> None:
    """So that what lasts is told when its patience is over, and not at the next turn of all GPUs."""
    site.send(gpu("GPU-1"))
    assert site.change(0, throttle_reason_mask=float(0x40))
    pass_quietly(site, HOLDS[HealthCheck.THERMAL_SLOWDOWN].raise_after)
    assert checks_told(site) == {HealthCheck.THERMAL_SLOWDOWN}


def test_nodes_that_came_together_are_looked_at_closely_in_turn(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, counts = list[str](), list[int]()
    monkeypatch.setattr(
        "gpuscale.monitor.observing.health_servicer.facts_of",
        lambda one: (looked.append(one.uuid), facts_of(one))[1],
    )
    pictures = {f"n{number}": Picture(snapshot(f"n{number}")) for number in range(2 * int(EVERY_SECONDS))}
    for second in range(3 * int(EVERY_SECONDS)):
        change = Change.of(monitor_internal.SnapshotDelta()) if second else None
        for node, picture in pictures.items():
            site.health.observe(node, picture, float(second), change)
        counts.append(len(looked))
        looked.clear()
    assert counts == [len(pictures), *[2] * (len(counts) - 1)]


def pass_quietly(site: Site, seconds: float) -> None:
    """Let time pass with a change each second that no check needs."""
    for second in range(int(seconds)):
        site.clock.advance(1.0)
        assert site.change(0, utilization_percent=float(second % 100))


def checks_told(site: Site) -> set[HealthCheck]:
    return {event.check for event in site.health.register.events.lasting()}


def test_a_mig_instance_shares_the_quarantine_of_its_gpu(site: Site) -> None:
    part = gpu("MIG-1", total=1000, free=1000, used=0)
    part.parent_uuid = "GPU-1"
    site.send(gpu("GPU-1"), part, gpu("GPU-2"))
    site.fault("GPU-1", 0)
    whole, instance, other = site.shown()
    assert "XID 48" in whole
    assert instance == whole
    assert other == ""


async def test_a_quarantine_marks_the_node_for_watchers_and_is_on_later_snapshots(site: Site) -> None:
    site.send(gpu("GPU-1"))
    async with told_of(site.nodes) as told:
        site.fault("GPU-1", 0)
        assert await told() == ["alpha"]
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
    site.connection.close()
    site.nodes.forget("alpha")
    site.health.tick()
    [event] = site.health.register.events.newest_first()
    assert event.resolved_at is not None


def test_a_quarantine_of_a_run_before_is_on_the_first_snapshot_of_its_node_however_late() -> None:
    with ExitStack() as stack:
        before = Site(stack)
        before.send(gpu("GPU-1"), gpu("GPU-2"))
        before.fault("GPU-2", 0)
        saved = [event_to_text(one, 0.0) for one in before.health.register.events.newest_first()]
    nodes, clock = Nodes(before.clock, 10), before.clock
    health = HealthWatch(clock, nodes)
    health.register.events.restore([event_from_text(one, 0.0) for one in saved])
    health.resume()
    assert len(health.feed.names) == 1, "watchers are told of it too"
    nodes.observers = (health.observe,)
    for _ in range(100):
        clock.advance(3_600.0)
        health.tick()
    with nodes.connected(hello(), lambda: None) as stream:
        health.tick()
        assert nodes.take(stream, telemetry(snapshot(gpus=(gpu("GPU-1"), gpu("GPU-2")))))
        gpus = to_node(nodes.get("alpha"), clock.now()).snapshot.gpus
        assert [bool(one.quarantine) for one in gpus] == [False, True]
    assert not nodes.awaited
    nodes.forget("alpha")
    health.tick()
    assert not health.register.events.lasting()


def test_a_node_that_is_gone_for_good_since_a_run_before_can_be_forgotten() -> None:
    with ExitStack() as stack:
        before = Site(stack)
        before.send(gpu("GPU-1"))
        before.fault("GPU-1", 0)
    nodes = Nodes(before.clock, 10)
    health = HealthWatch(before.clock, nodes)
    health.register.events.restore(before.health.register.events.newest_first())
    health.resume()
    nodes.forget("alpha")
    health.tick()
    assert not health.register.events.lasting()
    with pytest.raises(NotFoundError):
        nodes.forget("alpha")


def test_a_node_that_is_forgotten_and_comes_back_at_once_shows_what_is_wrong_with_it(site: Site) -> None:
    """Before time passed for its health."""
    site.send(gpu("GPU-1"))
    site.fault("GPU-1", 0)
    site.connection.close()
    site.nodes.forget("alpha")
    with site.nodes.connected(hello(), lambda: None) as site.stream:
        site.send(gpu("GPU-1"))
        assert "XID 48" in site.shown()[0]
