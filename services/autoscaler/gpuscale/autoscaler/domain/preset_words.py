"""The words that known systems are configured with, read into presets. Pure.

OpenGRIS Scaler has one text for its policies (`allocate=capability; scaling=vanilla`), DistributedFunSearch a class
`ScalingConfig`; the others have a few settings each. A word that nobody knows is refused, with its field.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpuscale.autoscaler.domain.model import EndpointSpec
from gpuscale.autoscaler.domain.presets import PRESETS, Wish
from gpuscale.common.errors import FieldViolation, InvalidArgumentError

_FUNSEARCH: Mapping[str, str] = {
    "enabled": "0 changes nothing (1)",
    "check_interval": "seconds from one check to the next (120)",
    "sampler_scale_up_threshold": "messages above which a sampler is added (50)",
    "evaluator_scale_up_threshold": "messages above which an evaluator is added (10)",
    "min_samplers": "fewest samplers (min_replicas)",
    "max_samplers": "most samplers (max_replicas)",
    "min_evaluators": "fewest evaluators (min_replicas)",
    "max_evaluators": "most evaluators (max_replicas)",
    "min_gpu_memory_gib": "free memory of a sampler's GPU (20)",
    "max_gpu_utilization": "a sampler's GPU is used less than this, in percent (50)",
    "min_system_memory_gib": "free main memory of a sampler's host (30)",
    "cpu_usage_threshold": "an evaluator's host is used less than this, in percent (99)",
    "normalized_load_threshold": "load for each core of an evaluator's host (0.99)",
}
_RATIOS: Mapping[str, str] = {
    "upper_task_ratio": "tasks for each worker above which one is added (10, capability 5)",
    "lower_task_ratio": "tasks for each worker below which one is taken away (1, capability 0.5)",
}
PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "gpuscale": {
        "deadline": "seconds within which what waits is worked off (half of the goal)",
        "utilization": "share of its slots that a replica is to be busy with (0.8)",
        "window": "seconds of arrivals that count (60)",
        "tolerance": "share by which the count may be off without a change (0.15)",
        "stabilization": "seconds of the past whose most is kept (200, and up to ten start-up times while it learns)",
        "tick": "seconds from one evaluation to the next (5)",
    },
    "distributedfunsearch": _FUNSEARCH,
    "distributedfunsearch_evaluators": _FUNSEARCH,
    "backend_ai": {
        "scale_up_threshold": "waiting above which replicas are added (slots)",
        "scale_down_threshold": "waiting below which replicas are taken away (1)",
        "step_size": "replicas of a step (1)",
        "cooldown_seconds": "least seconds between two changes by a rule (300)",
        "sum_steps": "1 adds up the steps of all rules, as pull request 3277 did; 0 takes the first (0)",
    },
    "opengris_vanilla": _RATIOS,
    "opengris_capability": _RATIOS,
    "opengris_fixed_elastic": {**_RATIOS, "primary_worker_groups": "groups that are never stopped (1)"},
    "opengris_no": {},
    "hpa": {
        "target_average_value": "work for each replica (slots)",
        "tolerance": "share by which it may be off without a change (0.1)",
        "stabilization_window_seconds": "seconds of the past whose most is kept (300)",
    },
    "keda": {
        "value": "messages for each replica (20)",
        "activation_value": "messages above which an endpoint without replicas wakes (0)",
        "cooldown_period": "seconds of the past whose most is kept (300)",
        "exclude_unacknowledged": "1 counts only messages that wait (0)",
    },
    "knative": {
        "container_concurrency_target": "work that each replica can hold (slots)",
        "target_utilization_percentage": "share of it that is aimed at (70)",
        "stable_window_seconds": "length of the long window (60)",
        "panic_window_percentage": "length of the short one, as a share of it (10)",
        "panic_threshold_percentage": "a burst asks for this share of the ready replicas (200)",
        "max_scale_up_rate": "largest growth of an evaluation, as a multiple (1000)",
        "max_scale_down_rate": "largest reduction of an evaluation, as a divisor (2)",
        "scale_down_delay": "seconds of the past whose most is kept (0)",
    },
    "ray_serve": {
        "target_ongoing_requests": "work for each replica (2)",
        "look_back_period_s": "seconds that work is averaged over (30)",
        "upscale_delay_s": "seconds of agreement before it grows (30)",
        "downscale_delay_s": "seconds of agreement before it shrinks (600)",
    },
}
"""What may be stated of each preset, in words, with what holds where it is not."""
LARGEST_PARAMETER = 1e9
"""More seconds, replicas or GiB than anybody means; a spec has room for it."""
_ALLOCATIONS = ("capability", "even_load")
_SCALINGS: Mapping[str, str] = {
    name.removeprefix("opengris_"): name for name in PRESETS if name.startswith("opengris_")
}


@dataclass(frozen=True, slots=True)
class Named:
    """A preset by its name, with what is to be said about how it was asked for."""

    name: str
    notes: tuple[str, ...] = ()


def named(text: str, field: str) -> Named:
    """The preset of a name, or of a policy text of OpenGRIS Scaler (`allocate=even_load; scaling=vanilla`).

    Raises:
        InvalidArgumentError: a word of it is not known.
    """
    if "=" not in text:
        return Named(_known(text.strip(), PRESETS, field, "a preset"))
    words: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or key in words:
            raise _refused(field, f"must name allocate and scaling once each, not {part!r}")
        words[_known(key, ("allocate", "scaling"), field, "allocate or scaling")] = value
    if "scaling" not in words:
        raise _refused(field, "must name scaling")
    scaling = _known(words["scaling"], _SCALINGS, field, "a way of scaling")
    allocate = _known(words.get("allocate", _ALLOCATIONS[0]), _ALLOCATIONS, field, "a way of allocating")
    note = f"allocate={allocate} says which worker gets a task: here its broker does that"
    return Named(_SCALINGS[scaling], (note,))


def expand(name: str, wish: Wish, field: str) -> EndpointSpec:
    """The spec that a preset makes of a wish; `field` is the path of the parameters.

    Raises:
        InvalidArgumentError: a parameter that the preset has not, or that is no use as a number.
    """
    known = PARAMETERS[name]
    wrong = [
        FieldViolation(f"{field}[{one}]", _unknown(one, known, f"a parameter of {name}"))
        for one in wish.parameters
        if one not in known
    ]
    wrong += [
        FieldViolation(
            f"{field}[{one}]", f"must be a number of at least 0 and at most {LARGEST_PARAMETER:,.0f}"
        )
        for one, value in wish.parameters.items()
        if not 0 <= value <= LARGEST_PARAMETER
    ]
    if wrong:
        raise InvalidArgumentError(f"{wrong[0].field} {wrong[0].description}", violations=wrong)
    return PRESETS[name](wish)


def about(name: str) -> str:
    """What a preset does, in one line."""
    return (inspect.getdoc(PRESETS[name]) or "").partition("\n")[0]


def _known(word: str, known: Collection[str], field: str, what: str) -> str:
    if word in known:
        return word
    raise _refused(field, _unknown(word, known, what))


def _unknown(word: str, known: Collection[str], what: str) -> str:
    near = difflib.get_close_matches(word, sorted(known), n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known)) or 'none'}"
    return f"must be {what}; {hint}"


def _refused(field: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{field} {description}", field=field)
