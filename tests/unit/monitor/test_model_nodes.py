"""Whether a node can be counted on, and the order in which the fleet believes what it is told."""

import pytest

from gpuscale.monitor.model.nodes import (
    Epoch,
    NodeSample,
    NodeState,
    is_gone,
    node_state,
    refuse_epoch,
    refuse_sample,
)

OLD, NEW = Epoch(100.0, "a"), Epoch(200.0, "b")


def sample(seq: int = 5, *, epoch: Epoch = OLD, sampled_at: float = 10.0, period: float = 2.0) -> NodeSample:
    return NodeSample(epoch, seq, sampled_at, period)


@pytest.mark.parametrize(
    ("now", "state"), [(10.0, NodeState.ONLINE), (16.0, NodeState.ONLINE), (16.01, NodeState.STALE)]
)
def test_a_snapshot_older_than_three_periods_makes_a_node_stale(now: float, state: NodeState) -> None:
    assert node_state(sample(), streaming=True, now=now) is state


def test_a_node_without_a_snapshot_is_not_online() -> None:
    assert node_state(None, streaming=True, now=0.0) is NodeState.STALE


@pytest.mark.parametrize("now", [10.0, 1000.0])
def test_a_node_without_a_stream_is_offline_whatever_its_age(now: float) -> None:
    assert node_state(sample(), streaming=False, now=now) is NodeState.OFFLINE


def test_a_node_is_gone_only_without_stream_and_with_a_stale_snapshot() -> None:
    assert not is_gone(sample(), streaming=True, now=1000.0)
    assert not is_gone(sample(), streaming=False, now=11.0)
    assert is_gone(sample(), streaming=False, now=1000.0)
    assert is_gone(None, streaming=False, now=0.0)


def test_a_newer_or_the_same_run_takes_over_and_an_older_does_not() -> None:
    assert refuse_epoch(None, OLD, gone=False) == ""
    assert refuse_epoch(OLD, OLD, gone=False) == ""
    assert refuse_epoch(OLD, NEW, gone=False) == ""
    assert refuse_epoch(NEW, OLD, gone=False) != ""


def test_an_older_run_may_follow_one_that_is_gone() -> None:
    """Else a host whose wall clock was set back would be locked out."""
    assert refuse_epoch(NEW, OLD, gone=True) == ""


def test_of_two_runs_that_started_at_once_exactly_one_wins() -> None:
    first, second = Epoch(100.0, "a"), Epoch(100.0, "b")
    assert (refuse_epoch(first, second, gone=False) == "") != (refuse_epoch(second, first, gone=False) == "")


@pytest.mark.parametrize("seq", [5, 4, -1])
def test_a_snapshot_that_is_not_newer_is_refused(seq: int) -> None:
    assert refuse_sample(sample(5), sample(seq)) == f"its seq {seq} is not above 5"


def test_the_numbers_of_a_new_run_begin_anew() -> None:
    assert refuse_sample(sample(5), sample(1, epoch=NEW)) == ""
    assert refuse_sample(None, sample(0)) == ""


def test_a_period_that_would_never_or_always_be_stale_is_refused() -> None:
    assert refuse_sample(None, sample(period=0.0)) != ""
