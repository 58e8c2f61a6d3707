"""MIG instances, wires, NUMA nodes and events of the NVML source, over the NVML double."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.topology import NOWHERE, PciPlace
from gpuscale.monitor.agent.device import ReadDeadlines
from gpuscale.monitor.agent.gpus import Gpus
from gpuscale.monitor.agent.nvml import NvmlSource
from gpuscale.monitor.agent.pci import find_adapters
from gpuscale.monitor.model.readings import (
    DriverEvent,
    GpuEvent,
    GpuEventKind,
    GpuState,
    MissingGpu,
    NetworkAdapter,
    ReadingStatus,
)
from tests.support.nvml_double import GIB, DoubleGpu, NvmlDouble, NvmlReturn

ECC_UNCORRECTED_EVENT = 0x2
PSTATE_EVENT = 0x4


class Rig:
    """A source, the double below it, and a clock that the test sets."""

    def __init__(self, double: NvmlDouble) -> None:
        self.double = double
        self.now = 0.0
        self.sys = double.folder / "sys"
        self.source = NvmlSource(lambda: self.now, sys=self.sys)


@pytest.fixture
def rig(nvml_double: NvmlDouble) -> Iterator[Rig]:
    one = Rig(nvml_double)
    yield one
    one.source.close()


def part(number: int) -> DoubleGpu:
    return DoubleGpu(
        uuid=f"MIG-{number}",
        name="NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        memory_total_bytes=10 * GIB,
        gpu_instance=number,
        compute_instance=0,
    )


def divide(double: NvmlDouble, *numbers: int) -> None:
    double.gpus[0].mig_mode = 1
    double.gpus[0].mig_devices = [part(number) for number in numbers]
    double.write()


def test_mig_instances_stand_behind_their_gpu_which_is_marked(rig: Rig) -> None:
    divide(rig.double, 3, 4)
    gpus = rig.source.open().gpus
    whole, first, second, other = gpus
    assert (whole.divided, other.divided) == (True, False)
    assert [one.parent_uuid for one in gpus] == ["", whole.uuid, whole.uuid, ""]
    assert (first.uuid, first.mig_profile, first.index) == ("MIG-3", "1g.10gb", 0)
    assert second.pci_bus_id == whole.pci_bus_id


def test_the_use_of_a_divided_gpu_and_of_its_parts_is_absent_and_never_zero(rig: Rig) -> None:
    divide(rig.double, 3)
    for gpu in rig.source.open().gpus[:2]:
        sample = rig.source.read(gpu.uuid)
        assert sample.reading.utilization_percent is None
        assert sample.reading.memory_free_bytes is not None
        assert sample.state is GpuState.OK


def test_mig_that_is_switched_on_and_off_under_a_running_agent_is_seen_within_30_s(rig: Rig) -> None:
    uuid = rig.source.open().gpus[0].uuid
    assert rig.source.read(uuid).reading.utilization_percent == 0
    for numbers in ((3, 4), ()):
        rig.double.gpus[0].mig_mode = int(bool(numbers))
        rig.double.gpus[0].utilization_percent = None if numbers else 7
        rig.double.gpus[0].mig_devices = [part(number) for number in numbers]
        rig.double.write()
        rig.source.read(uuid)
        rig.now += 31.0
        rig.source.read(uuid)
        assert rig.source.outdated
        rig.source.close()
        assert len(rig.source.open().gpus) == 2 + len(numbers)
    assert rig.source.read(uuid).reading.utilization_percent == 7


def test_mig_that_was_on_between_two_looks_leaves_no_reading_unsupported(rig: Rig) -> None:
    uuid = rig.source.open().gpus[0].uuid
    for mode in (1, 0):
        rig.double.gpus[0].mig_mode = mode
        rig.double.gpus[0].utilization_percent = None if mode else 7
        rig.double.write()
        absent = {one.field: one.status for one in rig.source.read(uuid).reading.absent}
    assert absent["utilization_percent"] is ReadingStatus.NOT_SUPPORTED
    rig.now += 31.0
    rig.source.read(uuid)
    assert not rig.source.outdated
    assert rig.source.read(uuid).reading.utilization_percent == 7


def test_a_gpu_says_where_its_links_lead(rig: Rig) -> None:
    first, second = rig.double.gpus
    first.nvlinks, second.nvlinks = [1, 1, -1], [0, 0]
    rig.double.write()
    rig.source.open()
    assert rig.source.read(first.uuid).link_ends == (second.uuid, second.uuid, None)
    assert rig.source.read(second.uuid).link_ends == (first.uuid, first.uuid)


def test_a_gpu_without_links_lacks_their_readings(rig: Rig) -> None:
    rig.source.open()
    sample = rig.source.read(rig.double.gpus[0].uuid)
    assert sample.link_ends == ()
    assert {one.field for one in sample.reading.absent} == {
        "nvlink_active_count",
        "nvlink_sent_bytes",
        "nvlink_received_bytes",
        "nvlink_crc_error_count",
        "nvlink_replay_error_count",
        "nvlink_recovery_error_count",
        "nvlink_bytes_per_second",
    }
    assert sample.state is GpuState.OK


def test_gpus_on_the_bus_that_do_not_answer_are_missing_with_their_address(rig: Rig) -> None:
    """The first gives no address, so it has the one on the bus that is left over; the third is not even listed."""
    for number in (0x1B, 0x1C, 0x1D):
        device = rig.sys / f"bus/pci/devices/0000:{number:02x}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
    rig.double.gpus[0].fail("*", NvmlReturn.GPU_IS_LOST)
    rig.double.write()
    found = rig.source.open()
    assert [one.index for one in found.gpus] == [1]
    assert found.missing == (
        MissingGpu(0, "0000:1b:00.0", "GPU is lost"),
        MissingGpu(2, "0000:1d:00.0", "the driver does not list it"),
    )


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("?\n", None)])
def test_the_numa_node_is_what_the_kernel_says(rig: Rig, text: str, node: int | None) -> None:
    device: Path = rig.sys / "bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(text)
    first, second = rig.source.open().gpus
    assert (first.place.numa_node, second.place.numa_node) == (node, None)


def test_a_gpu_and_a_network_card_say_where_they_hang_on_pcie(rig: Rig) -> None:
    """The kernel's folders are links to where a device hangs; a card of both kinds is there once."""
    bus = rig.sys / "devices/pci0000:16/0000:16:01.0"
    for device in ("0000:1b:00.0", "0000:17:00.0", "0000:18:00.0"):
        (bus / device).mkdir(parents=True)
    for link, device in {
        "bus/pci/devices/0000:1b:00.0": "0000:1b:00.0",
        "class/infiniband/mlx5_0/device": "0000:17:00.0",
        "class/net/ib0/device": "0000:17:00.0",
        "class/net/eth0/device": "0000:18:00.0",
    }.items():
        (rig.sys / link).parent.mkdir(parents=True, exist_ok=True)
        (rig.sys / link).symlink_to(bus / device)
    (rig.sys / "class/net/lo").mkdir()
    (bus / "0000:17:00.0/numa_node").write_text("1\n")
    first, second = rig.source.open().gpus
    assert (first.place.path, second.place) == ("pci0000:16/0000:16:01.0/0000:1b:00.0", NOWHERE)
    assert find_adapters(rig.sys) == (
        NetworkAdapter("eth0", PciPlace("pci0000:16/0000:16:01.0/0000:18:00.0")),
        NetworkAdapter("mlx5_0", PciPlace("pci0000:16/0000:16:01.0/0000:17:00.0", 1)),
    )


def test_events_are_told_with_their_gpu_and_kind(rig: Rig) -> None:
    assert rig.source.open().has_events
    uuids = [gpu.uuid for gpu in rig.double.gpus]
    rig.double.raise_event(gpu=1, data=79)
    rig.double.raise_event(gpu=0, data=0, event_type=ECC_UNCORRECTED_EVENT)
    assert rig.source.wait_event(5.0) == DriverEvent(uuids[1], GpuEventKind.XID, 79)
    assert rig.source.wait_event(5.0) == DriverEvent(uuids[0], GpuEventKind.ECC_UNCORRECTED)
    rig.double.raise_event(gpu=0, data=0, event_type=PSTATE_EVENT)
    assert rig.source.wait_event(0.05) is None


@pytest.mark.parametrize("call", ["nvmlEventSetCreate", "nvmlDeviceGetSupportedEventTypes"])
def test_a_driver_without_events_is_read_all_the_same(rig: Rig, call: str) -> None:
    rig.double.fail(call, NvmlReturn.NOT_SUPPORTED)
    for gpu in rig.double.gpus:
        gpu.fail(call, NvmlReturn.NOT_SUPPORTED)
    rig.double.write()
    assert not rig.source.open().has_events
    assert rig.source.read(rig.double.gpus[0].uuid).state is GpuState.OK


def test_a_driver_whose_wait_for_events_fails_is_not_asked_without_a_pause(rig: Rig) -> None:
    rig.double.fail("nvmlEventSetWait_v2", NvmlReturn.UNKNOWN)
    rig.double.write()
    rig.source.open()
    began = time.monotonic()
    assert rig.source.wait_event(0.2) is None
    assert time.monotonic() - began >= 0.19
    assert rig.double.calls("nvmlEventSetWait_v2") == 1


async def test_events_go_on_after_a_driver_reload(nvml_double: NvmlDouble) -> None:
    clock = SystemClock()
    gpus = Gpus(NvmlSource(clock.now), clock, ReadDeadlines())
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[GpuEvent] = asyncio.Queue()
    gpus.observers.append(events.put_nowait)
    try:
        await gpus.refresh(loop.time() + 5.0)
        nvml_double.reload_driver()
        async with asyncio.timeout(20.0):
            while gpus.collection().openings < 2 or gpus.problem():
                await gpus.refresh(loop.time() + 1.0)
                await asyncio.sleep(0.05)
            nvml_double.raise_event(gpu=0, data=63)
            assert (await events.get()).xid == 63
    finally:
        await gpus.close()
