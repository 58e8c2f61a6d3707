"""What is typed of backtests."""

from typing import Any

import pytest

from gpuscale.cli.commands.backtest import Workload, read_goal
from gpuscale.cli.manifests import ManifestError, parse_policies
from gpuscale.client.tuning import TuningGoal

NOTHING: Any = {
    "trace": "", "history": "", "service_time": None, "slots": 1, "max_gpus": None,
    "cold_start": (30.0, 30.0), "kills": False, "seed": 0,
}  # fmt: skip


def test_a_goal_is_a_wait_or_what_a_policy_is_chosen_by() -> None:
    workload = Workload(goals=tuple(map(read_goal, ("30s", "late<=2%", "1m", "late:10s"))), **NOTHING)
    assert (workload.wait, workload.chosen_by) == (60.0, TuningGoal(price=10.0))
    assert (Workload(goals=(), **NOTHING).wait, Workload(goals=(), **NOTHING).chosen_by) == (30.0, None)
    with pytest.raises(ValueError, match="write it like late<=1%"):
        read_goal("late<1%")
    with pytest.raises(ValueError, match="not a duration"):
        read_goal("early")


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
