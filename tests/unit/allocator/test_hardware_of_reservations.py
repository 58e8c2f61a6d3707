"""What becomes of the clock and the memory of a GPU while it is held."""

from gpuscale.allocator.domain.accounting import DAY, Account, Hardware
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import HardwareLook
from gpuscale.allocator.domain.usage import GpuUsage
from tests.support.allocator_values import NOW, WALL, order, reserved


def test_clocks_are_by_time_throttling_by_reason_and_errors_are_those_since_the_grant() -> None:
    ledger = Ledger()
    one = ledger.confirm(ledger.grant(order(), (reserved("GPU-a"),), now=NOW, wall=WALL))
    account = Account(one, 0)
    for at, look in (
        (10_000, HardwareLook(1000.0, ("sw_power_cap",), 5, 1)),
        (30_000, HardwareLook(1900.0, ("sw_power_cap", "sw_thermal_slowdown"), 8, 1)),
        (40_000, HardwareLook(None, (), 2, None)),  # the driver was loaded anew
        (50_000, HardwareLook(700.0, (), 4, 7)),
    ):
        account.look(at, at, {"GPU-a": GpuUsage(hardware=look)})
    [entry] = account.entries
    found = entry.gpus["GPU-a"].hardware
    assert found.mean_clock == (10 * 1000 + 20 * 1900 + 10 * 700) / 40
    assert found.lowest_clock == 700.0
    assert found.throttled == {"sw_power_cap": 30_000, "sw_thermal_slowdown": 20_000}
    assert (found.corrected, found.uncorrected) == (3 + 2 + 2, 0)


def test_energy_is_that_of_all_of_its_time_however_old_readings_are_at_a_look() -> None:
    """They come each 10 s, so that two looks may see the same, and the counter has not moved; the last is of before the end."""
    ledger = Ledger()
    one = ledger.confirm(ledger.grant(order(), (reserved("GPU-a"),), now=NOW, wall=WALL))
    account = Account(one, 1_000)
    for at, read_at in ((4, 0.5), (6, 5.0), (14, 5.0), (24, 15.0)):
        seen = GpuUsage(power_watts=300.0, energy_joules=300 * read_at, read_at=read_at)
        account.look(at * 1000, DAY + at * 1000, {"GPU-a": seen})
        assert account.entries[-1].gpus["GPU-a"].energy == 300.0 * (at - 1)
    account.count(26_000, DAY + 26_000, last=True)
    assert account.entries[-1].gpus["GPU-a"].energy == 300.0 * (26 - 1)


def test_parts_add_up_and_what_one_does_not_know_the_other_tells() -> None:
    early = Hardware(1000.0 * 5, 5, 900.0, {"hw_slowdown": 5}, None, 2)
    late = Hardware(2000.0 * 15, 15, 1500.0, {"hw_slowdown": 1, "board_limit": 7}, 4, 1)
    both = early.plus(late)
    assert (both.mean_clock, both.lowest_clock) == (1750.0, 900.0)
    assert both.throttled == {"hw_slowdown": 6, "board_limit": 7}
    assert (both.corrected, both.uncorrected) == (4, 3)
    assert Hardware().plus(Hardware()) == Hardware()
