"""Which policies are tried, which of them are worth having, and how they are drawn."""

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.commands.backtest import AS_SHIPPED, candidates, choose, pareto
from gpuscale.cli.manifests.documents import ManifestError, parse_policies
from gpuscale.cli.views.backtests import BARS, bars, svg


def report(name: str, late: float, hours: float) -> api.BacktestReport:
    return api.BacktestReport(name=name, violation_percent=late, gpu_hours=hours)


REPORTS = [report("a", 9.0, 1.0), report("b", 2.0, 2.0), report("c", 3.0, 2.5), report("d", 0.5, 4.0)]


def test_only_what_nothing_beats_is_on_the_front() -> None:
    assert [one.name for one in pareto(REPORTS)] == ["a", "b", "d"]


@pytest.mark.parametrize(("late", "name"), [(100.0, "a"), (2.0, "b"), (1.0, "d"), (0.1, "d")])
def test_the_cheapest_that_is_good_enough_is_chosen_or_else_the_best(late: float, name: str) -> None:
    assert choose(REPORTS, late).name == name


def test_candidates_differ() -> None:
    wish = api.PresetWish(watcher="watchers/jobs")
    found = list(candidates(wish, 5.0, 8))
    assert len({one.name for one in found}) == len(found) <= 100
    assert [one.name for one in found[: len(AS_SHIPPED)]] == list(AS_SHIPPED)
    assert all(one.preset.watcher == "watchers/jobs" for one in found)


def test_bars_show_the_most_of_each_part() -> None:
    assert bars([0, 0, 7, 0], 2) == BARS[0] + BARS[-1]
    assert bars([], 5) == ""
    assert bars([0, 0], 5) == BARS[0] * 2


def test_a_picture_has_steps_and_no_markup_of_its_names() -> None:
    timeline = api.BacktestTimeline(seconds=[0, 10], wanted=[1, 2], ready=[0, 1], waiting=[5, 0])
    drawn = svg(api.BacktestResponse(reports=[api.BacktestReport(name="<b>", timeline=timeline)]))
    assert "&lt;b&gt;" in drawn
    assert '<polyline points="0.0,60.0 900.0,60.0 900.0,0.0"' in drawn


def test_policies_are_presets_specs_or_endpoints() -> None:
    text = (
        "kind: Policy\nname: a\npreset: {preset: keda}\n---\n"
        "kind: Policy\nname: b\nspec: {maxReplicas: 3}\n---\n"
        "kind: Endpoint\nname: endpoints/c\nspec: {maxReplicas: 4}\n"
    )
    a, b, c = parse_policies(text, "f")
    assert (a.name, a.preset.preset) == ("a", "keda")
    assert (b.name, b.spec.max_replicas) == ("b", 3)
    assert (c.name, c.spec.max_replicas) == ("c", 4)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name: a\n", "f:1:1: kind must be Policy or Endpoint"),
        ("kind: Node\nname: a\n", "f:1:7: kind must be Policy or Endpoint, not Node"),
        ("kind: Policy\npreset: {preset: keda}\n", "f:1:1: name is missing"),
        ("kind: Policy\nname: a\n", "f:1:1: preset or spec is missing"),
        ("kind: Policy\nname: a\npreset: {presett: keda}\n", "f:3:10: unknown field 'presett'"),
        ("- a\n", "f:1:1: must be a mapping"),
    ],
)
def test_a_file_that_is_none_is_refused_with_its_place(text: str, complaint: str) -> None:
    with pytest.raises(ManifestError, match=complaint):
        parse_policies(text, "f")
