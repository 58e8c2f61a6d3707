"""What one GPU does not offer is absent, and nothing else is: each source of readings in turn, over the NVML double."""

import itertools
from collections.abc import Iterator

import pynvml
import pytest

from gpuscale.monitor.agent.nvml import NvmlSource
from gpuscale.monitor.agent.nvml.field_values import GPM_METRICS, NVLINK_COUNT
from gpuscale.monitor.agent.nvml.gpu_readings import METERS
from gpuscale.monitor.model.readings import GPU_FIELDS, GpuSample, GpuState, ReadingStatus
from tests.support.nvml_double import FIELD_IDS, NvmlDouble, NvmlReturn

RATE = "nvlink_bytes_per_second"  # of both counters of bytes
LINK_STATE = 165
MEMORY = {"memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes"}
CALLS = {
    "nvmlDeviceGetUtilizationRates": {"utilization_percent", "memory_utilization_percent"},
    "nvmlDeviceGetTemperature": {"temperature_celsius"},
    "nvmlDeviceGetPowerUsage": {"power_watts"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "memory_clock_mhz", "video_clock_mhz"},
    "nvmlDeviceGetPerformanceState": {"performance_state"},
    "nvmlDeviceGetEncoderUtilization": {"encoder_utilization_percent"},
    "nvmlDeviceGetDecoderUtilization": {"decoder_utilization_percent"},
    "nvmlDeviceGetCurrPcieLinkGeneration": {"pcie_link_generation"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"pcie_link_width"},
    "nvmlDeviceGetFanSpeed": {"fan_speed_percent"},
    "nvmlDeviceGetBAR1MemoryInfo": {"bar1_total_bytes", "bar1_used_bytes", "bar1_free_bytes"},
    "nvmlDeviceGetMaxClockInfo": {"sm_clock_max_mhz", "memory_clock_max_mhz"},
    "nvmlDeviceGetComputeMode": {"compute_mode"},
    "nvmlDeviceGetPersistenceMode": {"persistence_mode"},
    "nvmlDeviceGetGridLicensableFeatures_v4": {"vgpu_licensed"},
}
SEVERAL_CALLS = {
    ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"): MEMORY,
    ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"): {
        "throttle_reason_mask"
    },
    tuple(
        f"nvmlDeviceGet{kind}RunningProcesses{version}"
        for kind in ("Compute", "Graphics")
        for version in ("_v2", "_v3")
    ): {"processes"},
    ("nvmlGpmQueryDeviceSupport",): set(GPM_METRICS),
}


@pytest.fixture
def source(nvml_double: NvmlDouble) -> Iterator[NvmlSource]:
    """A source over a machine with one GPU that has NVLinks."""
    del nvml_double.gpus[1:]
    nvml_double.gpus[0].nvlinks = [-1, -1]
    nvml_double.write()
    clock = itertools.count(0.0, 20.0)
    one = NvmlSource(lambda: next(clock))
    yield one
    one.close()


def read(double: NvmlDouble, source: NvmlSource) -> GpuSample:
    """What is there once the counters were sampled twice."""
    double.write()
    source.open()
    for _ in range(3):
        sample = source.read(double.gpus[0].uuid)
    return sample


def check(sample: GpuSample, lacking: set[str]) -> None:
    """Nothing is absent but that, which says nothing against the GPU."""
    assert {one.field for one in sample.reading.absent} == lacking
    assert {one.status for one in sample.reading.absent} <= {ReadingStatus.NOT_SUPPORTED}
    assert {name for name in GPU_FIELDS if getattr(sample.reading, name) is None} == lacking
    assert sample.state is GpuState.OK


def test_the_sources_below_are_all_that_there_are() -> None:
    named = [*CALLS.values(), *SEVERAL_CALLS.values(), set(FIELD_IDS.values()), {RATE}]
    assert set().union(*named) == set(GPU_FIELDS)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_not_supported(nvml_double: NvmlDouble, source: NvmlSource, call: str) -> None:
    nvml_double.gpus[0].fail(call, NvmlReturn.NOT_SUPPORTED)
    check(read(nvml_double, source), CALLS[call])


@pytest.mark.parametrize("calls", SEVERAL_CALLS, ids=lambda calls: calls[0])
def test_calls_that_stand_in_for_each_other(
    nvml_double: NvmlDouble, source: NvmlSource, calls: tuple[str, ...]
) -> None:
    for call in calls:
        nvml_double.gpus[0].fail(call, NvmlReturn.NOT_SUPPORTED)
    check(read(nvml_double, source), SEVERAL_CALLS[calls])


@pytest.mark.parametrize("field_id", FIELD_IDS)
def test_a_field_value_that_is_not_supported(
    nvml_double: NvmlDouble, source: NvmlSource, field_id: int
) -> None:
    del nvml_double.gpus[0].fields[field_id]
    lacking = set() if field_id == LINK_STATE else {FIELD_IDS[field_id]}  # which has a call of its own
    check(read(nvml_double, source), lacking | ({RATE} if field_id in {138, 139} else set()))


def test_a_driver_without_field_values(nvml_double: NvmlDouble, source: NvmlSource) -> None:
    nvml_double.gpus[0].fail("nvmlDeviceGetFieldValues", NvmlReturn.FUNCTION_NOT_FOUND)
    sample = read(nvml_double, source)
    check(sample, {*FIELD_IDS.values(), RATE} - {NVLINK_COUNT})
    assert sample.reading.nvlink_active_count == 2


def test_links_that_come_up_later_are_found_and_none_is_up_before(
    nvml_double: NvmlDouble, source: NvmlSource
) -> None:
    """As where the agent starts before the fabric manager."""
    gpu = nvml_double.gpus[0]
    del gpu.fields[LINK_STATE]
    for down, up in ((2, 0), (1, 1), (0, 2)):
        gpu.links_down = down
        nvml_double.write()
        sample = read(nvml_double, source) if down == 2 else source.read(gpu.uuid)
        assert (sample.reading.nvlink_active_count, sample.link_ends) == (up, (None,) * up)
        check(sample, set())


def test_a_gpu_without_links_lacks_their_readings(nvml_double: NvmlDouble, source: NvmlSource) -> None:
    nvml_double.gpus[0].nvlinks = []
    sample = read(nvml_double, source)
    assert sample.link_ends == ()
    check(sample, {name for name in GPU_FIELDS if name.startswith("nvlink_")} - GPM_METRICS.keys())


def test_what_runs_over_links_is_told_by_the_second(nvml_double: NvmlDouble) -> None:
    """Of both directions, in bytes: the driver counts KiB. Counters that begin anew tell nothing for once."""
    gpu, now = nvml_double.gpus[0], 0.0
    gpu.nvlinks = [-1]
    source = NvmlSource(lambda: now)
    nvml_double.write()
    source.open()
    rates = list[float | None]()
    for sent, received in ((1000, 500), (4000, 1500), (10, 10), (40, 40)):
        gpu.fields |= {138: sent, 139: received}
        nvml_double.write()
        rates.append(source.read(gpu.uuid).reading.nvlink_bytes_per_second)
        now += 30.0
    source.close()
    assert rates == [None, 4000 * 1024 / 30, None, 60 * 1024 / 30]


def test_an_older_name_of_a_call_stands_in(nvml_double: NvmlDouble, source: NvmlSource) -> None:
    nvml_double.gpus[0].event_reasons = 0x4
    nvml_double.gpus[0].fail("nvmlDeviceGetCurrentClocksEventReasons", NvmlReturn.FUNCTION_NOT_FOUND)
    sample = read(nvml_double, source)
    assert sample.reading.throttle_reason_mask == 0x4
    assert sample.reading.absent == ()


def test_a_field_value_that_cannot_be_is_absent(nvml_double: NvmlDouble, source: NvmlSource) -> None:
    nvml_double.gpus[0].fields[82] = 4_294_967_295
    sample = read(nvml_double, source)
    assert sample.reading.memory_temperature_celsius is None
    assert [one.detail for one in sample.reading.absent] == ["the driver said 4.29497e+09"]
    assert sample.reading.energy_joules == 5000.0
    assert sample.state is GpuState.DEGRADED


def test_bytes_over_links_are_asked_for_all_links_of_the_gpu(
    nvml_double: NvmlDouble, source: NvmlSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the scope that nvml.h gives them, UINT_MAX; the double tells the same for any."""
    asked: list[object] = []
    ask = pynvml.nvmlDeviceGetFieldValues
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetFieldValues", lambda handle, keys: asked.extend(keys) or ask(handle, keys)
    )
    read(nvml_double, source)
    assert {(138, 0xFFFFFFFF), (139, 0xFFFFFFFF)} <= set(asked)


def test_what_is_not_supported_is_left_out_of_the_batch(nvml_double: NvmlDouble, source: NvmlSource) -> None:
    """And where nothing of a batch is supported, it is not asked at all."""
    nvml_double.gpus[0].mig_mode = None  # one that may be divided is asked again
    for field_id in [key for field in METERS for key in field.keys if isinstance(key, int)]:
        del nvml_double.gpus[0].fields[field_id]
    read(nvml_double, source)
    asked = nvml_double.calls("nvmlDeviceGetFieldValues")
    for _ in range(3):
        check(source.read(nvml_double.gpus[0].uuid), {field.name for field in METERS})
    assert nvml_double.calls("nvmlDeviceGetFieldValues") == asked + 3  # the slow ones alone
