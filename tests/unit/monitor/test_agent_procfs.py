"""What the files of /proc say, as kernels write them."""

import pytest

from gpuscale.monitor.agent.host import (
    CpuTimes,
    Memory,
    Moved,
    busy_percent,
    cpu_times,
    disks,
    memory,
    network,
    pressure,
)

STAT = "cpu  100 5 20 800 60 3 2 10 7 1\ncpu0 100 5 20 800 60 3 2 10 7 1\nintr 5\n"
MEMINFO = """\
MemTotal:       16000 kB
MemFree:         1000 kB
MemAvailable:   12000 kB
SwapTotal:       4000 kB
SwapFree:        3000 kB
Dirty:              8 kB
"""
DISKSTATS = """\
   8       0 sda 10 0 200 3 20 0 400 5 0 6 7
   8       1 sda1 10 0 200 3 20 0 400 5 0 6 7
 259       0 nvme0n1 1 0 2 0 3 0 4 0 0 0 0 0 0 0 0 0 0
"""
NET = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 1000 1 0 0 0 0 0 0 1000 1 0 0 0 0 0 0
  eth0: 7 1 0 0 0 0 0 0 8 1 0 0 0 0 0 0
eth1:70 1 0 0 0 0 0 0 80 1 0 0 0 0 0 0
"""


def test_waiting_for_disks_is_idle_and_guests_are_counted_once() -> None:
    assert cpu_times(STAT) == CpuTimes(busy=140, total=1000)


@pytest.mark.parametrize(
    ("after", "percent"),
    [
        (CpuTimes(150, 1100), 10.0),
        (CpuTimes(100, 1000), 0.0),  # no tick has passed
        (CpuTimes(90, 1100), 0.0),  # a counter went back
        (CpuTimes(300, 1100), 100.0),
    ],
)
def test_use_of_the_cpu_is_the_busy_share_of_the_ticks(after: CpuTimes, percent: float) -> None:
    assert busy_percent(CpuTimes(140, 1000) if after.busy != 100 else after, after) == percent


def test_memory_is_what_the_kernel_says_is_available_and_not_what_is_free() -> None:
    assert memory(MEMINFO) == Memory(16000 * 1024, 12000 * 1024, 4000 * 1024, 3000 * 1024)


def test_a_disk_is_counted_once_and_not_by_its_partitions_too() -> None:
    assert disks(DISKSTATS, {"sda", "nvme0n1"}) == Moved(202 * 512, 404 * 512)
    assert disks(DISKSTATS, set()) == Moved(0, 0)


def test_what_crosses_a_bridge_is_counted_once() -> None:
    assert network(NET, {"eth0", "ib0"}) == Moved(7, 8)


def test_where_no_hardware_is_seen_the_loopback_alone_is_left_out() -> None:
    assert network(NET, {"ib0"}) == Moved(77, 88)


def test_pressure_is_the_ten_second_average() -> None:
    text = "some avg10=3.25 avg60=1.00 avg300=1.00 total=7\nfull avg10=1.50 avg60=0.00 avg300=0.00 total=1\n"
    assert (pressure(text, "some"), pressure(text, "full")) == (3.25, 1.5)


@pytest.mark.parametrize(
    "parse", [cpu_times, memory, lambda text: pressure(text, "some")], ids=["stat", "meminfo", "pressure"]
)
@pytest.mark.parametrize("text", ["", "nonsense\n", "cpu 1 2\nMemTotal: 5 kB\nfull avg10=1\n"])
def test_a_text_that_is_none_of_the_kernel_is_an_error_and_never_a_zero(parse: object, text: str) -> None:
    assert callable(parse)
    with pytest.raises(ValueError, match="no "):
        parse(text)
