"""Which GPUs an agent reads, and what simulated ones show."""

import os
import subprocess
import sys

import pytest

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.monitor.agent import sources
from gpuscale.monitor.agent.isolated import IsolatedSource
from gpuscale.monitor.agent.processes import ProcessNames
from gpuscale.monitor.model.admission import Admissions, AdmittedProcess
from gpuscale.monitor.model.readings import GPU_FIELDS, GpuState, ProcessKey
from tests.support.monitor import FakeGpus
from tests.support.monitor_values import identity


def auto(real: FakeGpus) -> sources.AutoSource:
    return sources.AutoSource(real, FakeGpus(gpus=[identity(9)], simulated=True))


def test_a_host_without_a_driver_gets_simulated_gpus_for_good() -> None:
    real = FakeGpus(problem=sources.GpuSourceError("no library", no_driver=True))
    source = auto(real)
    read = source.read  # as by a thread that took it just before the choice
    assert [gpu.index for gpu in source.open().gpus] == [9]
    assert source.simulated
    read(identity(9).uuid)
    assert not real.reads
    real.problem = None
    source.close()
    assert [gpu.index for gpu in source.open().gpus] == [9]
    assert real.opened == 1


def test_a_driver_that_fails_is_an_error_now_and_later() -> None:
    real = FakeGpus(problem=sources.GpuSourceError("NVML: Unknown Error"))
    source = auto(real)
    with pytest.raises(sources.GpuSourceError, match="Unknown Error"):
        source.open()
    real.problem = sources.GpuSourceError("NVML: Driver Not Loaded", no_driver=True)
    with pytest.raises(sources.GpuSourceError, match="Not Loaded"):
        source.open()
    assert not source.simulated


def test_reading_and_closing_reach_the_source_that_was_chosen() -> None:
    real = FakeGpus()
    source = auto(real)
    source.open()
    source.read(identity(0).uuid)
    source.close()
    assert (real.reads, real.closed) == ({identity(0).uuid: 1}, 1)


def test_without_nvidia_ml_py_auto_simulates_and_nvml_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in [name for name in sys.modules if name.startswith("gpuscale.monitor.agent.nvml")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert sources.make_source("auto", "alpha", 2, lambda: 0.0).simulated
    with pytest.raises(FailedPreconditionError, match=r"gpuscale\[agent\]"):
        sources.make_source("nvml", "alpha", 2, lambda: 0.0)


def test_an_isolated_source_never_loads_the_drivers_library_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("gpuscale.monitor.agent.nvml")]:
        monkeypatch.delitem(sys.modules, module)
    source = sources.make_source("nvml", "alpha", 2, lambda: 0.0, isolate=True)
    assert isinstance(source, IsolatedSource)
    assert not [name for name in sys.modules if name.startswith("gpuscale.monitor.agent.nvml")]
    with pytest.raises(sources.GpuSourceError, match="is not running"):
        source.read("GPU-1")


def test_an_interruption_reaches_the_source_that_was_chosen() -> None:
    real = FakeGpus(interruptible=True)
    assert auto(real).interrupt()
    assert real.interrupted
    assert not auto(FakeGpus()).interrupt()


def source(node: str = "alpha", now: float = 50.0) -> sources.SimulatedSource:
    return sources.SimulatedSource(node, 3, lambda: now)


def test_their_uuids_are_the_same_at_every_start_and_differ_between_nodes() -> None:
    first, second, other = (source(node).open() for node in ("alpha", "alpha", "beta"))
    assert first == second
    uuids = [gpu.uuid for gpu in (*first.gpus, *other.gpus)]
    assert len(set(uuids)) == 6
    assert all(uuid.startswith("SIM-") for uuid in uuids)
    assert (
        sources.simulated_uuid("alpha", 0) == first.gpus[0].uuid == "SIM-6afcb721-67c0-5d87-a657-b17ffccbb12a"
    )


def test_every_reading_is_there_and_plausible_at_any_time() -> None:
    for now in range(0, 1000, 7):
        one = source(now=float(now))
        for gpu in one.open().gpus:
            read = one.read(gpu.uuid)
            reading = read.reading
            assert read.state is GpuState.OK
            assert all(getattr(reading, name) is not None for name in GPU_FIELDS)
            assert reading.utilization_percent is not None
            assert 0.0 <= reading.utilization_percent <= 5.0
            assert reading.memory_total_bytes == sources.MEMORY_TOTAL_BYTES
            parts = (reading.memory_free_bytes, reading.memory_used_bytes, reading.memory_reserved_bytes)
            assert sum(part or 0 for part in parts) == sources.MEMORY_TOTAL_BYTES


@pytest.mark.parametrize(("later", "busy"), [(0, True), (1, False)])
def test_one_is_busy_while_what_was_admitted_on_it_runs(later: int, busy: bool) -> None:
    """This process runs, and one of its pid that started a moment later does not; the other GPU is idle."""
    [own, *_] = ProcessNames().lineage(os.getpid())
    first, second = (sources.simulated_uuid("alpha", index) for index in range(2))
    process = ProcessKey(own.pid, own.started + later)
    work = Admissions(workers=(AdmittedProcess(process, "r1", 1, frozenset({first})),))
    now = 40.0
    one = sources.SimulatedSource("alpha", 2, lambda: now, lambda: work)
    now = 50.0
    reading, other = one.read(first).reading, one.read(second).reading
    assert reading.energy_joules == pytest.approx((reading.power_watts or 0.0) * 10)
    assert (reading.sm_clock_mhz == reading.sm_clock_max_mhz, reading.throttle_reason_mask) == (
        busy,
        not busy,
    )
    assert (
        (reading.utilization_percent or 0.0) > 40.0
        if busy
        else reading.memory_used_bytes == other.memory_used_bytes
    )
    assert [holds.pid for holds in reading.processes or ()] == [own.pid] * busy
    assert other.processes == ()


def test_one_is_idle_once_what_was_admitted_has_ended_though_nobody_asked_how() -> None:
    child = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    [process, *_] = ProcessNames().lineage(child.pid)
    gpu = sources.simulated_uuid("alpha", 0)
    work = Admissions(workers=(AdmittedProcess(process, "r1", 1, frozenset({gpu})),))
    assert sources.SimulatedSource("alpha", 1, lambda: 50.0, lambda: work).read(gpu).reading.processes == ()
    child.wait()
