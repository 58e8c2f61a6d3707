"""Values are what frozen dataclasses are, but for the price of making one."""

from dataclasses import replace

from gpuscale.allocator.domain.model import Score, ScorePart, Weights
from tests.support.allocator_values import ask, reserved


def test_values_are_compared_and_found_by_what_they_hold() -> None:
    assert ask(2) == ask(2) != ask(3)
    assert {ask(2): "two"}[ask(2)] == "two"
    assert len({Weights(), Weights(0.6, 0.4), Weights(1.0, 0.0)}) == 2


def test_a_changed_copy_leaves_the_value_as_it_was() -> None:
    before = reserved("GPU-a")
    assert replace(before, lost=True).lost
    assert not before.lost


def test_values_have_their_fields_and_no_others() -> None:
    assert not hasattr(Score(1.0, (ScorePart("memory", None, 0.6),)), "__dict__")
