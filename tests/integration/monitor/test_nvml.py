"""The NVML source through the real nvidia-ml-py, over a double of the driver's library: absences, errors, cost.

Each value in its unit is in test_every_reading.py.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from gpuscale.monitor.agent.nvml import NvmlSource
from gpuscale.monitor.agent.sources import GpuSourceError
from gpuscale.monitor.model.readings import GPU_FIELDS, Absent, GpuSample, GpuState, ReadingStatus
from tests.support.nvml_double import GIB, DoubleProcess, NvmlDouble, NvmlReturn, ProcessKind


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
        with patch.object(psutil, "PROCFS_PATH", str(foreign_proc(double.folder))):
            self.source = NvmlSource(lambda: self.now, sys=double.folder / "sys")

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


def test_free_memory_is_what_the_driver_says_and_no_difference(rig: Rig) -> None:
    """On some GPUs more is reserved than the record tells."""
    rig.double.gpus[0].memory_free_bytes = 11 * GIB
    rig.open()
    assert rig.read().reading.memory_free_bytes == 11 * GIB


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


def test_after_a_driver_reload_old_handles_fail_and_opening_again_helps(rig: Rig) -> None:
    rig.open()
    rig.read()
    rig.double.reload_driver()
    assert set(rig.absent()) == set(GPU_FIELDS)
    assert set(rig.absent(1)) == set(GPU_FIELDS)
    rig.source.close()
    rig.double.gpus[0].utilization_percent = 60
    rig.double.write()
    rig.open()
    assert rig.read().reading.utilization_percent == 60.0


def test_a_gpu_is_its_uuid_whatever_its_index_after_a_driver_reload(rig: Rig) -> None:
    first, second = rig.open()
    rig.double.gpus.reverse()
    for gpu, used in zip(rig.double.gpus, (7, 9), strict=True):
        gpu.memory_used_bytes = used * GIB
    rig.double.reload_driver()
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
