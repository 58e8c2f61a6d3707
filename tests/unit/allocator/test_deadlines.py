"""What is due comes out in order, once, and a deadline that moves later costs no second entry."""

from gpuscale.allocator.domain.ledger import Deadlines


def test_keys_come_out_when_due_and_in_order() -> None:
    deadlines = Deadlines()
    deadlines.add("late", 30.0)
    deadlines.add("early", 10.0)
    assert deadlines.earliest() == 10.0
    assert deadlines.pop(9.9) is None
    assert deadlines.pop(30.0) == "early"
    assert deadlines.pop(30.0) == "late"
    assert deadlines.pop(30.0) is None
    assert deadlines.earliest() is None


def test_renewing_for_ever_keeps_one_entry() -> None:
    deadlines = Deadlines()
    for second in range(10_000):
        deadlines.add("lease", second + 60.0)
    assert len(deadlines) == 1
    assert deadlines.pop(60.0) == "lease"


def test_a_deadline_that_moves_earlier_is_met_and_named_once() -> None:
    deadlines = Deadlines()
    deadlines.add("lease", 60.0)
    deadlines.add("lease", 20.0)
    assert deadlines.pop(20.0) == "lease"
    assert deadlines.pop(60.0) is None
