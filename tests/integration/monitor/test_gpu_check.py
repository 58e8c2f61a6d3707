"""`make gpu-check` over the NVML double: what it compares, and what it calls wrong."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.nvml_double import GIB, NvmlDouble, env_with_double, wired_gpus

SCRIPT = Path(__file__).resolve().parents[3] / "tools/gpu_check.py"


def test_a_host_is_checked_and_a_page_says_what_was_found(nvml_double: NvmlDouble, tmp_path: Path) -> None:
    nvml_double.gpus = wired_gpus(2)
    for gpu in nvml_double.gpus:
        gpu.energy_joules, gpu.memory_used_bytes = 5000.0, 7 * GIB
    nvml_double.write()
    index = tmp_path / "pages/README.md"
    index.parent.mkdir()
    index.write_text("# Pages\n\n- none yet\n")
    ran = subprocess.run(
        [sys.executable, SCRIPT, "--seconds", "1", "--output", tmp_path / "pages"],
        env=env_with_double(nvml_double),
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert index.read_text() == "# Pages\n\n- [NVIDIA H100 80GB HBM3](nvidia-h100-80gb-hbm3.md)\n"
    text = (tmp_path / "pages/nvidia-h100-80gb-hbm3.md").read_text()
    assert "| GPUs | 2 x NVIDIA H100 80GB HBM3 |" in text
    free = re.search(r"\| `memory_free_bytes` \| (\d+) \| 1 \| 6.71089e\+07 \| 0 \| 0 \| 0 \|", text)
    assert free is not None
    assert int(free[1]) in range(2, 7, 2), "both GPUs, once a second"
    assert "Wrong: nothing." in text
    assert ("| kernel module | **none**" in text) == (not Path("/proc/driver/nvidia").exists())
    assert "| run --gpus 1 | exit code 0; no CUDA driver library: slept |" in text
    assert "| reservations left | 0 |" in text
    assert "the CUDA driver library is not there" in text


@pytest.mark.parametrize(
    ("ours", "raw", "wrong"),
    [
        (50.0, [40.0, 60.0], 0),  # it moved while it was read
        (50.0, [55.0, 60.0], 0),
        (50.0, [61.0, 70.0], 1),
        (None, [61.0, 70.0], 1),  # the driver tells it, and the agent does not
        (None, [None, None], 0),
        (50.0, [None, None], 0),
    ],
)
def test_a_reading_is_wrong_that_lies_outside_of_two_raw_ones(
    gpu_check: ModuleType, ours: float | None, raw: list[float | None], wrong: int
) -> None:
    found = gpu_check.Found()
    gpu_check.compare("power_watts", found, ours, raw, 10.0)
    assert found.compared["power_watts"].wrong == wrong
    assert found.wrong == ["power_watts"] * wrong
