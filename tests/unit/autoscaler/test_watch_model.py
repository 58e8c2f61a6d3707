"""Readings and their merging: unknown stays unknown, and a failure keeps nothing but the age of the last success."""

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.queues import (
    PENDING,
    Declared,
    QueueFailure,
    QueueReading,
    QueueState,
    failed,
    next_sweep,
    of_declared,
    of_totals,
)
from gpuscale.autoscaler.servicers.watcher_servicer import to_status


@pytest.mark.parametrize(
    ("ready", "unacked", "total"),
    [(3, 4, 7), (0, 0, 0), (None, 4, None), (3, None, None), (None, None, None)],
)
def test_the_total_is_known_only_if_both_counts_are(
    ready: int | None, unacked: int | None, total: int | None
) -> None:
    assert QueueReading(QueueState.OK, ready, unacked).total == total


def test_a_failure_drops_the_counts_and_keeps_when_they_were_read() -> None:
    before = QueueReading(QueueState.OK, 3, 4, 5, observed_at=100.0)
    after = failed(before, QueueFailure(QueueState.TIMEOUT, "frozen"))
    assert after == QueueReading(QueueState.TIMEOUT, observed_at=100.0, message="frozen")
    assert failed(PENDING, QueueFailure(QueueState.ERROR, "x")).observed_at is None


def test_a_passive_declare_leaves_unacked_unknown_and_says_why() -> None:
    assert of_declared(Declared(2, 1), 9.0, "no management API") == QueueReading(
        QueueState.OK, ready=2, unacked=None, consumers=1, observed_at=9.0, message="no management API"
    )


def test_totals_come_with_the_consumers_or_with_why_they_are_unknown() -> None:
    assert of_totals(2, 3, 9.0, 0) == QueueReading(QueueState.OK, 2, 3, 0, 9.0)
    assert of_totals(2, 3, 9.0, "no AMQP") == QueueReading(QueueState.OK, 2, 3, None, 9.0, "no AMQP")


def test_queues_of_one_interval_are_due_together_whenever_they_were_read_last() -> None:
    assert next_sweep(10.1, 1.0) == next_sweep(10.9, 1.0) == next_sweep(10.0, 1.0) == 11.0


def test_on_the_wire_unknown_counts_are_unset_and_zero_is_zero() -> None:
    unknown = to_status(QueueReading(QueueState.OK, ready=0, observed_at=5.0), now=7.5)
    assert unknown.HasField("ready_count")
    assert unknown.ready_count == 0
    assert not unknown.HasField("unacked_count")
    assert not unknown.HasField("consumer_count")
    assert unknown.age.ToMilliseconds() == 2500
    assert not to_status(PENDING, now=7.5).HasField("age")


@pytest.mark.parametrize("state", QueueState)
def test_every_state_has_its_name_on_the_wire(state: QueueState) -> None:
    name = api.QueueWatcherStatus.State.Name(to_status(QueueReading(state), now=0.0).state)
    assert name == f"STATE_{state.name}"
