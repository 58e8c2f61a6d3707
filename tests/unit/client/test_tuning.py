"""Which policies are tried, and which is taken by a goal, where windows differ."""

import pytest

from gpuscale.autoscaler.domain.presets import PARAMETERS
from gpuscale.client.tuning import AS_SHIPPED, Trial, TuningGoal, Window, candidates, choose, parse_goal

ONE_PERCENT = TuningGoal(1.0)


def trial(name: str, late: list[int], hours: float) -> Trial:
    """A policy that has so many late of the hundred requests of each window, and as many GPU hours in each."""
    return Trial(name, [Window(100, one, hours) for one in late])


STEADY = trial("steady", [1] * 10, 2.0)
LUCKY = trial("lucky", [0] * 9 + [9], 1.0)
LATE = trial("late", [9] * 10, 0.5)
DEAR = trial("dear", [2] * 10, 3.0)
ALL = [LATE, LUCKY, DEAR, STEADY]


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("late<=1%", TuningGoal(1.0)),
        ("late <= 0.5", TuningGoal(0.5)),
        ("late:2m", TuningGoal(price=120.0)),
        ("late:0.5", TuningGoal(price=0.5)),
    ],
)
def test_a_goal_is_read_and_written(text: str, goal: TuningGoal) -> None:
    assert parse_goal(text) == goal == parse_goal(str(goal))


@pytest.mark.parametrize("text", ["", "late", "late<1%", "late<=101%", "late<=x", "late:", "late:-1s", "1%"])
def test_what_is_no_goal_is_refused_with_both_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"late<=1% .* late:30s"):
        parse_goal(text)


def test_only_what_nothing_beats_is_on_the_front() -> None:
    assert [one.name for one in choose(ALL, TuningGoal(100.0)).front] == ["late", "lucky"]


def test_one_lucky_window_does_not_choose() -> None:
    """Both are 1 % late or less, and one is so for sure: the other has all that is late in one window."""
    choice = choose(ALL, ONE_PERCENT)
    assert (round(LUCKY.late, 9), choice.chosen, choice.met) == (0.9, STEADY, True)
    assert LUCKY.most_late == pytest.approx(0.9 + 1.383 * 0.9)
    assert choice.front == [LATE, LUCKY, STEADY]
    assert trial("hopeless", [90] + [100] * 9, 1.0).most_late == 100.0


def test_what_is_chosen_is_judged_where_nobody_looked() -> None:
    """Without the tenth window the lucky one is the best; on it it is not."""
    choice = choose(ALL, ONE_PERCENT)
    assert list(choice.judged.windows) == [*STEADY.windows[:9], LUCKY.windows[9]]
    assert choice.judged.late == pytest.approx(1.8)
    assert "1.80% late" in choice.why(ONE_PERCENT)


def test_where_no_policy_meets_the_goal_the_least_late_is_taken() -> None:
    choice = choose([LATE, DEAR], ONE_PERCENT)
    assert (choice.chosen, choice.met) == (DEAR, False)
    assert "none meets late<=1%: 2.00% late at most" in choice.why(ONE_PERCENT)


@pytest.mark.parametrize(("price", "chosen"), [(0.0, LATE), (3600.0 / 10, LUCKY), (36_000.0, LUCKY)])
def test_a_price_weighs_late_requests_against_gpu_time(price: float, chosen: Trial) -> None:
    assert choose(ALL, TuningGoal(price=price)).chosen is chosen


def test_a_change_has_to_save_for_sure() -> None:
    hours = [1.0, 3.0] * 5
    now = Trial("now", [Window(100, 0, one) for one in hours])

    def saving(*shares: float) -> Trial:
        return Trial(
            "new", [Window(100, 0, one * share) for one, share in zip(hours, shares * 5, strict=True)]
        )

    assert saving(0.9, 0.9).beats(now, ONE_PERCENT)
    assert not saving(0.96, 0.96).beats(now, ONE_PERCENT)  # less than is worth a change
    assert not saving(1.9, 0.4).beats(now, ONE_PERCENT)  # far less in all, in half of the windows
    assert not trial("cheap", [2] * 10, 0.1).beats(now, ONE_PERCENT)
    assert now.beats(trial("late", [2] * 10, 0.1), ONE_PERCENT)
    assert not trial("no better", [2] * 10, 0.1).beats(trial("late", [2] * 10, 9.0), ONE_PERCENT)
    assert STEADY.beats(DEAR, TuningGoal(price=60.0))
    assert not DEAR.beats(STEADY, TuningGoal(price=60.0))


def test_candidates_differ_and_name_parameters_that_there_are() -> None:
    found = list(candidates(5.0, 8))
    assert len({name for name, _, _ in found}) == len(found) <= 100
    assert [name for name, _, _ in found[: len(AS_SHIPPED)]] == list(AS_SHIPPED)
    assert all(stated.keys() <= PARAMETERS[preset].keys() for _, preset, stated in found)


def test_there_has_to_be_something_to_choose_from() -> None:
    with pytest.raises(ValueError, match="nothing to choose"):
        choose([], ONE_PERCENT)
