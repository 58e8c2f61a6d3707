"""Specs that cannot work are refused, and the fields at fault are named."""

from dataclasses import replace

import pytest

from gpuscale.autoscaler.model import EndpointSpec, Rule
from gpuscale.autoscaler.validate import violations
from tests.support.autoscaler_values import down, rule, signal, spec, up


def fields(wanted: EndpointSpec) -> list[str]:
    return [violation.field for violation in violations(wanted)]


def test_a_sound_spec() -> None:
    assert violations(spec(up(), down(), low=1, high=1)) == []
    assert violations(spec(low=0, high=0)) == []


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (spec(low=3, high=2), "endpoint.spec.max_replicas"),
        (spec(up(min_replicas=3, max_replicas=2)), "endpoint.spec.rules[0].max_replicas"),
        (spec(up(step=0)), "endpoint.spec.rules[0].step.step"),
        (spec(up(signal="no"), signals=[signal()]), "endpoint.spec.rules[0].signal"),
        (spec(up("a"), up("b", "> 1"), up("a", "> 2")), "endpoint.spec.rules[2].id"),
        (spec(signals=[signal("s"), signal("s")]), "endpoint.spec.signals[1].id"),
        (spec(up("a", "> 5"), down("b", "< 8")), "endpoint.spec.rules[1].step.threshold"),
    ],
)
def test_the_field_at_fault_is_named(wanted: EndpointSpec, field: str) -> None:
    assert fields(wanted) == [field]


def test_every_endpoint_has_a_command_template() -> None:
    """The contract does not demand it, so that an update of another field may leave it out."""
    wanted = spec()
    unsaid = replace(wanted, template=replace(wanted.template, template=""))
    assert fields(unsaid) == ["endpoint.spec.template.template"]


@pytest.mark.parametrize(
    ("grow", "shrink", "fight"),
    [
        ("> 5", "< 5", False),
        ("> 5", "<= 5", False),
        (">= 5", "< 5", False),
        (">= 5", "<= 5", True),
        ("> 5", "< 5.1", True),
        ("> 5", "< 4", False),
        ("> 5", "> 9", True),
        ("< 5", "<= 1", True),
        ("< 5", "> 5", False),
    ],
)
def test_rules_that_must_fight_are_refused(grow: str, shrink: str, fight: bool) -> None:
    """They fight if one value makes both true, whatever their comparators."""
    one, other = rule("a", grow, 1), rule("b", shrink, -2)
    assert bool(fields(spec(one, other))) is fight
    assert bool(fields(spec(other, one))) is fight


@pytest.mark.parametrize(
    "other",
    [
        down("b", "< 8", disabled=True),
        down("b", "< 8", signal="other"),
        up("b", "< 8"),
    ],
)
def test_rules_that_cannot_fight(other: Rule) -> None:
    assert fields(spec(up("a", "> 5"), other)) == []
