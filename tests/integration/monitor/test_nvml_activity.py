"""What works on GPUs and how hard, over the NVML double: counters of GPUs and MIG instances, and processes."""

import os
from collections.abc import Iterator

import psutil
import pytest

from gpuscale.api.types import v1 as types_api
from gpuscale.monitor.agent.nvml import NvmlSource
from gpuscale.monitor.agent.nvml.field_values import GPM_METRICS
from gpuscale.monitor.agent.processes import shown_program
from gpuscale.monitor.model.readings import GpuReading, GpuSample, GpuState, ReadingStatus
from gpuscale.monitor.wire import put
from tests.support.nvml_double import GIB, DoubleGpu, DoubleProcess, NvmlDouble, NvmlReturn

DISTINCT = {metric: 10.0 + place for place, metric in enumerate(GPM_METRICS.values())}
MIB = 1024**2


class Clocked(NvmlSource):
    """A source whose clock a test moves."""

    def __init__(self) -> None:
        self.time = 0.0
        super().__init__(lambda: self.time)

    def read_at(self, gpu: DoubleGpu, time: float) -> GpuSample:
        self.time = time
        return self.read(gpu.uuid)


@pytest.fixture
def source(nvml_double: NvmlDouble, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocked]:
    """One over a machine with a GPU, on a host whose process ids are the driver's."""
    proc = nvml_double.folder / "proc"
    (proc / "self/ns").mkdir(parents=True)
    (proc / "self/ns/pid").symlink_to("pid:[4026531836]")
    (proc / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))
    del nvml_double.gpus[1:]
    nvml_double.gpus[0].activity = dict(DISTINCT)
    nvml_double.write()
    with_clock = Clocked()
    with_clock.open()
    yield with_clock
    with_clock.close()


def figures(reading: GpuReading) -> dict[str, float | None]:
    return {name: getattr(reading, name) for name in GPM_METRICS}


def lacking(sample: GpuSample) -> dict[str, ReadingStatus]:
    return {one.field: one.status for one in sample.reading.absent if one.field in GPM_METRICS}


def expected(given: dict[int, float]) -> dict[str, float]:
    return {
        name: given[metric] * (1 if name.endswith("_percent") else MIB)
        for name, metric in GPM_METRICS.items()
    }


def test_each_figure_is_the_mean_between_two_samples(nvml_double: NvmlDouble, source: Clocked) -> None:
    gpu = nvml_double.gpus[0]
    first = source.read_at(gpu, 0.0)
    assert set(figures(first.reading).values()) == {None}
    assert lacking(first) == {}  # nothing failed: there is nothing yet
    assert figures(source.read_at(gpu, 1.0).reading) == expected(DISTINCT)


def test_it_is_sampled_every_five_seconds(nvml_double: NvmlDouble, source: Clocked) -> None:
    for second in range(21):
        source.read_at(nvml_double.gpus[0], float(second))
    assert nvml_double.calls("nvmlGpmSampleGet") == len((0, 1, 6, 11, 16))


def test_instances_have_activity_although_they_have_no_utilization(nvml_double: NvmlDouble) -> None:
    gpu = nvml_double.gpus[0]
    gpu.mig_mode, gpu.activity = 1, {}
    gpu.mig_devices = [
        DoubleGpu(f"MIG-{number}", gpu_instance=number, activity=dict.fromkeys(DISTINCT, float(number)))
        for number in (1, 2)
    ]
    nvml_double.write()
    source = Clocked()
    source.open()
    for part in gpu.mig_devices:
        source.read_at(part, 0.0)
        reading = source.read_at(part, 1.0).reading
        assert reading.utilization_percent is None
        assert figures(reading) == expected(part.activity)
    source.close()


@pytest.mark.parametrize("call", ["nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
def test_where_it_fails_it_is_off(nvml_double: NvmlDouble, source: Clocked, call: str) -> None:
    """As on drivers where another profiler has the counters; the GPU is no worse for it."""
    nvml_double.fail(call, NvmlReturn.UNKNOWN)
    nvml_double.gpus[0].fail(call, NvmlReturn.UNKNOWN)
    nvml_double.write()
    for second in range(12):
        sample = source.read_at(nvml_double.gpus[0], float(second))
    assert lacking(sample) == dict.fromkeys(GPM_METRICS, ReadingStatus.NOT_SUPPORTED)
    assert sample.state is GpuState.OK
    assert nvml_double.calls(call) == 1


def test_a_figure_that_the_gpu_lacks_is_absent_alone(nvml_double: NvmlDouble, source: Clocked) -> None:
    gpu = nvml_double.gpus[0]
    del gpu.activity[GPM_METRICS["fp64_activity_percent"]]
    gpu.activity[GPM_METRICS["sm_activity_percent"]] = float("nan")
    gpu.activity[GPM_METRICS["sm_occupancy_percent"]] = 100.4  # counters are not read in one moment
    nvml_double.write()
    source.read_at(gpu, 0.0)
    sample = source.read_at(gpu, 1.0)
    assert set(lacking(sample)) == {"fp64_activity_percent", "sm_activity_percent"}
    assert sample.reading.sm_occupancy_percent == 100.0
    assert sample.state is GpuState.OK


def test_samples_are_given_back(nvml_double: NvmlDouble, source: Clocked) -> None:
    source.read_at(nvml_double.gpus[0], 0.0)
    source.close()
    assert nvml_double.calls("nvmlGpmSampleFree") == nvml_double.calls("nvmlGpmSampleAlloc") == 2


def test_a_process_is_told_with_what_it_runs_for_whom_since_when_and_how_busy_it_is(
    nvml_double: NvmlDouble, source: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = nvml_double.gpus[0]
    use = {"memory_percent": 23, "encoder_percent": 7, "decoder_percent": 101}  # more than all is no share
    gpu.processes = [DoubleProcess(os.getpid(), GIB, sm_percent=61, **use), DoubleProcess(2, GIB)]
    nvml_double.write()
    message = types_api.GpuReading()
    put(message, "processes", source.read_at(gpu, 0.0).reading.processes)
    by_pid = {one.pid: one for one in message.processes}
    found, unseen = by_pid[os.getpid()], by_pid[2]
    monkeypatch.undo()
    own = psutil.Process()
    assert found.program == shown_program(own.cmdline()) != ""
    assert found.user in {own.username(), str(os.geteuid())}
    assert abs(found.start_time.seconds - own.create_time()) <= 2
    told = (found.utilization_percent, found.memory_utilization_percent, found.encoder_utilization_percent)
    assert (*told, found.HasField("decoder_utilization_percent")) == (61, 23, 7, False)
    assert (unseen.user, unseen.program, unseen.HasField("start_time")) == ("", "", False)
    assert not unseen.HasField("utilization_percent")


@pytest.mark.parametrize("code", [NvmlReturn.NO_PERMISSION, NvmlReturn.NOT_FOUND, NvmlReturn.UNKNOWN])
def test_a_gpu_that_does_not_tell_the_use_of_processes_is_no_worse_for_it(
    nvml_double: NvmlDouble, source: Clocked, code: NvmlReturn
) -> None:
    gpu = nvml_double.gpus[0]
    gpu.processes = [DoubleProcess(os.getpid(), GIB, sm_percent=61)]
    gpu.fail("nvmlDeviceGetProcessUtilization", code)
    nvml_double.write()
    sample = source.read_at(gpu, 0.0)
    [process] = sample.reading.processes or ()
    assert (process.utilization_percent, process.memory_used_bytes, sample.state) == (None, GIB, GpuState.OK)
