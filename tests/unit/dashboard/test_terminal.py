"""`gpuscalectl top`: what is drawn."""

from gpuscale.dashboard.terminal import load_lines


def test_the_load_is_drawn_between_0_and_100_percent_whatever_it_has_been() -> None:
    assert load_lines([0, 6.25, 50, 56.25, 100, 140]) == ("   ▁██", " ▁████")
    assert load_lines([40, 41]) == ("  ", "▆▇"), "a small change does not fill the screen"
