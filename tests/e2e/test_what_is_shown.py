"""What commands, metrics and refusals say of GPUs that may not be used, over a whole `up` and the driver's double."""

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import run_cli
from tests.support.fixtures import need
from tests.support.nvml_double import NvmlDouble, NvmlReturn, env_with_double, why_unavailable
from tests.support.ports import free_port
from tests.support.promtool import named
from tests.support.up import Up, ctl_environment
from tests.support.waiting import eventually_sync

DEAD, SICK, PLAIN = 0, 1, 2
CORRECTED_NEVER = 4
"""NVML's field of memory errors that could not be corrected."""


class Site:
    """An `up` on a host with three GPUs, the first of which is dead when it starts."""

    def __init__(self, folder: Path) -> None:
        self.metrics = f"127.0.0.1:{free_port()}"
        self.double = NvmlDouble(folder, gpu_count=3)
        for call in ("nvmlDeviceGetUUID", "nvmlDeviceGetName"):
            self.double.gpus[DEAD].fail(call, NvmlReturn.GPU_IS_LOST)
        self.double.write()
        config = folder / "up.toml"
        config.write_text(f'[agent]\nnode = "alpha"\nmetrics_listen = "{self.metrics}"\n')
        driver = env_with_double(self.double)
        environment = ctl_environment(
            **{name: driver[name] for name in ("LD_LIBRARY_PATH", "NVML_DOUBLE_CONFIG")}
        )
        self.up = Up(folder, arguments=["--config", str(config)], environment=environment)

    def ctl(self, *arguments: str, code: int = 0) -> str:
        """What a command writes, both streams."""
        ran = run_cli(
            "--address", self.up.address, *arguments, environment={"COLUMNS": "80", "NO_COLOR": "1"}
        )
        assert ran.code == code, ran.out + ran.err
        return ran.out + ran.err

    def gpus(self) -> dict[int, list[str]]:
        """The cells of `get gpus` by index."""
        lines = self.ctl("get", "gpus", "--no-headers").splitlines()
        rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
        return {int(row[1]): row for row in rows}

    def quarantined(self) -> dict[int, float]:
        """What the agent's metrics say of quarantines."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=60) as page:
            found = named(page.read().decode(), "gpuscale_gpu_quarantined")
        return {int(one.labels["gpu"]): one.value for one in found}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    need(why_unavailable())
    one = Site(tmp_path_factory.mktemp("shown"))
    with one.up:
        eventually_sync(lambda: len(one.gpus()) == 3)
        yield one


def test_a_gpu_that_is_dead_from_the_start_is_a_row_and_its_node_is_degraded(site: Site) -> None:
    row = site.gpus()[DEAD]
    assert "LOST" in row
    [shown] = [
        one for one in json.loads(site.ctl("get", "gpus", "-o", "json"))["gpus"] if one["index"] == DEAD
    ]
    assert shown["pciBusId"] == site.double.gpus[DEAD].pci_bus_id
    nodes = site.ctl("get", "nodes")
    assert "DEGRADED" in nodes
    assert "GPU is lost" in nodes
    assert "DEGRADED" in site.ctl("top", "--once")
    eventually_sync(lambda: "GPU_LOST" in site.ctl("get", "health"))
    refused = eventually_sync(lambda: site.ctl("reserve", "--gpus", "3", code=5))
    assert "not answering (LOST)" in refused


def test_a_quarantine_is_shown_everywhere_with_its_reason_and_the_command_that_lifts_it(site: Site) -> None:
    sick = site.double.gpus[SICK]
    ask = ("reserve", "--gpus", "1", "--gpu", f"alpha/{sick.uuid}")
    held = json.loads(eventually_sync(lambda: site.ctl(*ask, "-o", "json")))  # a report may be late
    sick.fields[CORRECTED_NEVER] = 1
    site.double.write()
    for words in (["release", "--reason", "errors of memory are read each 30 s, and at first"], ["resume"]):
        site.ctl("driver", *words)
    eventually_sync(lambda: "QUARANTINED" in site.gpus()[SICK], timeout=60)
    assert "OK" in site.gpus()[PLAIN]
    assert "memory errors could not be corrected" in site.ctl("get", "gpus", "-o", "wide")
    assert re.search(rf"alpha +{SICK} .*QUARANTINED", site.ctl("top", "--once"))
    assert "ACTIVE,QUARANTINED" in site.ctl("get", "reservations", held["name"])
    eventually_sync(lambda: site.quarantined() == {DEAD: 1, SICK: 1, PLAIN: 0})
    site.ctl("release", held["name"])
    refused = eventually_sync(lambda: site.ctl(*ask, code=5))
    assert re.search(
        r"1 quarantined \(memory errors could not be corrected, since \d{4}-\d\d-\d\d .* UTC\)", refused
    )
    lift = f"gpuscalectl clear quarantine alpha/{sick.uuid}"
    assert lift in refused
    assert lift in site.ctl("explain", "placement", "--gpus", "2")
    assert "do not answer" not in refused
    assert "is out of quarantine" in site.ctl(*lift.split()[1:])
    taken = site.ctl(
        "reserve", "--gpus", "2", "--wait", "20s", "-o", "json"
    )  # the allocator is told in a moment
    reservation, _ = json.JSONDecoder().raw_decode(taken)  # and then that it had to wait, if it had
    site.ctl("release", reservation["name"])
    eventually_sync(lambda: "OK" in site.gpus()[SICK])


def test_uuids_are_written_as_the_driver_writes_them(site: Site) -> None:
    uuid = site.double.gpus[PLAIN].uuid
    assert uuid != uuid.lower()
    for output in (("-o", "wide"), ("-o", "json")):
        shown = site.ctl("explain", "placement", "--gpus", "1", *output)
        assert uuid in shown, shown


def test_the_driver_is_released_and_resumed_and_fences_are_cleared(site: Site) -> None:
    site.ctl("driver", "release", "--reason", "reset it", "--for", "5m")
    eventually_sync(lambda: "OK" not in site.gpus()[PLAIN])
    site.ctl("driver", "resume")
    eventually_sync(lambda: "OK" in site.gpus()[PLAIN])
    site.ctl("clear", "fence", site.double.gpus[PLAIN].uuid)
    assert "GPU-none" in site.ctl("clear", "fence", "GPU-none", code=3)
