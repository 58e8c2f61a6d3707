"""The table of two checkouts that were measured in turns."""

from bench._turns import asked_for, rows


def test_lines_that_differ_in_their_numbers_are_a_row_with_medians_and_the_ratio_turn_by_turn() -> None:
    base, here = (
        [f"callers  call  us\n\n   64  get  {us}\n" for us in side]
        for side in ((100, 200, 120), (110, 100, 90))
    )
    [head, row] = rows(base, here)
    assert head == "callers  call  us"
    assert row.split() == ["64", "get", "_", "120", "100", "0.83", "(0.75)"]


def test_what_one_side_alone_prints_and_what_never_differs_is_said() -> None:
    table = rows(["filled 95.4 %\nonly 1 here"], ["filled 95.4 %\nof 1,000 GPUs 3"])
    assert table == [
        "filled 95.4 %",
        "not in every run, base: only _ here",
        "not in every run, here: of _ GPUs _",
    ]


def test_the_other_arguments_are_left_to_the_measurement() -> None:
    base, turns, rest = asked_for(["--base", "/there", "--turns", "3", "reserve", "--rounds", "1"])
    assert (str(base), turns, rest) == ("/there", 3, ["reserve", "--rounds", "1"])
