"""The pages of the agent and the fleet: how collecting goes, and every node, as they truly are."""

from dataclasses import replace
from pathlib import Path

import pytest

from gpuscale.common.rpc.meter import ProgramMeter
from gpuscale.common.wire import to_duration
from gpuscale.monitor.agent.collector import Broadcast
from gpuscale.monitor.agent.device import Collection
from gpuscale.monitor.agent.pci import Bus, find_gpus
from gpuscale.monitor.exposition.agent import AgentPage, CollectionMeter, Xids
from gpuscale.monitor.exposition.fleet import FleetPage
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.health.checks import Event, Finding, HealthAction, HealthCheck, HealthSeverity
from gpuscale.monitor.model.prometheus import Style
from gpuscale.monitor.model.readings import (
    Absent,
    GpuEvent,
    GpuReading,
    GpuState,
    GpuView,
    HostReading,
    ReadingStatus,
    Snapshot,
)
from tests.support.clock import ManualClock
from tests.support.monitor import told_of
from tests.support.monitor_values import gpu, hello, identity, snapshot, snapshot_read, telemetry
from tests.support.promtool import named, samples, value


def view(index: int, state: GpuState = GpuState.OK) -> GpuView:
    return GpuView(identity(index), state, GpuReading(utilization_percent=50.0), read_at=1000.0)


class Agent:
    """A meter whose collector gives what the test says, and the page around it."""

    def __init__(self, on_bus: int = 0, sys: Path = Path("absent")) -> None:
        self.clock = ManualClock()
        self.gpus: tuple[GpuView, ...] = (view(0), view(1))
        self.problem = ""
        self.seconds = 0.25
        self.xids = Xids()
        self.snapshots: Broadcast[Snapshot] = Broadcast()
        bus = Bus([sys / f"0000:{index:02x}:00.0" for index in range(on_bus)])
        self.meter = CollectionMeter(self._collect, self.clock, bus)
        self.collection = Collection(openings=3, interruptions=2, calls=80, refusals=4)
        self.page = AgentPage(
            self.meter, self.snapshots, self.xids, self.collection, lambda: None, self.clock, Style()
        )
        self._seq = 0

    async def text(self) -> str:
        meter = ProgramMeter("agent")
        with meter.showing(self.page.add):
            return b"".join([chunk async for chunk in meter.render()]).decode()

    async def _collect(self) -> Snapshot:
        self._seq += 1
        self.clock.advance(self.seconds)
        return snapshot_read(
            self.clock.now(),
            seq=self._seq,
            host_reading=HostReading(cpu_percent=12.5),
            driver_version="550.54.15",
            gpus=self.gpus,
            gpu_problem=self.problem,
        )


async def test_before_the_first_snapshot_nothing_is_claimed() -> None:
    text = await Agent(on_bus=8).text()
    assert value(text, "gpuscale_collection_success") == 0
    assert value(text, "gpuscale_collection_gpus_expected") == 8
    assert not named(text, "gpuscale_collection_last_success_timestamp_seconds")
    assert not named(text, "gpuscale_collection_duration_seconds")


async def test_a_good_snapshot_is_a_success_at_its_time() -> None:
    agent = Agent(on_bus=2)
    taken = await agent.meter.collect()
    agent.clock.advance(0.5)
    text = await agent.text()
    assert value(text, "gpuscale_collection_success") == 1
    stamp = value(text, "gpuscale_collection_last_success_timestamp_seconds")
    assert stamp == taken.sample_time.timestamp()
    assert value(text, "gpuscale_collection_duration_seconds") == 0.25
    assert value(text, "gpuscale_collection_snapshots_total") == 1
    assert value(text, "gpuscale_collection_age_seconds") == 0.5
    assert value(text, "gpuscale_agent_info", node="alpha") == 1
    assert value(text, "DCGM_FI_DEV_GPU_UTIL", gpu="1") == 50


@pytest.mark.parametrize("fault", ["hung", "lost", "problem", "missing", "none at all"])
async def test_a_fault_ends_the_success_and_its_last_time_stays(fault: str) -> None:
    agent = Agent(on_bus=2)
    good = await agent.meter.collect()
    match fault:
        case "hung":
            agent.gpus = (view(0), view(1, GpuState.HUNG))
        case "lost":
            agent.gpus = (view(0), view(1, GpuState.LOST))
        case "problem":
            agent.problem = "NVML: driver not loaded"
        case "missing":
            agent.gpus = (view(0),)
        case _:
            agent.gpus = ()
    await agent.meter.collect()
    text = await agent.text()
    assert value(text, "gpuscale_collection_success") == 0
    stamp = value(text, "gpuscale_collection_last_success_timestamp_seconds")
    assert stamp == good.sample_time.timestamp()
    assert value(text, "gpuscale_collection_gpus_expected") == 2
    assert value(text, "gpuscale_collection_hung_threads") == (fault == "hung")
    assert value(text, "gpuscale_node_gpus_working") == {"problem": 2, "none at all": 0}.get(fault, 1)


async def test_calls_of_the_driver_are_counted_and_those_that_failed() -> None:
    text = await Agent(on_bus=2).text()
    assert value(text, "gpuscale_collection_driver_calls_total") == 80
    assert value(text, "gpuscale_collection_driver_call_errors_total") == 4
    assert value(text, "gpuscale_collection_driver_openings_total") == 3
    assert value(text, "gpuscale_collection_driver_interruptions_total") == 2


async def test_mig_instances_are_one_gpu_of_the_bus() -> None:
    agent = Agent(on_bus=2)
    parts = [GpuView(replace(identity(0), uuid=f"MIG-{n}"), GpuState.OK, GpuReading(), 1.0) for n in range(7)]
    agent.gpus = (view(0, GpuState.DIVIDED), *parts)
    await agent.meter.collect()
    assert value(await agent.text(), "gpuscale_collection_success") == 0


async def test_a_snapshot_that_grew_old_shows_no_readings() -> None:
    agent = Agent()
    await agent.meter.collect()
    agent.clock.advance(3.5)
    text = await agent.text()
    assert value(text, "gpuscale_collection_age_seconds") == 3.5
    assert not any(one.name.startswith(("DCGM_", "gpuscale_host_")) for one in samples(text))
    assert {one.labels["state"] for one in named(text, "gpuscale_gpu_state")} == {"STALE"}


async def test_failed_readings_are_counted_by_reason_and_unsupported_ones_are_no_failure() -> None:
    agent = Agent()
    absent = (
        Absent("power_watts", ReadingStatus.TIMEOUT),
        Absent("energy_joules", ReadingStatus.NOT_SUPPORTED),
        Absent("processes", ReadingStatus.NO_PERMISSION),
    )
    agent.gpus = (view(0)._replace(reading=GpuReading(absent=absent)), view(1))
    await agent.meter.collect()
    await agent.meter.collect()
    found = named(await agent.text(), "gpuscale_collection_reading_errors_total")
    assert {one.labels["reason"]: one.value for one in found} == {"TIMEOUT": 2}


async def test_subscribers_are_counted_and_what_they_missed() -> None:
    agent = Agent()
    slow, quick = agent.snapshots.follow(), agent.snapshots.follow()
    for number in range(4):
        agent.snapshots.publish(await agent.meter.collect())
        await anext(quick)
        if number in {0, 3}:
            await anext(slow)
    text = await agent.text()
    assert value(text, "gpuscale_watch_subscribers") == 2
    assert value(text, "gpuscale_watch_dropped_total") == 2


async def test_xids_are_counted_by_code_and_the_last_is_dcgms() -> None:
    agent = Agent()
    await agent.meter.collect()
    uuid = agent.gpus[0].identity.uuid
    for xid in (79, 31, 79):
        agent.clock.advance(1.0)
        now, wall = agent.clock.now(), agent.clock.wall()
        agent.xids.note(GpuEvent(uuid, xid, now, wall))
    text = await agent.text()
    assert value(text, "gpuscale_gpu_xid_errors_total", uuid=uuid, xid="79") == 2
    assert value(text, "gpuscale_gpu_xid_errors_total", uuid=uuid, xid="31") == 1
    assert value(text, "gpuscale_gpu_xid_last_timestamp_seconds", xid="79") == agent.clock.wall().timestamp()
    assert value(text, "DCGM_FI_DEV_XID_ERRORS", UUID=uuid) == 79
    assert {one.labels["uuid"] for one in named(text, "gpuscale_gpu_xid_errors_total")} == {uuid}


async def test_what_the_process_costs_is_shown() -> None:
    text = await Agent().text()
    assert value(text, "process_cpu_seconds_total") > 0
    assert 1e6 < value(text, "process_resident_memory_bytes") < 1e10
    assert value(text, "process_open_fds") > 2
    assert value(text, "process_start_time_seconds") > 1.6e9


def test_gpus_on_the_bus_are_counted_by_vendor_and_class(tmp_path: Path) -> None:
    devices = {
        "gpu": ("0x10de", "0x030200"),
        "vga": ("0x10de", "0x030000"),
        "switch": ("0x10de", "0x068000"),
        "other": ("0x1002", "0x030000"),
    }
    for name, (vendor, kind) in devices.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    (tmp_path / "odd").mkdir()
    assert {device.name for device in find_gpus(tmp_path)} == {"gpu", "vga"}
    assert find_gpus(tmp_path / "absent") == []


def bind(sys: Path, index: int, driver: str) -> None:
    """Give a GPU of the bus to a driver, as sysfs shows it."""
    link = sys / f"0000:{index:02x}:00.0" / "driver"
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(f"../../../bus/pci/drivers/{driver}")


@pytest.mark.parametrize("driver", ["vfio-pci", "nvgrace_gpu_vfio_pci"])
async def test_a_gpu_that_the_host_has_given_away_is_not_missing_until_it_is_back(
    tmp_path: Path, driver: str
) -> None:
    agent = Agent(on_bus=3, sys=tmp_path)
    for index in range(2):
        bind(tmp_path, index, "nvidia")
    bind(tmp_path, 2, driver)
    await agent.meter.collect()
    text = await agent.text()
    assert value(text, "gpuscale_collection_success") == 1
    assert value(text, "gpuscale_collection_gpus_expected") == 2
    agent.gpus = (view(0), view(1, GpuState.LOST))
    await agent.meter.collect()
    assert value(await agent.text(), "gpuscale_collection_success") == 0
    bind(tmp_path, 1, driver)  # that is why it is lost
    await agent.meter.collect()
    text = await agent.text()
    assert value(text, "gpuscale_collection_success") == 1
    assert value(text, "gpuscale_collection_gpus_expected") == 1
    bind(tmp_path, 1, "nvidia")
    bind(tmp_path, 2, "nvidia")
    agent.gpus = (view(0), view(1))
    await agent.meter.collect()
    text = await agent.text()
    assert value(text, "gpuscale_collection_success") == 0
    assert value(text, "gpuscale_collection_gpus_expected") == 3


@pytest.mark.parametrize("driver", ["nouveau", ""])
async def test_a_gpu_with_another_driver_or_none_is_missing(tmp_path: Path, driver: str) -> None:
    agent = Agent(on_bus=3, sys=tmp_path)
    if driver:
        bind(tmp_path, 2, driver)
    await agent.meter.collect()
    assert value(await agent.text(), "gpuscale_collection_success") == 0


async def test_a_driver_that_fails_is_a_failure_where_the_kernel_does_not_tell_of_a_bus() -> None:
    agent = Agent(on_bus=0)
    agent.gpus, agent.problem = (), "NVML: driver not loaded"
    await agent.meter.collect()
    assert value(await agent.text(), "gpuscale_collection_success") == 0


async def test_where_all_gpus_are_given_away_nobody_needs_nvidias_driver(tmp_path: Path) -> None:
    agent = Agent(on_bus=2, sys=tmp_path)
    agent.gpus, agent.problem = (), "NVML: driver not loaded"
    bind(tmp_path, 0, "vfio-pci")
    await agent.meter.collect()
    assert value(await agent.text(), "gpuscale_collection_success") == 0
    bind(tmp_path, 1, "vfio-pci")
    await agent.meter.collect()
    assert value(await agent.text(), "gpuscale_collection_success") == 1


class Fleet:
    def __init__(self, most_gpus: int = 100) -> None:
        self.clock = ManualClock()
        self.nodes = Nodes(self.clock, 10)
        self.events: list[Event] = []
        style = Style(many_nodes=True)
        self.page = FleetPage(self.nodes, lambda: self.events, self.clock, style, most_gpus)

    async def text(self) -> str:
        meter = ProgramMeter("fleet")
        with meter.showing(self.page.add):
            return b"".join([chunk async for chunk in meter.render()]).decode()


async def test_the_fleet_shows_every_node_in_its_state() -> None:
    fleet = Fleet()
    with fleet.nodes.connected(hello("alpha"), lambda: None) as alpha:
        with fleet.nodes.connected(hello("beta"), lambda: None) as beta:
            fleet.nodes.take(alpha, telemetry(snapshot("alpha", seq=1)))
            fleet.nodes.take(beta, telemetry(snapshot("beta", seq=1, period=1.0)))
            fleet.nodes.take(beta, telemetry(snapshot("beta", seq=1)))
        fleet.clock.advance(2.0)
        fleet.nodes.take(alpha, telemetry(snapshot("alpha", seq=2, age=0.5)))
        fleet.clock.advance(1.0)
        async with told_of(fleet.nodes):
            text = await fleet.text()
    states = {one.labels["node"]: one.labels["state"] for one in named(text, "gpuscale_node_state")}
    assert states == {"alpha": "ONLINE", "beta": "OFFLINE"}
    counted = {one.labels["state"]: one.value for one in named(text, "gpuscale_fleet_nodes")}
    assert counted == {"ONLINE": 1, "STALE": 0, "OFFLINE": 1}
    assert value(text, "gpuscale_node_snapshot_age_seconds", node="alpha") == 1.5
    assert value(text, "gpuscale_node_snapshots_rejected_total", node="beta") == 1
    assert value(text, "gpuscale_fleet_snapshots_total") == 3
    assert value(text, "gpuscale_fleet_streams") == 1
    assert value(text, "gpuscale_fleet_watchers") == 1
    assert {one.labels["node"] for one in named(text, "DCGM_FI_DEV_GPU_UTIL")} == {"alpha"}
    assert value(text, "gpuscale_node_gpus_working", node="beta") == 0
    assert value(text, "gpuscale_gpu_reading_age_seconds", node="alpha") == 1.25


async def test_a_quarantine_that_health_found_is_shown() -> None:
    fleet = Fleet()
    with fleet.nodes.connected(hello("alpha"), lambda: None) as stream:
        fleet.nodes.take(stream, telemetry(snapshot("alpha", gpus=(gpu("GPU-A"), gpu("GPU-B")))))
        fleet.nodes.quarantine("alpha", {"gpu-b": "XID 79"})
        shown = named(await fleet.text(), "gpuscale_gpu_quarantined")
    assert {one.labels["uuid"]: one.value for one in shown} == {"GPU-A": 0, "GPU-B": 1}


async def test_a_health_event_that_lasts_is_one_series_however_often_it_is_there() -> None:
    fleet = Fleet()
    finding = Finding(HealthSeverity.CRITICAL, HealthAction.RESET_GPU, "fallen off the bus", fatal=True)
    fleet.events = [Event(f"{n}", HealthCheck.XID, "alpha", "GPU-A", finding, 1.0, 1.0, 79) for n in "ab"]
    [shown] = named(await fleet.text(), "gpuscale_health_event")
    assert shown.labels == {
        "node": "alpha", "uuid": "GPU-A", "check": "XID", "severity": "CRITICAL", "action": "RESET_GPU",
        "fatal": "true", "xid": "79",
    }  # fmt: skip


async def test_more_gpus_than_the_limit_are_counted_and_not_shown() -> None:
    fleet = Fleet(most_gpus=2)
    with fleet.nodes.connected(hello("alpha"), lambda: None) as stream:
        many = tuple(gpu(f"GPU-{number}") for number in range(3))
        message = snapshot("alpha", gpus=many)
        message.age.CopyFrom(to_duration(0.0))
        fleet.nodes.take(stream, telemetry(message))
        text = await fleet.text()
    assert value(text, "gpuscale_fleet_gpus_left_out") == 3
    assert value(text, "gpuscale_node_gpus", node="alpha") == 3
    assert not named(text, "gpuscale_gpu_state")
