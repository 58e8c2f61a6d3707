"""What is remembered of an endpoint's signals between looks, for windows, trends and paces. Pure; in memory only.

After a restart it is empty: what needs a window holds until the window has filled again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpuscale.autoscaler.model import EndpointSpec, Observation, Signal
from gpuscale.autoscaler.domain.pace import Memory
from gpuscale.autoscaler.domain.policies.outcome import Burst
from gpuscale.autoscaler.domain.policies.times import HOLT_WINDOW
from gpuscale.autoscaler.domain.rules import DrainRule, ForecastModel, ForecastRule, PanicRule
from gpuscale.autoscaler.domain.series import LARGEST, Series
from gpuscale.autoscaler.domain.signals import Sample, observe

SHORTEST_KEPT = 300.0
"""Seconds of every signal that are kept at least."""


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
