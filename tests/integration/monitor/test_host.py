"""The host's figures: smoothed, per core, and absent where the kernel does not tell."""

from pathlib import Path

import psutil
import pytest

from gpuscale.monitor.agent.host import PsutilHost
from gpuscale.monitor.agent.model import HOST_FIELDS, ReadingStatus


class Rig:
    """A host with a clock, and a use of the CPU, that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, proc: Path) -> None:
        self.now = 100.0
        self.cpu = 0.0
        monkeypatch.setattr(psutil, "cpu_percent", lambda: self.cpu)
        self.host = PsutilHost("boot", lambda: self.now, proc)

    def pass_seconds(self, *cpu: float) -> None:
        """One reading a second, each with such a use of the CPU."""
        for self.cpu in cpu:
            self.now += 1.0
            self.host.read()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rig:
    (tmp_path / "pressure").mkdir()
    for resource, some in (("cpu", 12.5), ("memory", 0.0), ("io", 3.25)):
        (tmp_path / "pressure" / resource).write_text(
            f"some avg10={some} avg60=1.00 avg300=1.00 total=7\nfull avg10={some / 2} avg60=0.00 avg300=0.00 total=1\n"
        )
    return Rig(monkeypatch, tmp_path)


def test_the_smoothed_use_of_the_cpu_is_the_mean_of_ten_seconds(rig: Rig) -> None:
    rig.pass_seconds(0.0, 100.0)
    assert rig.host.read().cpu_smoothed_percent == 100.0
    rig.pass_seconds(*[0.0] * 9)
    assert rig.host.read().cpu_smoothed_percent == 10.0
    rig.pass_seconds(0.0)
    reading = rig.host.read()
    assert reading.cpu_smoothed_percent == 0.0
    assert reading.cpu_percent == 0.0


def test_before_the_second_reading_the_use_of_the_cpu_is_absent(rig: Rig) -> None:
    reading = rig.host.read()
    assert (reading.cpu_percent, reading.cpu_smoothed_percent) == (None, None)
    assert {one.field for one in reading.absent} == {"cpu_percent", "cpu_smoothed_percent"}


def test_every_figure_is_there_on_a_kernel_that_tells_all(rig: Rig) -> None:
    rig.pass_seconds(1.0, 1.0)
    reading = rig.host.read()
    assert [name for name in HOST_FIELDS if getattr(reading, name) is None] == []
    assert reading.absent == ()
    assert reading.load_1m is not None
    assert reading.load_1m_per_core == reading.load_1m / (reading.cpu_count or 1)
    assert reading.pressure_cpu_some_percent == 12.5
    assert (reading.pressure_io_some_percent, reading.pressure_io_full_percent) == (3.25, 1.625)


def test_a_kernel_without_pressure_does_not_offer_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reading = Rig(monkeypatch, tmp_path).host.read()
    missing = {one.field: one.status for one in reading.absent if one.field.startswith("pressure")}
    assert len(missing) == 5
    assert set(missing.values()) == {ReadingStatus.NOT_SUPPORTED}
    assert reading.pressure_cpu_some_percent is None


def test_counters_leave_the_loopback_out(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = psutil.net_io_counters(pernic=True)
    some = next(iter(counters.values()))
    lo, eth = some._replace(bytes_recv=1000, bytes_sent=1000), some._replace(bytes_recv=7, bytes_sent=8)
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: {"lo": lo, "eth0": eth, "eth1": eth})
    reading = rig.host.read()
    assert (reading.network_received_bytes, reading.network_sent_bytes) == (14, 16)


def test_what_is_dear_is_read_every_five_seconds(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.host.read()
    calls: list[float] = []
    swap = psutil.swap_memory()

    def counted() -> object:
        calls.append(rig.now)
        return swap

    monkeypatch.setattr(psutil, "swap_memory", counted)
    rig.pass_seconds(*[0.0] * 11)
    assert calls == [105.0, 110.0]
