"""What is remembered of an endpoint's signals between looks, for windows, trends and paces. Pure; in memory only.

After a restart it is empty: what needs a window holds until the window has filled again.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from gpuscale.autoscaler.domain.model import EndpointSpec, Observation, ObservationStatus, Signal
from gpuscale.autoscaler.domain.pace import Memory
from gpuscale.autoscaler.domain.policies.outcome import Burst
from gpuscale.autoscaler.domain.policies.times import HOLT_WINDOW
from gpuscale.autoscaler.domain.rules import DrainRule, ForecastModel, ForecastRule, PanicRule
from gpuscale.autoscaler.domain.series import LARGEST, Series
from gpuscale.autoscaler.domain.signals import Sample, observe

SHORTEST_KEPT = 300.0
"""Seconds of every signal that are kept at least."""
SAMPLES_KEPT = 1_000
"""Samples of a signal that are kept to be shown; samples in a row that read the same are one."""
_STATUSES = tuple(ObservationStatus)


@dataclass(frozen=True, slots=True)
class Remembered:
    """The past of an endpoint: its signals by id, what its pace goes by, and what its panic rules know."""

    memory: Memory | None = None
    bursts: Mapping[str, Burst] = field(default_factory=dict[str, Burst])
    series: Mapping[str, Series] = field(default_factory=dict[str, Series])

    def with_samples(self, spec: EndpointSpec, samples: Mapping[str, Sample]) -> Remembered:
        """With the values of new samples; signals that the spec has no more are forgotten."""
        keep = kept_seconds(spec)
        return replace(
            self,
            series={
                one.id: _added(self.series.get(one.id, Series()), one, samples.get(one.id), keep)
                for one in spec.signals
            },
        )

    def observations(
        self, spec: EndpointSpec, samples: Mapping[str, Sample], now: float
    ) -> dict[str, Observation]:
        """What every signal of the spec shows now."""
        return {
            one.id: observe(one, samples.get(one.id, Sample()), now, self.series.get(one.id))
            for one in spec.signals
        }


def kept_seconds(spec: EndpointSpec) -> float:
    """Seconds of the past that the rules and signals of a spec look at."""
    needed = [SHORTEST_KEPT, *(one.window or 0.0 for one in spec.signals)]
    for rule in spec.rules:
        match rule.kind:
            case PanicRule(stable_window=window) | DrainRule(window=window):
                needed.append(window)
            case ForecastRule(model=ForecastModel.SEASONAL_NAIVE, season=season):
                needed.append(season)
            case ForecastRule():
                needed.append(HOLT_WINDOW)
            case _:
                continue
    return max(needed)


def _added(series: Series, signal: Signal, sample: Sample | None, keep: float) -> Series:
    if sample is None or sample.at is None or sample.problem or not sample.values:
        return series
    value = sample.joined(signal.across)
    return series.added(sample.at, value, keep) if abs(value) <= LARGEST else series


@dataclass(frozen=True, slots=True)
class Shown:
    """What a signal showed from `first` to `last`, in seconds since 1970; `value` is None where there was none."""

    first: float
    last: float
    value: float | None
    status: ObservationStatus


class Samples:
    """What one signal showed at each evaluation: the last `SAMPLES_KEPT`, at 25 bytes each, for there may be many signals."""

    def __init__(self) -> None:
        self._first, self._last, self._values = array("d"), array("d"), array("d")
        self._statuses = array("b")

    def note(self, one: Observation, at: float) -> None:
        """Add what it shows at `at`, in seconds since 1970."""
        value = math.nan if one.value is None else one.value
        status = _STATUSES.index(one.status)
        if self._last and self._statuses[-1] == status and _same(self._values[-1], value):
            self._last[-1] = at
            return
        if len(self._first) >= SAMPLES_KEPT:
            for kept in (self._first, self._last, self._values, self._statuses):
                del kept[0]
        self._first.append(at)
        self._last.append(at)
        self._values.append(value)
        self._statuses.append(status)

    def __iter__(self) -> Iterator[Shown]:
        """Oldest first."""
        for first, last, value, status in zip(
            self._first, self._last, self._values, self._statuses, strict=True
        ):
            yield Shown(first, last, None if math.isnan(value) else value, _STATUSES[status])


def noted(
    samples: Mapping[str, Samples], observations: Iterable[Observation], at: float
) -> dict[str, Samples]:
    """The samples of signals by id, with what they show now; signals that are evaluated no more are forgotten."""
    kept: dict[str, Samples] = {}
    for one in observations:
        kept[one.signal] = samples.get(one.signal) or Samples()
        kept[one.signal].note(one, at)
    return kept


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
