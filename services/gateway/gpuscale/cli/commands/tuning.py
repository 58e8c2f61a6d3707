"""Which policies `tune` tries, and which of them are worth having. Pure, but for the messages it makes."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TypeVar

from gpuscale.api.autoscaler import v1 as api

AS_SHIPPED = (
    "gpuscale",
    "hpa",
    "keda",
    "knative",
    "ray_serve",
    "backend_ai",
    "opengris_vanilla",
    "opengris_capability",
)
"""Presets that are run as they are."""
T = TypeVar("T")


def grid(goal: float, slots: int) -> Mapping[str, Mapping[str, Sequence[float]]]:
    """What is tried of each family: parameters with their values."""
    return {
        "gpuscale": {
            "deadline": [goal / 4, goal / 2, goal],
            "utilization": [0.65, 0.8, 0.9],
            "stabilization": [60.0, 200.0, 400.0],
        },
        "hpa": {
            "target_average_value": [slots * share for share in (0.5, 0.65, 0.8, 1.0)],
            "stabilization_window_seconds": [60.0, 300.0],
        },
        "knative": {
            "target_utilization_percentage": [50.0, 70.0, 85.0],
            "scale_down_delay": [0.0, 120.0, 300.0],
        },
        "ray_serve": {
            "target_ongoing_requests": [slots * share for share in (0.5, 0.75, 1.0)],
            "upscale_delay_s": [0.0, 30.0],
            "downscale_delay_s": [120.0, 600.0],
        },
        "keda": {
            "value": [slots * share for share in (0.5, 0.65, 0.8, 1.0)],
            "cooldown_period": [60.0, 300.0],
        },
        "backend_ai": {
            "scale_up_threshold": [1.0, float(slots)],
            "step_size": [1.0, 4.0],
            "cooldown_seconds": [15.0, 60.0],
        },
        "opengris_vanilla": {
            "upper_task_ratio": [slots * share for share in (0.65, 0.8, 1.0)],
            "lower_task_ratio": [slots * share for share in (0.3, 0.5)],
        },
    }


def candidates(wish: api.PresetWish, goal: float, slots: int) -> Iterator[api.BacktestPolicy]:
    """The presets as shipped, then each family with every choice of its values; `wish` is what they share."""
    for name in AS_SHIPPED:
        yield _policy(name, wish, name, {})
    for family, values in grid(goal, slots).items():
        for choice in product(*values.values()):
            stated = dict(zip(values, choice, strict=True))
            words = ",".join(f"{name}={value:g}" for name, value in stated.items())
            yield _policy(f"{family}({words})", wish, family, stated)


def _policy(name: str, wish: api.PresetWish, preset: str, stated: Mapping[str, float]) -> api.BacktestPolicy:
    policy = api.BacktestPolicy(name=name, preset=wish)
    policy.preset.preset = preset
    for parameter, value in stated.items():
        policy.preset.parameters[parameter] = value
    return policy


def pareto(reports: Sequence[api.BacktestReport]) -> list[api.BacktestReport]:
    """Those that no other beats in both late requests and GPU hours, the cheapest first."""
    best: list[api.BacktestReport] = []
    for one in sorted(
        reports, key=lambda one: (one.gpu_hours, one.violation_percent, one.flap_count, one.name)
    ):
        if not best or one.violation_percent < best[-1].violation_percent:
            best.append(one)
    return best


def choose(reports: Sequence[api.BacktestReport], late_percent: float) -> api.BacktestReport:
    """The cheapest with no more late requests than that; where none is so good, the one with the fewest.

    Raises:
        ValueError: there are none.
    """
    front = pareto(reports)
    if not front:
        raise ValueError("there is nothing to choose from")
    return next((one for one in front if one.violation_percent <= late_percent), front[-1])


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in parts of at most `size`."""
    return (items[begin : begin + size] for begin in range(0, len(items), size))
