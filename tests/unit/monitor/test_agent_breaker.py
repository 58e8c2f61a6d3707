"""When a GPU that answered too late may be read again."""

from gpuscale.common.runtime.tasks import Backoff
from gpuscale.monitor.agent.device import Breaker, Deadlines


def breaker() -> Breaker:
    return Breaker(Deadlines(soft=2.0, hard=10.0), Backoff(0.5, 30.0))


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
