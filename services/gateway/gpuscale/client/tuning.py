"""Chooses the best of several policies by a goal, over windows of time, so that one lucky hour does not decide. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from gpuscale.common.sizes import parse_duration

SURE = 1.383
"""Standard errors of a one-sided 90 % bound: Student's t over ten windows."""
WORTH = 0.05
"""Share of GPU time or late requests that a change of policy has to save."""
POLICY_FIELDS = (
    *("signals", "rules", "tick", "combine", "up", "down", "bound_mode", "busy_metric", "scale_in_order"),
)
"""Fields of an endpoint's spec that determine the number of replicas within its bounds."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a run: the requests that arrived, how many were late, and GPU hours."""

    request_count: int
    late_count: int
    gpu_hours: float


@dataclass(frozen=True, slots=True)
class TuningGoal:
    """Most percent of late requests; or, as a price, GPU seconds per late request."""

    late: float = 1.0
    price: float | None = None

    def __str__(self) -> str:
        return f"late<={self.late:g}%" if self.price is None else f"late:{self.price:g}s"


def parse_goal(text: str) -> TuningGoal:
    """Parse `late<=1%` or `late:30s`; ValueError otherwise."""
    word = "".join(text.split())
    try:
        if word.startswith("late<="):
            late = float(word.removeprefix("late<=").removesuffix("%"))
            if 0 <= late <= 100:
                return TuningGoal(late)
        elif word.startswith("late:"):
            return TuningGoal(price=parse_duration(word.removeprefix("late:")))
    except ValueError:
        pass
    raise ValueError(
        f"{text!r} is not a goal; write it like late<=1% (at most so many requests late)"
        " or late:30s (a late request is worth 30 s of a GPU)"
    )


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a policy in each window of a run; all trials have the same windows."""

    name: str
    windows: Sequence[Window]

    @property
    def hours(self) -> float:
        """GPU hours."""
        return sum(one.gpu_hours for one in self.windows)

    @property
    def late(self) -> float:
        """Percent of late requests."""
        return 100 * self._share

    @property
    def most_late(self) -> float:
        """Upper bound on the percent of late requests, with a confidence of 90 %, from the variance between windows."""
        over = _margin([one.late_count - self._share * one.request_count for one in self.windows])
        return min(100.0, self.late + 100 * over / self._came)

    @property
    def _came(self) -> int:
        return max(1, sum(one.request_count for one in self.windows))

    @property
    def _share(self) -> float:
        return sum(one.late_count for one in self.windows) / self._came

    def rank(self, goal: TuningGoal) -> tuple[float, ...]:
        """Sort key, smaller is better: late requests beyond the goal, then GPU hours."""
        if goal.price is not None:
            return (sum(_cost(one, goal.price) for one in self.windows),)
        over = self.most_late if self.most_late > goal.late else 0.0
        return over, self.hours, self.late

    def without(self, place: int) -> Trial:
        """The trial without one window."""
        return Trial(self.name, [one for at, one in enumerate(self.windows) if at != place])

    def beats(self, other: Trial, goal: TuningGoal) -> bool:
        """Whether a change from `other` surely saves enough."""
        if goal.price is None and other.most_late > goal.late:
            return self.most_late < (1 - WORTH) * other.most_late
        if goal.price is None and self.most_late > goal.late:
            return False
        price = goal.price or 0.0
        saved = [
            (1 - WORTH) * _cost(theirs, price) - _cost(own, price)
            for own, theirs in zip(self.windows, other.windows, strict=True)
        ]
        return sum(saved) > _margin(saved)


def _cost(one: Window, price: float) -> float:
    """GPU hours of a window, including the price of late requests."""
    return one.gpu_hours + one.late_count * price / 3600


def _margin(values: Sequence[float]) -> float:
    """The error bound of a sum of independent values."""
    return SURE * math.sqrt(len(values)) * statistics.stdev(values) if len(values) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class TuningChoice:
    """The chosen policy; `front` has it and those that none beats in both late requests and GPU hours.

    `judged`: each window's result with the policy chosen on all other windows: the value of the choice on unseen data.
    """

    chosen: Trial
    front: Sequence[Trial]
    judged: Trial
    met: bool

    def why(self, goal: TuningGoal) -> str:
        """The reason in words."""
        one, count = self.chosen, len(self.judged.windows)
        if goal.price is not None:
            reason = f"GPU time and late requests at {goal.price:g} s each cost least"
        else:
            most = f"{one.most_late:.2f}% late at most, 90 % sure"
            reason = f"the cheapest that meets {goal} ({most})" if self.met else f"none meets {goal}: {most}"
        judged = f"{self.judged.late:.2f}% late, {self.judged.hours:.2f} GPU hours"
        return f"{one.name}: {reason}; chosen on {count - 1} of {count} windows and judged on the other: {judged}"


def choose(trials: Sequence[Trial], goal: TuningGoal) -> TuningChoice:
    """The best trial for a goal; ValueError if there are none."""
    if not trials:
        raise ValueError("there is nothing to choose from")

    def best(some: Sequence[Trial]) -> Trial:
        return min(some, key=lambda one: (*one.rank(goal), one.name))

    chosen, front = best(trials), list[Trial]()
    for one in sorted(trials, key=lambda one: (one.hours, one.late, one.name)):
        if one is chosen or not front or one.late < min(other.late for other in front):
            front.append(one)
    by_name = {one.name: one for one in trials}
    judged = [
        by_name[best([one.without(place) for one in trials]).name].windows[place]
        for place in range(len(chosen.windows))
    ]
    met = goal.price is not None or chosen.most_late <= goal.late
    return TuningChoice(chosen, front, Trial("judged", judged), met)


def grid(goal: float, slots: int) -> Mapping[str, Mapping[str, Sequence[float]]]:
    """The values to try for each parameter, by preset, for requests that may wait `goal` seconds."""
    half, most, all_of = slots * 0.5, slots * 0.8, float(slots)
    loads = [half, slots * 0.65, most, all_of]
    waits, shares, windows = [goal / 4, goal / 2, goal], [0.65, 0.8, 0.9], [60.0, 200.0, 400.0]
    delays, steps = {"upscale_delay_s": [0.0, 30.0], "downscale_delay_s": [120.0, 600.0]}, [1.0, 4.0]
    return {
        "gpuscale": {"deadline": waits, "utilization": shares, "stabilization": windows},
        "hpa": {"target_average_value": loads, "stabilization_window_seconds": [60.0, 300.0]},
        "knative": {"target_utilization_percentage": [50, 70, 85], "scale_down_delay": [0, 120, 300]},
        "ray_serve": {"target_ongoing_requests": [half, slots * 0.75, all_of], **delays},
        "keda": {"value": loads, "cooldown_period": [60.0, 300.0]},
        "backend_ai": {
            "scale_up_threshold": [1.0, all_of],
            "step_size": steps,
            "cooldown_seconds": [15.0, 60.0],
        },
        "opengris_vanilla": {"upper_task_ratio": loads[1:], "lower_task_ratio": [slots * 0.3, half]},
    }


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
"""Presets tried without changes."""
AS_IT_IS = "as it is"
"""Name of an endpoint's current policy."""


def candidates(goal: float, slots: int) -> Iterator[tuple[str, str, Mapping[str, float]]]:
    """Name, preset and parameters of the shipped presets, then of every combination of the grid's values."""
    for name in AS_SHIPPED:
        yield name, name, {}
    for family, values in grid(goal, slots).items():
        for choice in product(*values.values()):
            stated = dict(zip(values, choice, strict=True))
            words = ",".join(f"{name}={value:g}" for name, value in stated.items())
            yield f"{family}({words})", family, stated
