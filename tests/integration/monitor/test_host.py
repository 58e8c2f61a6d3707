"""The host's figures: smoothed, per core, and absent where the kernel does not tell."""

import shutil
from pathlib import Path

import psutil
import pytest

from gpuscale.monitor.agent.host import ProcHost
from gpuscale.monitor.model.readings import HOST_FIELDS, ReadingStatus

MEMINFO = "".join(
    f"{name}: {amount} kB\n"
    for name, amount in {
        "MemTotal": 100,
        "MemFree": 10,
        "MemAvailable": 60,
        "Buffers": 5,
        "Cached": 20,
        "Active": 30,
        "Inactive": 10,
        "Shmem": 0,
        "SwapTotal": 50,
        "SwapFree": 20,
    }.items()
)


class Rig:
    """A host whose clock, and use of the CPU, the test sets; the rest of its /proc is what the files say."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.proc = folder / "proc"
        self.ticks = [0, 0]
        (self.proc / "pressure").mkdir(parents=True)
        (self.proc / "net").mkdir()
        for name in (
            "block/sda/device",
            "block/dm-0",
            "block/loop0",
            "class/net/eth0/device",
            "class/net/br0",
        ):
            (folder / "sys" / name).mkdir(parents=True)
        self.write("meminfo", MEMINFO)
        self.write("vmstat", "pswpin 0\npswpout 0\n")
        moved = "1 0 10 1 1 0 20 1 0 1 1"
        self.write("diskstats", f"8 0 sda {moved}\n253 0 dm-0 {moved}\n7 0 loop0 {moved}\n")
        self.moved(lo=(9, 9), eth0=(7, 8), br0=(7, 8))
        for resource, some in (("cpu", 12.5), ("memory", 0.0), ("io", 3.25)):
            self.write(f"pressure/{resource}", f"some avg10={some} total=7\nfull avg10={some / 2} total=1\n")
        self.use(0.0)
        self.host = ProcHost("boot", lambda: self.now, folder / "sys")

    def write(self, name: str, text: str) -> None:
        (self.proc / name).write_text(text)

    def moved(self, **links: tuple[int, int]) -> None:
        """Bytes received and sent by each interface."""
        zeros = "0 0 0 0 0 0 0"
        lines = (f"{name}: {received} {zeros} {sent} {zeros}" for name, (received, sent) in links.items())
        self.write("net/dev", "\n".join(("Inter-|", " face |", *lines)) + "\n")

    def use(self, percent: float) -> None:
        """Let a second pass, of a hundred ticks, of which so many are busy."""
        self.ticks = [self.ticks[0] + int(percent), self.ticks[1] + 100 - int(percent)]
        self.write("stat", f"cpu {self.ticks[0]} 0 0 {self.ticks[1]} 0 0 0 0 0 0\n")

    def pass_seconds(self, *cpu: float) -> None:
        """One reading a second, each with such a use of the CPU."""
        for percent in cpu:
            self.now += 1.0
            self.use(percent)
            self.host.read()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    return Rig(tmp_path)


def test_the_smoothed_use_of_the_cpu_is_the_mean_of_ten_seconds(rig: Rig) -> None:
    rig.pass_seconds(0.0, 100.0)
    assert rig.host.read().cpu_smoothed_percent == 100.0
    rig.pass_seconds(*[0.0] * 9)
    assert rig.host.read().cpu_smoothed_percent == 10.0
    rig.pass_seconds(0.0)
    reading = rig.host.read()
    assert reading.cpu_smoothed_percent == 0.0
    assert reading.cpu_percent == 0.0


def test_every_figure_is_there_on_a_kernel_that_tells_all(rig: Rig) -> None:
    rig.pass_seconds(1.0, 1.0)
    reading = rig.host.read()
    assert [name for name in HOST_FIELDS if getattr(reading, name) is None] == []
    assert reading.absent == ()
    assert reading.load_1m is not None
    assert reading.load_1m_per_core == reading.load_1m / (reading.cpu_count or 1)
    assert (reading.memory_total_bytes, reading.memory_used_bytes) == (100 * 1024, 40 * 1024)
    assert (reading.swap_total_bytes, reading.swap_used_bytes) == (50 * 1024, 30 * 1024)
    assert (reading.disk_read_bytes, reading.disk_written_bytes) == (5120, 10240)
    assert (reading.network_received_bytes, reading.network_sent_bytes) == (7, 8)
    assert reading.pressure_cpu_some_percent == 12.5
    assert (reading.pressure_io_some_percent, reading.pressure_io_full_percent) == (3.25, 1.625)


def test_a_host_without_hardware_of_its_own_has_moved_what_its_interfaces_have(rig: Rig) -> None:
    """As in a container: the bytes of its disks are nobody's."""
    shutil.rmtree(rig.proc.parent / "sys")
    reading = rig.host.read()
    assert (reading.network_received_bytes, reading.network_sent_bytes) == (14, 16)
    assert (reading.disk_read_bytes, reading.disk_written_bytes) == (0, 0)


def test_a_kernel_without_pressure_does_not_offer_it(rig: Rig) -> None:
    for resource in ("cpu", "memory", "io"):
        (rig.proc / "pressure" / resource).unlink()
    reading = rig.host.read()
    missing = {one.field: one.status for one in reading.absent if one.field.startswith("pressure")}
    assert len(missing) == 5
    assert set(missing.values()) == {ReadingStatus.NOT_SUPPORTED}
    assert reading.pressure_cpu_some_percent is None


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("meminfo", {"memory_total_bytes", "memory_available_bytes", "memory_used_bytes", "swap_used_bytes"}),
        ("stat", {"cpu_percent"}),
        ("net/dev", {"network_received_bytes", "network_sent_bytes"}),
    ],
)
def test_what_a_file_that_cannot_be_read_would_have_said_is_absent(
    rig: Rig, name: str, fields: set[str]
) -> None:
    (rig.proc / name).unlink()
    reading = rig.host.read()
    assert fields <= {one.field for one in reading.absent}
    assert [getattr(reading, field) for field in fields] == [None] * len(fields)


def test_what_is_dear_is_read_every_five_seconds(rig: Rig) -> None:
    rig.host.read()
    rig.moved(eth0=(100, 8))
    rig.pass_seconds(*[0.0] * 4)
    assert rig.host.read().network_received_bytes == 7
    rig.pass_seconds(0.0)
    assert rig.host.read().network_received_bytes == 100


def test_a_reading_right_after_another_repeats_the_use_of_the_cpu(rig: Rig) -> None:
    rig.pass_seconds(0.0, 50.0)
    rig.now += 0.05
    rig.use(0.0)
    assert rig.host.read().cpu_percent == 50.0


def test_this_host_is_read_and_the_use_of_its_cpu_is_absent_before_the_second_reading() -> None:
    reading = ProcHost("boot").read()
    absent = {one.field for one in reading.absent}
    assert {"cpu_percent", "cpu_smoothed_percent"} <= absent
    assert (reading.cpu_percent, reading.cpu_smoothed_percent) == (None, None)
    assert all(getattr(reading, name) is not None for name in HOST_FIELDS if name not in absent)
