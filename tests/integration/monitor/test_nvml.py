"""The NVML source through the real nvidia-ml-py, over a double of the driver's library: absences, errors, cost, parts, events."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.topology import NOWHERE, PciPlace
from gpuscale.monitor.agent.device import ReadDeadlines
from gpuscale.monitor.agent.gpus import Gpus
from gpuscale.monitor.agent.nvml import NvmlSource
from gpuscale.monitor.agent.pci import find_adapters
from gpuscale.monitor.agent.sources import GpuSourceError
from gpuscale.monitor.model.readings import (
    GPU_FIELDS,
    Absent,
    DriverEvent,
    GpuEvent,
    GpuSample,
    GpuState,
    MissingGpu,
    NetworkAdapter,
    ReadingStatus,
)
from tests.support.nvml_double import GIB, DoubleGpu, DoubleProcess, NvmlDouble, NvmlReturn, ProcessKind
from tests.support.waiting import eventually


def foreign_proc(folder: Path) -> Path:
    """A /proc as in a container: the driver's process ids cannot be looked up there."""
    proc = folder / "proc"
    (proc / "self/ns").mkdir(parents=True)
    (proc / "self/ns/pid").symlink_to("pid:[4026532999]")
    return proc


class Rig:
    """A source, the double below it, and a clock that the test sets."""

    def __init__(self, double: NvmlDouble) -> None:
        self.double = double
        self.now = 0.0
        self.sys = double.folder / "sys"
        with patch.object(psutil, "PROCFS_PATH", str(foreign_proc(double.folder))):
            self.source = NvmlSource(lambda: self.now, sys=self.sys)

    def open(self) -> list[str]:
        return [gpu.uuid for gpu in self.source.open().gpus]

    def read(self, index: int = 0) -> GpuSample:
        """Read a GPU after what the test changed is in force."""
        self.double.write()
        return self.source.read(self.double.gpus[index].uuid)

    def absent(self, index: int = 0) -> dict[str, ReadingStatus]:
        return {one.field: one.status for one in self.read(index).reading.absent}


@pytest.fixture
def rig(nvml_double: NvmlDouble) -> Iterator[Rig]:
    one = Rig(nvml_double)
    for gpu in nvml_double.gpus:
        gpu.nvlinks = [-1, -1]
    nvml_double.write()
    yield one
    one.source.close()


def test_gpus_are_known_by_uuid_with_model_and_address(rig: Rig) -> None:
    inventory = rig.source.open()
    assert inventory.driver_version == "550.54.15"
    assert inventory.problem == ""
    first, second = inventory.gpus
    assert (first.uuid, first.index, first.model) == (rig.double.gpus[0].uuid, 0, "NVIDIA H100 80GB HBM3")
    assert first.pci_bus_id == "00000000:1B:00.0"
    assert (first.serial, second.vbios_version) == ("1650000000000", "96.00.99.00.01")
    assert inventory.cuda_version == "12.4"
    assert (second.uuid, second.index) == (rig.double.gpus[1].uuid, 1)
    assert not rig.source.simulated
    assert not first.simulated


@pytest.mark.parametrize(
    ("code", "status", "state"),
    [
        (NvmlReturn.NOT_SUPPORTED, ReadingStatus.NOT_SUPPORTED, GpuState.OK),
        (NvmlReturn.FUNCTION_NOT_FOUND, ReadingStatus.NOT_SUPPORTED, GpuState.OK),
        (NvmlReturn.NO_PERMISSION, ReadingStatus.NO_PERMISSION, GpuState.OK),
        (NvmlReturn.TIMEOUT, ReadingStatus.TIMEOUT, GpuState.DEGRADED),
        (NvmlReturn.UNKNOWN, ReadingStatus.ERROR, GpuState.DEGRADED),
        (NvmlReturn.INVALID_ARGUMENT, ReadingStatus.ERROR, GpuState.DEGRADED),
        (77, ReadingStatus.ERROR, GpuState.DEGRADED),
    ],
)
def test_every_error_of_a_call_has_a_status(
    rig: Rig, code: int, status: ReadingStatus, state: GpuState
) -> None:
    rig.open()
    rig.double.gpus[0].fail("nvmlDeviceGetPowerUsage", code)
    sample = rig.read()
    assert sample.reading.power_watts is None
    assert [(one.field, one.status) for one in sample.reading.absent] == [("power_watts", status)]
    assert sample.reading.absent[0].detail
    assert sample.state is state
    assert sample.reading.temperature_celsius == 40.0
    assert rig.read(1).state is GpuState.OK


@pytest.mark.parametrize(
    ("code", "state"),
    [(NvmlReturn.GPU_IS_LOST, GpuState.LOST), (NvmlReturn.RESET_REQUIRED, GpuState.RESET_REQUIRED)],
)
def test_a_gpu_that_is_gone_is_asked_one_question_per_tick(rig: Rig, code: int, state: GpuState) -> None:
    rig.open()
    rig.read()
    rig.double.gpus[0].fail("*", code)
    rig.double.write()
    before = rig.double.calls(gpu=0)
    sample = rig.source.read(rig.double.gpus[0].uuid)
    assert rig.double.calls(gpu=0) - before == 1
    assert sample.state is state
    assert {one.field for one in sample.reading.absent} == set(GPU_FIELDS)
    assert rig.read(1).state is GpuState.OK


@pytest.mark.parametrize(
    "code", [NvmlReturn.UNINITIALIZED, NvmlReturn.DRIVER_NOT_LOADED, NvmlReturn.LIB_RM_VERSION_MISMATCH]
)
def test_errors_of_the_driver_itself_are_not_blamed_on_the_gpu(rig: Rig, code: NvmlReturn) -> None:
    rig.open()
    rig.double.gpus[0].fail("*", code)
    with pytest.raises(GpuSourceError):
        rig.read()


@pytest.mark.parametrize(
    ("code", "problem", "no_driver"),
    [
        (NvmlReturn.DRIVER_NOT_LOADED, "NVML: Driver Not Loaded", True),
        (NvmlReturn.LIBRARY_NOT_FOUND, "NVML: NVML Shared Library Not Found", True),
        (NvmlReturn.LIB_RM_VERSION_MISMATCH, "NVML: RM has detected an NVML/RM version mismatch.", False),
        (NvmlReturn.UNKNOWN, "NVML: Unknown Error", False),
    ],
)
def test_a_driver_that_does_not_start_is_said_with_its_reason(
    rig: Rig, code: NvmlReturn, problem: str, no_driver: bool
) -> None:
    rig.double.fail_start(code)
    rig.double.write()
    with pytest.raises(GpuSourceError) as failed:
        rig.source.open()
    assert (failed.value.problem, failed.value.no_driver) == (problem, no_driver)
    rig.source.close()
    rig.double.fail_start(NvmlReturn.SUCCESS)
    rig.double.write()
    assert len(rig.open()) == 2


def test_a_gpu_that_cannot_be_identified_is_named_and_the_others_are_read(rig: Rig) -> None:
    rig.double.gpus[0].fail("*", NvmlReturn.GPU_IS_LOST)
    rig.double.write()
    inventory = rig.source.open()
    assert [gpu.index for gpu in inventory.gpus] == [1]
    assert inventory.problem == "NVML: GPU 0: GPU is lost"
    assert rig.read(1).state is GpuState.OK


def test_a_driver_without_gpus_is_a_problem(rig: Rig) -> None:
    rig.double.gpus.clear()
    rig.double.write()
    assert rig.source.open().problem == "NVML: no GPU found"


def test_a_gpu_is_its_uuid_whatever_its_index_after_a_driver_reload(rig: Rig) -> None:
    first, second = rig.open()
    rig.double.gpus.reverse()
    for gpu, used in zip(rig.double.gpus, (7, 9), strict=True):
        gpu.memory_used_bytes = used * GIB
    rig.double.reload_driver()
    assert set(rig.absent()) == set(rig.absent(1)) == set(GPU_FIELDS), "old handles fail"
    rig.source.close()
    assert rig.open() == [second, first]
    for uuid, used in ((second, 7), (first, 9)):
        assert rig.source.read(uuid).reading.memory_used_bytes == used * GIB


def test_an_older_driver_gives_memory_by_the_old_record(rig: Rig) -> None:
    """There, what the driver keeps for itself counts as used and cannot be told apart."""
    rig.open()
    rig.double.gpus[0].fail("nvmlDeviceGetMemoryInfo_v2", NvmlReturn.FUNCTION_NOT_FOUND)
    for _ in range(3):
        sample = rig.read()
    assert sample.reading.memory_total_bytes == 80 * GIB
    assert sample.reading.memory_free_bytes == 80 * GIB - GIB // 2
    assert sample.reading.memory_reserved_bytes is None
    assert [(one.field, one.status) for one in sample.reading.absent] == [
        ("memory_reserved_bytes", ReadingStatus.NOT_SUPPORTED)
    ]
    assert rig.double.calls("nvmlDeviceGetMemoryInfo_v2", gpu=0) == 1


@pytest.mark.parametrize("free", [81 * GIB, 2**63])
def test_memory_figures_that_cannot_be_are_absent(rig: Rig, free: int) -> None:
    rig.open()
    rig.double.gpus[0].memory_free_bytes = free
    sample = rig.read()
    assert sample.reading.memory_free_bytes is None
    assert sample.reading.memory_total_bytes is None
    assert sample.state is GpuState.DEGRADED


def test_a_performance_state_that_the_driver_does_not_know_says_nothing_against_the_gpu(rig: Rig) -> None:
    rig.open()
    rig.double.gpus[0].performance_state = 32
    sample = rig.read()
    assert sample.reading.performance_state is None
    assert sample.state is GpuState.OK


def test_processes_of_both_kinds_are_listed_with_their_memory(rig: Rig) -> None:
    own = os.getpid()
    rig.double.gpus[0].processes = [
        DoubleProcess(own, 3 * GIB),
        DoubleProcess(own, 3 * GIB, ProcessKind.GRAPHICS),
        DoubleProcess(2, None),
    ]
    rig.double.write()
    rig.open()
    processes = rig.read().reading.processes
    assert processes is not None
    assert [(one.pid, one.memory_used_bytes) for one in processes] == [(2, None), (own, 3 * GIB)]


def test_process_lists_are_read_every_five_seconds_only(rig: Rig) -> None:
    rig.open()
    name = "nvmlDeviceGetComputeRunningProcesses_v3"
    for second in range(10):
        rig.now = float(second)
        rig.read()
    assert rig.double.calls(name, gpu=0) == 3, "at the start, 2 s later, and then every 5 s"
    assert rig.double.calls("nvmlDeviceGetEnforcedPowerLimit", gpu=0) == 1
    rig.double.gpus[0].processes = [DoubleProcess(2, GIB)]
    rig.now = 12.0
    processes = rig.read().reading.processes
    assert processes is not None
    assert [(one.pid, one.memory_used_bytes) for one in processes] == [(2, GIB)]


def test_records_of_another_drivers_layout_are_not_believed(rig: Rig) -> None:
    """Early 535 drivers: the v3 call gave pids 101, 0 and 4294967295 for 101, 102 and 103; the v2 call is right."""
    rig.double.process_record_bytes = 32
    rig.double.gpus[0].processes = [DoubleProcess(pid, GIB) for pid in (101, 102, 103)]
    rig.double.write()
    rig.open()
    for _ in range(2):
        sample = rig.read()
        rig.now += 10.0
    assert sample.reading.processes is not None
    assert [one.pid for one in sample.reading.processes] == [101, 102, 103]
    assert sample.state is GpuState.OK
    assert rig.double.calls("nvmlDeviceGetComputeRunningProcesses_v3", gpu=0) == 2, (
        "two calls of one question"
    )


def test_process_lists_that_are_not_to_be_had_are_absent_and_not_empty(rig: Rig) -> None:
    for kind in ("Compute", "Graphics"):
        for version in ("", "_v2", "_v3"):
            rig.double.gpus[0].fail(f"nvmlDeviceGet{kind}RunningProcesses{version}", NvmlReturn.NO_PERMISSION)
    rig.double.write()
    rig.open()
    reading = rig.read().reading
    assert reading.processes is None
    assert reading.absent == (Absent("processes", ReadingStatus.NO_PERMISSION, "Insufficient Permissions"),)


PSTATE_EVENT = 0x4


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
    assert (first.uuid, first.mig_profile, first.index, first.gpu_instance_id) == ("MIG-3", "1g.10gb", 0, 3)
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


def test_xid_errors_are_told_with_their_gpu_and_no_other_events(rig: Rig) -> None:
    assert rig.source.open().has_events
    uuids = [gpu.uuid for gpu in rig.double.gpus]
    rig.double.raise_event(gpu=1, data=79)
    assert rig.source.wait_event(5.0) == DriverEvent(uuids[1], 79)
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
            while gpus.collection.openings < 2 or gpus.problem():
                await gpus.refresh(loop.time() + 1.0)
                await asyncio.sleep(0.05)

            def heard() -> bool:  # nobody listens before the driver is open again
                nvml_double.raise_event(gpu=0, data=63)
                return not events.empty()

            await eventually(heard)
            assert events.get_nowait().xid == 63
    finally:
        await gpus.close()
