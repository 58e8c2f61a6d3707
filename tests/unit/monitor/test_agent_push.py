"""A fleet that refuses snapshots hears of the agent less and less often, and at once again when one is taken."""

from gpuscale.monitor.agent.push import LONGEST_REFUSED_SECONDS, RefusalBackoff


def test_each_further_refusal_doubles_the_wait_up_to_the_longest() -> None:
    backoff, now, waits = RefusalBackoff(1.0), 0.0, list[float]()
    for _ in range(40):
        backoff.answered(now, refused=True)
        began = now
        while backoff.waits(now):
            now += 1.0
        waits.append(now - began)
    assert waits == [0.0, 2.0, 4.0, 8.0, 16.0, *[LONGEST_REFUSED_SECONDS] * 35]


def test_one_that_is_taken_begins_anew() -> None:
    backoff = RefusalBackoff(1.0)
    for _ in range(5):
        backoff.answered(0.0, refused=True)
    backoff.answered(100.0, refused=False)
    backoff.answered(101.0, refused=True)
    assert not backoff.waits(101.0)
