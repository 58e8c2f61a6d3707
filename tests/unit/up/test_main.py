"""The banner says what there is, and simulated GPUs loudly."""

from pathlib import Path

from gpuscale.api.types.v1 import Gpu, Snapshot
from gpuscale.up.app import Running
from gpuscale.up.main import banner, gpus, hints
from gpuscale.up.settings import UpSettings


def test_banner() -> None:
    running = Running("127.0.0.1:7070", Snapshot(simulated=True, gpus=[Gpu(), Gpu()]))
    first, *rest = banner(running, UpSettings(data_dir=Path("/data")))
    assert first.startswith("gpuscale ")
    assert first.endswith(" is up at 127.0.0.1:7070")
    assert rest == [
        "  dashboard  gpuscalectl dashboard",
        "  data       /data",
        "  GPUs       2 SIMULATED: no hardware stands behind them",
    ]


def test_gpus() -> None:
    real = Snapshot(gpus=[Gpu(model="NVIDIA H100"), Gpu(model="NVIDIA H100"), Gpu(model="NVIDIA L4")])
    assert gpus(real) == "2 x NVIDIA H100, 1 x NVIDIA L4"
    assert gpus(Snapshot(gpu_problem="NVML: driver not loaded")) == "none: NVML: driver not loaded"
    assert gpus(Snapshot()) == "none: the driver reports none"


def test_hints_name_another_address() -> None:
    assert hints(Running("127.0.0.1:7070", Snapshot()))[0] == "next:  gpuscalectl get gpus"
    assert "--address 127.0.0.1:9" in hints(Running("127.0.0.1:9", Snapshot()))[0]
