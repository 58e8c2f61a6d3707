"""Specs that cannot work are refused, and the fields at fault are named."""

from dataclasses import replace
from pathlib import Path

import pytest

from gpuscale.allocator.servicers.servicer import to_ask
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.domain.rules.formula import FormulaRule
from gpuscale.autoscaler.domain.rules.rule import BandRule, Kind, RatioRule, Rule, ThresholdRule
from gpuscale.autoscaler.domain.rules.targets import DrainRule, PanicRule, Period, ScheduleRule, TargetRule
from gpuscale.autoscaler.domain.spec import (
    CapabilitySet,
    EndpointSpec,
    GpuSignal,
    HostSignal,
    Pace,
    RateLimit,
    Signal,
)
from gpuscale.autoscaler.domain.validate import violations
from gpuscale.autoscaler.wire.specs import spec_violations
from gpuscale.common.errors import InvalidArgumentError
from tests.support.autoscaler_values import down, rule, signal, spec, up


def fields(wanted: EndpointSpec) -> list[str]:
    return [violation.field for violation in violations(wanted)]


def kind(one: Kind) -> EndpointSpec:
    return spec(Rule("r", "queue", one))


def test_a_sound_spec() -> None:
    assert violations(spec(up(), down(), low=1, high=1)) == []
    assert violations(spec(low=0, high=0)) == []
    assert violations(kind(DrainRule(5.0, busy_signal="queue", rate_signal="queue"))) == []
    assert violations(spec(Rule("r", "", FormulaRule("max(replicas, 2)")), signals=[])) == []


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (spec(low=3, high=2), "max_replicas"),
        (spec(up(min_replicas=3, max_replicas=2)), "rules[0].max_replicas"),
        (spec(up(step=0)), "rules[0].step.step"),
        (spec(up(signal="no"), signals=[signal()]), "rules[0].signal"),
        (spec(up("a"), up("b", "> 1"), up("a", "> 2")), "rules[2].id"),
        (spec(signals=[signal("s"), signal("s")]), "signals[1].id"),
        (spec(signals=[Signal("s", GpuSignal("power_watts"), counts_work=True)]), "signals[0].counts_work"),
        (spec(signals=[Signal("s", HostSignal("cpu_percent"), counts_work=True)]), "signals[0].counts_work"),
        (spec(up("a", "> 5"), down("b", "< 8")), "rules[1].step.threshold"),
        (kind(BandRule()), "rules[0].band.high"),
        (kind(BandRule(5.0, 4.0)), "rules[0].band.high"),
        (kind(RatioRule(1.0, 2.0)), "rules[0].ratio.down_below"),
        (kind(ThresholdRule(1.0, 2.0)), "rules[0].threshold.down_at"),
        (kind(PanicRule(1.0, stable_window=5.0, panic_window=6.0)), "rules[0].panic.panic_window"),
        (kind(DrainRule(5.0)), "rules[0].drain.service_time"),
        (kind(DrainRule(5.0, busy_signal="queue")), "rules[0].drain.service_time"),
        (kind(DrainRule(5.0, 1.0, busy_signal="no")), "rules[0].drain.busy_signal"),
        (kind(DrainRule(5.0, 1.0, rate_signal="no")), "rules[0].drain.rate_signal"),
        (kind(ScheduleRule((), "Mars/Olympus")), "rules[0].schedule.time_zone"),
        (kind(ScheduleRule((Period(frozenset(), 5, 5, 1),))), "rules[0].schedule.periods[0].end"),
        (kind(FormulaRule("__import__('os')")), "rules[0].formula.expression"),
        (kind(FormulaRule("queue + nothing")), "rules[0].formula.expression"),
        (spec(Rule("r", "", TargetRule(1.0)), signals=[signal()]), "rules[0].signal"),
        (spec(up=Pace(limits=(RateLimit(5.0),))), "up.limits[0].replicas"),
    ],
)
def test_the_field_at_fault_is_named(wanted: EndpointSpec, field: str) -> None:
    assert fields(wanted) == [f"endpoint.spec.{field}"]


@pytest.mark.parametrize(
    "ask",
    [
        allocator_api.Ask(gpu_count=1, gpu_milli=1000, gpu_memory_bytes=1),
        allocator_api.Ask(gpu_count=1, gpus=["nodes/n/gpus/a"], excluded_gpus=["nodes/n/gpus/A"]),
        allocator_api.Ask(gpu_count=1, gpus=["nodes/n/gpus/a", "nodes/n/gpus/A"]),
    ],
)
def test_an_ask_that_contradicts_itself_is_refused_as_the_allocator_refuses_it(
    ask: allocator_api.Ask,
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        to_ask(ask, AllocatorSettings(data_dir=Path("unused")), "endpoint.spec.template.ask.")
    wanted = spec()
    asking = replace(wanted.template, gpu_count=1, ask=ask.SerializeToString())
    assert spec_violations(replace(wanted, template=asking)) == list(refused.value.violations)
    sets = (CapabilitySet("one", {}, template=asking),)
    found = spec_violations(replace(wanted, capability_sets=sets), "spec")
    assert found[0].field.startswith("spec.capability_sets[0].template.ask.")


def test_every_endpoint_has_a_command_template() -> None:
    """The contract does not demand it, so that an update of another field may leave it out."""
    wanted = spec()
    unsaid = replace(wanted, template=replace(wanted.template, template=""))
    assert fields(unsaid) == ["endpoint.spec.template.template"]


@pytest.mark.parametrize(
    ("grow", "shrink", "fight"),
    [
        ("> 5", "< 5", False), ("> 5", "<= 5", False), (">= 5", "< 5", False), (">= 5", "<= 5", True),
        ("> 5", "< 5.1", True), ("> 5", "< 4", False), ("> 5", "> 9", True), ("< 5", "<= 1", True),
        ("< 5", "> 5", False),
    ],
)  # fmt: skip
def test_rules_that_must_fight_are_refused(grow: str, shrink: str, fight: bool) -> None:
    """They fight if one value makes both true, whatever their comparators."""
    one, other = rule("a", grow, 1), rule("b", shrink, -2)
    assert bool(fields(spec(one, other))) is fight
    assert bool(fields(spec(other, one))) is fight


@pytest.mark.parametrize(
    "other", [down("b", "< 8", disabled=True), down("b", "< 8", signal="other"), up("b", "< 8")]
)
def test_rules_that_cannot_fight(other: Rule) -> None:
    assert fields(spec(up("a", "> 5"), other)) == []
