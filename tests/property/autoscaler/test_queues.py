"""When queues are read: always later, and never put off for longer than an interval too many."""

from hypothesis import example, given
from hypothesis import strategies as st

from gpuscale.autoscaler.domain.queues import next_sweep


@given(now=st.floats(0, 1e9), interval=st.floats(0.001, 3600))
@example(now=9811624.5, interval=2.7)  # whose next multiple, rounded, is this very moment
def test_the_next_sweep_is_later_and_no_later_than_two_intervals(now: float, interval: float) -> None:
    after = next_sweep(now, interval)
    assert now < after <= now + 2 * interval
