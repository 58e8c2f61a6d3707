"""Which GPUs are read: a driver that fails is never papered over with simulated GPUs."""

import sys

import pytest

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.monitor.agent.isolated import IsolatedSource
from gpuscale.monitor.agent.sources import AutoSource, GpuSourceError, make_source
from tests.support.monitor import FakeGpus
from tests.support.monitor_values import identity


def auto(real: FakeGpus) -> AutoSource:
    return AutoSource(real, FakeGpus(gpus=[identity(9)], simulated=True))


def test_a_host_with_a_driver_gets_its_real_gpus() -> None:
    source = auto(FakeGpus())
    assert [gpu.index for gpu in source.open().gpus] == [0, 1]
    assert not source.simulated


def test_a_host_without_a_driver_gets_simulated_gpus_for_good() -> None:
    real = FakeGpus(problem=GpuSourceError("no library", no_driver=True))
    source = auto(real)
    assert [gpu.index for gpu in source.open().gpus] == [9]
    assert source.simulated
    real.problem = None
    source.close()
    assert [gpu.index for gpu in source.open().gpus] == [9]
    assert real.opened == 1


def test_a_driver_that_fails_is_an_error_now_and_later() -> None:
    real = FakeGpus(problem=GpuSourceError("NVML: Unknown Error"))
    source = auto(real)
    with pytest.raises(GpuSourceError, match="Unknown Error"):
        source.open()
    real.problem = GpuSourceError("NVML: Driver Not Loaded", no_driver=True)
    with pytest.raises(GpuSourceError, match="Not Loaded"):
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
    assert make_source("auto", "alpha", 2, lambda: 0.0).simulated
    with pytest.raises(FailedPreconditionError, match=r"gpuscale\[agent\]"):
        make_source("nvml", "alpha", 2, lambda: 0.0)


def test_an_isolated_source_never_loads_the_drivers_library_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("gpuscale.monitor.agent.nvml")]:
        monkeypatch.delitem(sys.modules, module)
    source = make_source("nvml", "alpha", 2, lambda: 0.0, isolate=True)
    assert isinstance(source, IsolatedSource)
    assert not [name for name in sys.modules if name.startswith("gpuscale.monitor.agent.nvml")]
    with pytest.raises(GpuSourceError, match="is not there"):
        source.read("GPU-1")


def test_an_interruption_reaches_the_source_that_was_chosen() -> None:
    real = FakeGpus(interruptible=True)
    assert auto(real).interrupt()
    assert real.interrupted
    assert not auto(FakeGpus()).interrupt()
