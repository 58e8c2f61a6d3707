"""How a GPU is shown while its driver is slow, and when one that answered too late may be read again."""

import pytest

from gpuscale.common.runtime.tasks import Backoff
from gpuscale.monitor.agent.device import Breaker, ReadDeadlines, view
from gpuscale.monitor.model.readings import GPU_FIELDS, GpuState, ReadingStatus, Timed
from tests.support.monitor_values import identity, sample

DEADLINES = ReadDeadlines(soft=2.0, hard=10.0)
READ = Timed(sample(), ordered_at=100.0, read_at=100.1)


def test_a_gpu_that_answered_in_time_is_shown_as_it_answered() -> None:
    shown = view(identity(), READ, ordered_at=None, now=100.5, deadlines=DEADLINES)
    assert (shown.state, shown.reading, shown.read_at) == (GpuState.OK, READ.value.reading, 100.1)


@pytest.mark.parametrize(
    ("waiting", "state"),
    [
        (1.99, GpuState.OK),
        (2.0, GpuState.SLOW),
        (9.99, GpuState.SLOW),
        (10.0, GpuState.HUNG),
        (1e6, GpuState.HUNG),
    ],
)
def test_a_call_that_is_out_makes_the_gpu_slow_and_then_hung(waiting: float, state: GpuState) -> None:
    shown = view(identity(), READ, ordered_at=101.0, now=101.0 + waiting, deadlines=DEADLINES)
    assert shown.state is state


def test_a_hung_gpu_has_no_readings_and_says_why() -> None:
    shown = view(identity(), READ, ordered_at=101.0, now=121.0, deadlines=DEADLINES)
    assert shown.reading.utilization_percent is None
    assert {absent.field for absent in shown.reading.absent} == set(GPU_FIELDS)
    assert {absent.status for absent in shown.reading.absent} == {ReadingStatus.TIMEOUT}
    assert shown.reading.absent[0].detail == "no answer for 20 s"


def test_a_gpu_that_took_longer_than_the_soft_deadline_is_slow_until_its_next_reading() -> None:
    late = Timed(sample(), ordered_at=100.0, read_at=103.0)
    assert view(identity(), late, ordered_at=None, now=103.5, deadlines=DEADLINES).state is GpuState.SLOW
    assert view(identity(), READ, ordered_at=None, now=103.5, deadlines=DEADLINES).state is GpuState.OK


def test_a_gpu_that_never_answered_is_not_shown_as_healthy() -> None:
    shown = view(identity(), None, ordered_at=100.0, now=100.1, deadlines=DEADLINES)
    assert shown.state is GpuState.SLOW
    assert shown.read_at is None
    assert len(shown.reading.absent) == len(GPU_FIELDS)


@pytest.mark.parametrize("state", [GpuState.LOST, GpuState.RESET_REQUIRED])
def test_a_gpu_that_is_gone_does_not_become_merely_slow(state: GpuState) -> None:
    lost = Timed(sample(state=state), ordered_at=100.0, read_at=100.1)
    assert view(identity(), lost, ordered_at=101.0, now=105.0, deadlines=DEADLINES).state is state


def breaker() -> Breaker:
    return Breaker(ReadDeadlines(soft=2.0, hard=10.0), Backoff(0.5, 30.0))


def test_a_slow_answer_leaves_it_closed() -> None:
    one = breaker()
    one.answered(9.9, 100.0, probe=False)
    assert not one.open


def test_an_answer_beyond_the_hard_deadline_opens_it_and_a_prompt_probe_closes_it() -> None:
    one = breaker()
    one.answered(10.0, 100.0, probe=False)
    assert one.open
    assert 100.0 <= one.retry_at <= 100.5
    one.answered(1.9, 101.0, probe=True)
    assert not one.open


def test_probes_that_are_late_are_made_ever_more_seldom() -> None:
    one = breaker()
    one.answered(10.0, 0.0, probe=False)
    waits: list[float] = []
    for _ in range(200):
        one.answered(2.0, 0.0, probe=True)
        assert one.open
        waits.append(one.retry_at)
    assert max(waits) <= 30.0
    assert max(waits[-100:]) > 10.0, "the pauses have grown"
    assert min(waits[-100:]) < 10.0, "and are spread over the whole of it"
