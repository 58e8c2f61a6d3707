"""Presets: known by the words of their originals, each parameter with an effect, and every word that nobody knows refused."""

import math
from typing import Any

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.presets import PARAMETERS, PRESETS, Wish, about, expand, named
from gpuscale.autoscaler.domain.spec import ReplicaTemplate
from gpuscale.autoscaler.domain.validate import violations
from gpuscale.autoscaler.servicers.preset_servicer import render
from gpuscale.autoscaler.wire.specs import spec_from_wire, spec_to_wire
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.rpc import validation

WISH = Wish("jobs", 1, 8, ReplicaTemplate("worker", gpu_count=1), slots=4, goal=10.0, service_time=3.0)
WIRE = {"watcher": "watchers/jobs", "template": api.ReplicaTemplate(template="worker", gpu_count=1)}
IRRELEVANT = {
    "distributedfunsearch": ("evaluator", "cpu_", "load"),
    "distributedfunsearch_evaluators": ("sampler", "gpu", "system_memory"),
}
"""The one configuration class of DistributedFunSearch has settings for both roles; a preset has one of them."""


def wished(preset: str, **fields: Any) -> api.PresetWish:
    return api.PresetWish(**({"preset": preset} | WIRE | fields))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_sound_and_survives_the_wire(preset: str) -> None:
    for wish in (
        WISH,
        Wish("jobs", 0, 8, ReplicaTemplate("worker")),
        Wish("", 0, 8, WISH.template, metric="tasks", service_time=1.0),
    ):
        spec = expand(preset, wish, "parameters")
        assert violations(spec) == []
        wire = spec_to_wire(spec)
        assert validation.violations(wire) == []
        assert spec_from_wire(wire) == spec
    assert about(preset)


@pytest.mark.parametrize(
    ("preset", "parameter"), [(preset, one) for preset, known in PARAMETERS.items() for one in known]
)
def test_every_parameter_has_an_effect(preset: str, parameter: str) -> None:
    value = {"enabled": 0.0, "sum_steps": 1.0, "exclude_unacknowledged": 1.0}.get(parameter, 0.25)
    if parameter.startswith(("min_s", "max_s", "min_e", "max_e", "primary", "step", "max_scale")):
        value = 3.0
    changed = expand(preset, Wish("jobs", 1, 8, WISH.template, parameters={parameter: value}), "p")
    same = changed == expand(preset, Wish("jobs", 1, 8, WISH.template), "p")
    assert same == any(word in parameter for word in IRRELEVANT.get(preset, ()))


def test_who_states_a_utilization_gets_all_of_its_room() -> None:
    stated = Wish("jobs", 1, 8, WISH.template, parameters={"utilization": 0.5})
    kinds = [expand("gpuscale", wish, "p").rules[0].kind for wish in (WISH, stated)]
    assert [getattr(kind, "headroom", 0.0) for kind in kinds] == [1.5, None]


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("allocate=capability; scaling=vanilla", "opengris_vanilla"),
        ("allocate=even_load;scaling=no", "opengris_no"),
        ("scaling=fixed_elastic; allocate=even_load;", "opengris_fixed_elastic"),
        ("scaling=capability", "opengris_capability"),
        ("keda", "keda"),
    ],
)
def test_the_policy_texts_of_opengris_are_read(text: str, preset: str) -> None:
    assert named(text, "wish.preset").name == preset


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("kedaa", "did you mean keda"),
        ("allocate=capability", "must name scaling"),
        ("allocate=fair; scaling=no", "even_load"),
        ("allocate=capability; scaling=vanila", "did you mean vanilla"),
        ("allocate=capability; scaling=no; scaling=no", "once each"),
        ("alocate=capability; scaling=no", "did you mean allocate"),
        ("scaling=no; quick", "once each"),
        ("", "must be a preset"),
    ],
)
def test_a_word_that_nobody_knows_is_refused_with_its_field(text: str, hint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=hint) as caught:
        named(text, "wish.preset")
    assert [one.field for one in caught.value.violations] == ["wish.preset"]


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        (wished("keda", parameters={"values": 3.0}), "wish.parameters[values]"),
        (wished("keda", parameters={"value": -3.0}), "wish.parameters[value]"),
        (wished("keda", parameters={"value": 0.0}), "wish.parameters"),
        (wished("keda", watcher=""), "wish.watcher"),
        (wished("keda", metric="tasks"), "wish.metric"),
        (wished("keda", template=api.ReplicaTemplate()), "wish.template.template"),
        (wished("keda", min_replicas=5, max_replicas=4), "wish.max_replicas"),
        (wished("gpuscale", watcher="", metric="tasks"), "wish.service_time"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_with_its_field(wish: api.PresetWish, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        render(wish, "wish", Wish("", 1, 16, ReplicaTemplate("")))
    assert [one.field for one in caught.value.violations] == [field]


@pytest.mark.parametrize("value", [5e-324, 1e9, 1.1e9, 1e12, 1e308, math.inf, math.nan])
def test_no_parameter_is_too_large_for_a_spec(value: float) -> None:
    """Whatever is stated is refused with its field, or makes a message; it is no internal error."""
    for preset, parameters in PARAMETERS.items():
        for parameter in parameters:
            wish = Wish("jobs", 1, 8, WISH.template, parameters={parameter: value})
            if value <= 1e9:
                spec_to_wire(expand(preset, wish, "p"))
                continue
            with pytest.raises(InvalidArgumentError) as caught:
                expand(preset, wish, "p")
            assert caught.value.violations[0].field == f"p[{parameter}]"


def test_what_a_wish_does_not_state_is_the_default() -> None:
    preset, made = render(wished("hpa", parameters={"target_average_value": 7.0}), "wish", WISH)
    assert (preset.name, made.max_replicas) == ("hpa", 8)
    assert made == expand(
        "hpa", Wish("jobs", 1, 8, WISH.template, parameters={"target_average_value": 7.0}), "p"
    )
