"""`probe` and `run --check`: on a driver's double and a double of CUDA, at one `gpuscalectl up`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuscale.api.types.v1 import Gpu, GpuState
from gpuscale.cli.commands import probe
from gpuscale.cli.commands.gpu_test import link_rate
from tests.support import cuda_double
from tests.support.cli import Ran, run_cli
from tests.support.fixtures import need
from tests.support.nvml_double import NvmlDouble, NvmlReturn, env_with_double, why_unavailable
from tests.support.up import CTL, Typed, Up, ctl_environment
from tests.support.waiting import eventually_sync

TEST = (sys.executable, "-m", "gpuscale.cli.commands.gpu_test", "0")


class Bench:
    """A server with three GPUs; what is typed at it finds the double of CUDA, unless it is said to be away."""

    def __init__(self, folder: Path) -> None:
        self.double = NvmlDouble(folder, 3)
        self.double.gpus[0].pcie_width = 8
        self.double.write()
        self.uuids = [gpu.uuid for gpu in self.double.gpus]
        self.up = Up(folder, environment={**ctl_environment(), **env_with_double(self.double)})

    def ctl(self, *words: str, how: str | None = "") -> Ran:
        """`how` CUDA misbehaves; None for a host without it."""
        more = {} if how is None else cuda_double.variables(how)
        if words[0] != "run":
            return run_cli("--address", self.up.address, *words, environment=more)
        return Typed("--address", self.up.address, *words, environment=ctl_environment(**more)).ended()

    def probe(self, *names: str, how: str | None = "") -> dict[str, list[tuple[str, str]]]:
        """State and text of what was found, by index of the GPU."""
        found: dict[str, list[tuple[str, str]]] = {}
        for one in json.loads(self.ctl("probe", *names, "-o", "json", how=how).out)["gpus"]:
            found.setdefault(one["gpu"].rpartition("/")[2], []).append((one["state"], one["found"]))
        return found

    def cordons(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.loads(self.ctl("get", "cordons", "-o", "json").out)["cordons"]
        return listed


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    need(why_unavailable())
    made = Bench(tmp_path_factory.mktemp("probe"))
    yield made
    assert json.loads(made.ctl("get", "reservations", "-o", "json").out)["reservations"] == []
    made.up.stop()


@pytest.mark.parametrize(
    ("how", "state", "said"),
    [
        ("", "OK", "0.0 GiB compared; PCIe carries "),
        ("wrong GPU-1", "FAIL", "memory differs from what was copied, at byte "),
        ("lost GPU-1", "FAIL", "cuMemcpyDtoD_v2 gave CUDA_ERROR_ECC_UNCORRECTABLE"),
        ("init 100", "UNUSABLE", "cuInit gave CUDA_ERROR_NO_DEVICE"),
        ("init 34", "UNTESTED", "libcuda.so.1 is a stub"),
        (None, "UNTESTED", "libcuda.so.1 not found"),
    ],
)
def test_what_a_test_of_a_gpu_finds(how: str | None, state: str, said: str) -> None:
    need(why_unavailable())
    more = {} if how is None else cuda_double.variables(how)
    ran = subprocess.run(
        TEST, env={**os.environ, **more, "CUDA_VISIBLE_DEVICES": "GPU-1"}, capture_output=True, check=True
    )
    found = json.loads(ran.stdout)
    assert (found[0], said in found[1]) == (state, True), found


def test_what_a_link_could_carry_is_what_both_of_its_ends_can(tmp_path: Path) -> None:
    device = tmp_path / "0000:16:01.0" / "0000:17:00.0"
    device.mkdir(parents=True)
    (device / "max_link_width").write_text("16\n")
    (device / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    assert link_rate(device) == 64e9
    (device.parent / "max_link_speed").write_text("16.0 GT/s PCIe\n")
    assert link_rate(device) == 32e9
    (device / "max_link_width").write_text("Unknown\n")
    assert link_rate(device) == 0


def test_a_divided_gpu_is_left_to_the_tests_of_its_instances() -> None:
    gpu = Gpu(name="nodes/n/gpus/g", index=3, state=GpuState.GPU_STATE_DIVIDED)
    no_client: Any = None
    assert probe.tested(no_client, gpu, "", None) == probe.Probed(
        "n/3", "UNTESTED", "not tested: its MIG instances are"
    )


def test_a_command_starts_after_its_gpu_was_tested(bench: Bench) -> None:
    ran = bench.ctl("run", "--check", "--gpus", "1", "--", "sh", "-c", "echo on $CUDA_VISIBLE_DEVICES")
    assert (ran.code, ran.out[:7]) == (0, "on GPU-"), ran.err
    assert f"{ran.out.split()[1]} OK: 0.0 GiB compared" in ran.err
    without = bench.ctl("run", "--check", "--gpus", "1", "--", "true", how=None)
    assert (without.code, "UNTESTED: libcuda.so.1 not found" in without.err) == (0, True), without.err


@pytest.mark.parametrize("how", [(), ("-d",)], ids=["attached", "detached"])
def test_a_gpu_that_fails_gets_no_command_and_is_cordoned_with_what_was_seen(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    uuid = bench.uuids[1]
    words = ("run", "--check", *how, "--gpus", "3", "--", "touch", str(tmp_path / "ran"))
    ran = bench.ctl(*words, how=f"wrong {uuid}")
    assert (ran.code, f"{uuid} FAIL: memory differs from what was copied" in ran.err) == (4, True), ran.err
    [cordon] = bench.cordons()
    assert cordon["target"].endswith(f"/gpus/{uuid.lower()}")
    assert "it failed its test: memory differs from what was copied, at byte " in cordon["reason"]
    assert f"cordoned; once it works: gpuscalectl uncordon {cordon['target']}" in ran.err
    assert bench.ctl("uncordon", cordon["target"]).code == 0
    assert not (tmp_path / "ran").exists()


def test_a_probe_tests_what_is_free_and_tells_what_is_known(bench: Bench) -> None:
    holder = ("run", "--gpus", "1", "--gpu", bench.uuids[0], "--", *CTL, "--address", bench.up.address)
    ran = bench.ctl(*holder, "probe", "-o", "json", how=f"wrong {bench.uuids[1]}")
    assert ran.code == 1, ran.err
    found = {one["gpu"].rpartition("/")[2]: one for one in json.loads(ran.out)["gpus"]}
    assert (found["0"]["state"], "not tested" in found["0"]["found"]) == ("UNTESTED", True)
    assert (found["1"]["state"], "cordoned" in found["1"]["advice"]) == ("FAIL", True)
    assert (found["2"]["state"], "GiB compared" in found["2"]["found"]) == ("OK", True)
    [cordon] = bench.cordons()
    assert bench.ctl("uncordon", cordon["target"]).code == 0


def test_a_probe_tells_of_narrow_links_and_lost_gpus_and_leaves_those_alone(bench: Bench) -> None:
    lost = bench.double.gpus[2]
    lost.fail("*", NvmlReturn.GPU_IS_LOST)
    bench.double.write()
    try:
        found = eventually_sync(
            lambda: (now := bench.probe(how=None))["2"][0][0] == "FAIL" and now, interval=0.5
        )
        assert found["2"][0][1] in {"the GPU is gone from the bus", "it is LOST"}
        assert not any("tested" in text for _, text in found["2"])
        assert ("WARN", f"its PCIe link has 8 lanes, another {lost.name} has 16") in found["0"]
        assert found["1"] == [("UNTESTED", "not tested: libcuda.so.1 not found")]
    finally:
        lost.fail("*", NvmlReturn.SUCCESS)
        bench.double.write()
