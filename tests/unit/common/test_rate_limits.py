"""A token bucket for each caller: bursts pass, floods do not, and memory is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuscale.common.rpc import calls
from gpuscale.common.rpc.calls import BURST_SECONDS, RateLimits


def test_a_burst_passes_and_then_calls_come_at_the_rate() -> None:
    limits = RateLimits(10)
    passed = sum(limits.take("a", 0.0) == 0 for _ in range(100))
    assert passed == 10 * BURST_SECONDS
    wait = limits.take("a", 0.0)
    assert 0 < wait <= 0.1
    assert limits.take("a", wait) == 0


def test_callers_do_not_share() -> None:
    limits = RateLimits(0.5)
    assert limits.take("a", 0.0) == 0
    assert limits.take("a", 0.0) == 2.0
    assert limits.take("b", 0.0) == 0


@given(st.lists(st.floats(0, 3), min_size=1, max_size=60))
def test_no_caller_gets_more_than_the_rate_and_one_burst(pauses: list[float]) -> None:
    limits, now, passed = RateLimits(2), 0.0, 0
    for pause in pauses:
        now += pause
        passed += limits.take("a", now) == 0
    assert passed <= 2 * (now + BURST_SECONDS)


def test_callers_beyond_the_limit_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_CALLERS", 2)
    limits = RateLimits(0.5)
    for caller in ("a", "b", "a", "c"):
        limits.take(caller, 0.0)
    assert limits.take("a", 0.0) > 0  # b was silent longest
    assert limits.take("b", 0.0) == 0
