"""The NVML double, driven through the real `pynvml`: what it answers, how it misbehaves, and that it counts."""

import importlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.nvml_double import (
    GIB,
    DoubleGpu,
    DoubleProcess,
    NvmlDouble,
    NvmlReturn,
    ProcessKind,
    env_with_double,
)
from tests.support.waiting import eventually_sync

# The package has no type information; a module loaded this way is plainly dynamic.
pynvml = importlib.import_module("pynvml")

pytest_plugins = ["tests.support.nvml_fixture"]

SCRIPT = """
import json, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(1)
memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
print(json.dumps([pynvml.nvmlDeviceGetUUID(handle), memory.used, pynvml.nvmlDeviceGetCount()]))
"""


@pytest.fixture
def nvml(nvml_double: NvmlDouble) -> Iterator[NvmlDouble]:
    """The double with the library started."""
    pynvml.nvmlInit()
    yield nvml_double
    nvml_double.release_all()
    pynvml.nvmlShutdown()


def handle(index: int = 0) -> object:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def code_of(call: object, *arguments: object) -> int:
    """The result code of a call that must fail."""
    assert callable(call)
    with pytest.raises(pynvml.NVMLError) as failure:
        call(*arguments)
    value = failure.value.value
    assert isinstance(value, int)
    return value


def test_another_process_finds_the_double_by_the_library_path(nvml_double: NvmlDouble) -> None:
    nvml_double.gpus[1].memory_used_bytes = 7 * GIB
    nvml_double.write()
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=env_with_double(nvml_double),
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(answer.stdout) == [nvml_double.gpus[1].uuid, 7 * GIB, 2]
    assert nvml_double.calls("nvmlDeviceGetMemoryInfo_v2", gpu=1) == 1


def test_says_who_the_gpus_are(nvml: NvmlDouble) -> None:
    assert pynvml.nvmlDeviceGetCount() == 2
    assert pynvml.nvmlSystemGetDriverVersion() == nvml.driver_version
    assert pynvml.nvmlSystemGetNVMLVersion() == nvml.nvml_version
    assert pynvml.nvmlSystemGetCudaDriverVersion_v2() == 12040
    by_uuid = pynvml.nvmlDeviceGetHandleByUUID(nvml.gpus[1].uuid)
    assert pynvml.nvmlDeviceGetIndex(by_uuid) == 1
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByPciBusId("00000000:1C:00.0")) == 1
    assert pynvml.nvmlDeviceGetName(by_uuid) == "NVIDIA H100 80GB HBM3"
    assert pynvml.nvmlDeviceGetSerial(by_uuid) == nvml.gpus[1].serial
    assert pynvml.nvmlDeviceGetMinorNumber(by_uuid) == 1
    assert pynvml.nvmlDeviceGetCudaComputeCapability(by_uuid) == (9, 0)
    info = pynvml.nvmlDeviceGetPciInfo(by_uuid)
    assert (info.busId, info.busIdLegacy, info.domain, info.bus) == (
        "00000000:1C:00.0",
        "0000:1c:00.0",
        0,
        0x1C,
    )
    assert code_of(pynvml.nvmlDeviceGetHandleByIndex, 2) == NvmlReturn.INVALID_ARGUMENT
    assert code_of(pynvml.nvmlDeviceGetHandleByUUID, "GPU-unknown") == NvmlReturn.NOT_FOUND


def test_reports_memory_in_both_forms(nvml: NvmlDouble) -> None:
    gpu = nvml.gpus[0]
    gpu.memory_used_bytes = 10 * GIB
    nvml.write()
    old = pynvml.nvmlDeviceGetMemoryInfo(handle())
    new = pynvml.nvmlDeviceGetMemoryInfo(handle(), version=pynvml.nvmlMemory_v2)
    assert (new.total, new.used, new.reserved) == (80 * GIB, 10 * GIB, GIB // 2)
    assert new.free == old.free == 80 * GIB - 10 * GIB - GIB // 2
    assert old.used == old.total - old.free, "the first form counts the reserved memory as used"


def test_reports_what_a_gpu_does(nvml: NvmlDouble) -> None:
    gpu = nvml.gpus[0]
    gpu.utilization_percent, gpu.memory_utilization_percent = 95, 40
    gpu.encoder_percent, gpu.decoder_percent, gpu.temperature_celsius = 3, 4, 71
    gpu.power_watts, gpu.power_limit_watts, gpu.energy_joules = 512.5, 650.0, 12.25
    gpu.sm_clock_mhz, gpu.memory_clock_mhz, gpu.performance_state, gpu.event_reasons = 1700, 2000, 2, 0x40
    nvml.write()
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle())
    assert (rates.gpu, rates.memory) == (95, 40)
    assert pynvml.nvmlDeviceGetEncoderUtilization(handle())[0] == 3
    assert pynvml.nvmlDeviceGetDecoderUtilization(handle())[0] == 4
    assert pynvml.nvmlDeviceGetTemperature(handle(), 0) == pynvml.nvmlDeviceGetTemperatureV(handle(), 0) == 71
    assert pynvml.nvmlDeviceGetPowerUsage(handle()) == 512_500
    assert pynvml.nvmlDeviceGetPowerManagementLimit(handle()) == 650_000
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(handle()) == 700_000
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()) == 12_250
    assert pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_SM) == 1700
    assert pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_MEM) == 2000
    assert pynvml.nvmlDeviceGetMaxClockInfo(handle(), pynvml.NVML_CLOCK_SM) == 1980
    assert pynvml.nvmlDeviceGetPerformanceState(handle()) == 2
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle()) == 0x40
    assert pynvml.nvmlDeviceGetUtilizationRates(handle(1)).gpu == 0, "the other GPU is untouched"


def test_reports_links_errors_and_field_values(nvml: NvmlDouble) -> None:
    gpu = nvml.gpus[0]
    gpu.ecc_corrected, gpu.ecc_uncorrected, gpu.remapped_rows = 5, 6, (1, 2, 1, 0)
    gpu.fields = {186: 812.5, 83: 2**40}
    nvml.write()
    assert pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle()) == 5
    assert pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle()) == 16
    assert [pynvml.nvmlDeviceGetTotalEccErrors(handle(), kind, 0) for kind in (0, 1)] == [5, 6]
    assert pynvml.nvmlDeviceGetRemappedRows(handle()) == (1, 2, 1, 0)
    real, whole, other = pynvml.nvmlDeviceGetFieldValues(handle(), [186, 83, 7])
    assert (real.nvmlReturn, real.valueType, real.value.dVal) == (0, pynvml.NVML_VALUE_TYPE_DOUBLE, 812.5)
    assert (whole.nvmlReturn, whole.value.ullVal) == (0, 2**40)
    assert other.nvmlReturn == NvmlReturn.NOT_SUPPORTED


def test_lists_processes_by_kind(nvml: NvmlDouble) -> None:
    nvml.gpus[0].processes = [
        DoubleProcess(101, 5 * GIB),
        DoubleProcess(102, None),
        DoubleProcess(103, kind=ProcessKind.GRAPHICS),
    ]
    nvml.write()
    for listed in (
        pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle()),
        pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle()),
    ):
        assert [(process.pid, process.usedGpuMemory) for process in listed] == [(101, 5 * GIB), (102, None)]
    assert [process.pid for process in pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle())] == [103]
    assert pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle()) == []


def test_can_space_process_records_as_early_535_drivers_did(nvml: NvmlDouble) -> None:
    nvml.gpus[0].processes = [DoubleProcess(pid) for pid in (101, 102, 103)]
    nvml.process_record_bytes = 32
    nvml.write()
    wrong = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle())]
    right = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle())]
    assert wrong[0] == 101
    assert wrong != right == [101, 102, 103]


def test_a_divided_gpu_has_parts_and_no_utilization(nvml: NvmlDouble) -> None:
    part = DoubleGpu(
        uuid="MIG-0", name="MIG 1g.10gb", memory_total_bytes=10 * GIB, gpu_instance=7, compute_instance=0
    )
    nvml.gpus[0].mig_mode = 1
    nvml.gpus[0].mig_devices = [part]
    nvml.write()
    assert pynvml.nvmlDeviceGetCount() == 2, "parts are not counted"
    assert pynvml.nvmlDeviceGetMigMode(handle()) == [1, 1]
    mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle(), 0)
    assert pynvml.nvmlDeviceGetUUID(mig) == "MIG-0"
    assert pynvml.nvmlDeviceGetMemoryInfo(mig).total == 10 * GIB
    assert pynvml.nvmlDeviceGetGpuInstanceId(mig) == 7
    assert pynvml.nvmlDeviceIsMigDeviceHandle(mig).value == 1
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
    assert pynvml.nvmlDeviceGetUUID(parent) == nvml.gpus[0].uuid
    assert code_of(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle(), 1) == NvmlReturn.NOT_FOUND
    assert code_of(pynvml.nvmlDeviceGetUtilizationRates, handle()) == NvmlReturn.NOT_SUPPORTED
    assert code_of(pynvml.nvmlDeviceGetUtilizationRates, mig) == NvmlReturn.NOT_SUPPORTED
    assert code_of(pynvml.nvmlDeviceGetPowerUsage, mig) == NvmlReturn.NOT_SUPPORTED


def test_an_absent_reading_is_not_supported(nvml: NvmlDouble) -> None:
    nvml.gpus[0].power_watts = nvml.gpus[0].utilization_percent = None
    nvml.write()
    assert code_of(pynvml.nvmlDeviceGetPowerUsage, handle()) == NvmlReturn.NOT_SUPPORTED
    assert code_of(pynvml.nvmlDeviceGetUtilizationRates, handle()) == NvmlReturn.NOT_SUPPORTED
    assert code_of(pynvml.nvmlDeviceGetNumaNodeId, handle()) == NvmlReturn.NOT_SUPPORTED


def test_one_function_of_one_gpu_fails_on_demand(nvml: NvmlDouble) -> None:
    nvml.gpus[0].fail("nvmlDeviceGetTemperature", NvmlReturn.NO_PERMISSION)
    nvml.write()
    assert code_of(pynvml.nvmlDeviceGetTemperature, handle(), 0) == NvmlReturn.NO_PERMISSION
    assert pynvml.nvmlDeviceGetPowerUsage(handle()) == 70_000
    assert pynvml.nvmlDeviceGetTemperature(handle(1), 0) == 40


def test_a_lost_gpu_fails_every_call_until_it_is_back(nvml: NvmlDouble) -> None:
    lost = handle()
    nvml.gpus[0].fail("*", NvmlReturn.GPU_IS_LOST)
    nvml.write()
    assert code_of(pynvml.nvmlDeviceGetPowerUsage, lost) == NvmlReturn.GPU_IS_LOST
    assert code_of(pynvml.nvmlDeviceGetHandleByIndex, 0) == NvmlReturn.GPU_IS_LOST
    nvml.gpus[0].fail("*", NvmlReturn.SUCCESS)
    nvml.write()
    assert pynvml.nvmlDeviceGetPowerUsage(lost) == 70_000


def test_a_held_call_blocks_its_thread_alone_and_goes_on_when_released(nvml: NvmlDouble) -> None:
    release = nvml.hold(nvml.gpus[0].rules, "nvmlDeviceGetPowerUsage")
    nvml.write()
    readings: list[object] = []
    device = handle()
    thread = threading.Thread(target=lambda: readings.append(pynvml.nvmlDeviceGetPowerUsage(device)))
    thread.start()
    eventually_sync(lambda: nvml.calls("nvmlDeviceGetPowerUsage", gpu=0) == 1)
    assert pynvml.nvmlDeviceGetPowerUsage(handle(1)) == 70_000
    assert readings == []
    release.touch()
    thread.join(10)
    assert readings == [70_000]


def test_a_delay_slows_one_gpu(nvml: NvmlDouble) -> None:
    slow, other = handle(0), handle(1)
    nvml.gpus[0].delay(300)
    nvml.write()
    started = time.monotonic()
    pynvml.nvmlDeviceGetPowerUsage(other)
    between = time.monotonic()
    pynvml.nvmlDeviceGetPowerUsage(slow)
    assert between - started < 0.3 <= time.monotonic() - between


def test_with_the_driver_lock_a_busy_gpu_makes_the_others_wait(nvml: NvmlDouble) -> None:
    release = nvml.hold(nvml.gpus[0].rules)
    nvml.driver_lock = True
    nvml.write()
    slow, other = handle(0), handle(1)
    order: list[int] = []

    def read(device: object, mark: int) -> None:
        pynvml.nvmlDeviceGetPowerUsage(device)
        order.append(mark)

    first = threading.Thread(target=read, args=(slow, 0))
    first.start()
    eventually_sync(lambda: nvml.calls("nvmlDeviceGetPowerUsage", gpu=0) == 1)
    second = threading.Thread(target=read, args=(other, 1))
    second.start()
    eventually_sync(lambda: nvml.calls("nvmlDeviceGetPowerUsage", gpu=1) == 1)
    second.join(0.05)
    assert order == [], "the driver is busy with the first GPU"
    release.touch()
    first.join(10)
    second.join(10)
    assert sorted(order) == [0, 1]


@pytest.mark.parametrize("code", [NvmlReturn.DRIVER_NOT_LOADED, NvmlReturn.LIB_RM_VERSION_MISMATCH])
def test_a_start_fails_on_demand_and_works_later(nvml_double: NvmlDouble, code: NvmlReturn) -> None:
    nvml_double.fail_start(code)
    nvml_double.write()
    assert code_of(pynvml.nvmlInit) == code
    assert code_of(pynvml.nvmlDeviceGetCount) == NvmlReturn.UNINITIALIZED
    nvml_double.fail_start(NvmlReturn.SUCCESS)
    nvml_double.write()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 2
    pynvml.nvmlShutdown()


def test_after_a_driver_reload_only_an_end_and_a_start_help(nvml: NvmlDouble) -> None:
    old = handle()
    nvml.reload_driver()
    assert code_of(pynvml.nvmlDeviceGetPowerUsage, old) == NvmlReturn.UNKNOWN
    assert code_of(pynvml.nvmlDeviceGetHandleByIndex, 0) == NvmlReturn.UNKNOWN
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    assert code_of(pynvml.nvmlDeviceGetCount) == NvmlReturn.UNKNOWN, "another user kept the session alive"
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetPowerUsage(handle()) == 70_000
    assert code_of(pynvml.nvmlDeviceGetPowerUsage, old) == NvmlReturn.INVALID_ARGUMENT, (
        "handles do not come back"
    )


def test_events_reach_the_sets_that_registered_before(nvml: NvmlDouble) -> None:
    nvml.raise_event(gpu=0, data=31)
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(handle(0), pynvml.nvmlEventTypeXidCriticalError, events)
    assert code_of(pynvml.nvmlEventSetWait_v2, events, 5) == NvmlReturn.TIMEOUT
    nvml.raise_event(gpu=1, data=48)
    nvml.raise_event(gpu=0, data=79)
    seen = pynvml.nvmlEventSetWait_v2(events, 5000)
    assert (seen.eventType, seen.eventData) == (pynvml.nvmlEventTypeXidCriticalError, 79)
    assert pynvml.nvmlDeviceGetUUID(seen.device) == nvml.gpus[0].uuid
    pynvml.nvmlEventSetFree(events)
    assert code_of(pynvml.nvmlEventSetWait_v2, events, 5) == NvmlReturn.INVALID_ARGUMENT


def test_counts_calls_by_function_and_gpu(nvml: NvmlDouble) -> None:
    first, second = handle(0), handle(1)
    before = nvml.calls()
    for _ in range(3):
        pynvml.nvmlDeviceGetPowerUsage(first)
    pynvml.nvmlDeviceGetPowerUsage(second)
    assert nvml.calls("nvmlDeviceGetPowerUsage", gpu=0) == 3
    assert nvml.calls("nvmlDeviceGetPowerUsage") == 4
    assert nvml.calls() - before == 4


def test_without_a_control_file_there_is_no_library(
    nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("NVML_DOUBLE_CONFIG")
        assert code_of(pynvml.nvmlInit) == NvmlReturn.LIBRARY_NOT_FOUND
    pynvml.nvmlInit()
