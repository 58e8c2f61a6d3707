"""Demand: what asks look like, learnt from those that come, for policies that think of the next one. Pure.

Nothing is known of the workload beforehand but the cluster's own CPU per GPU. Sums are weighted by age (half gone
after HALF_LIFE asks), so that the picture follows a workload that changes.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gpuscale.allocator.domain.model import Ask
from gpuscale.allocator.placing.fragmentation import AskClass, class_of

HALF_LIFE = 4096
"""After so many asks an ask counts half."""
CPU_PRIOR = 4_000
"""The cluster's own CPU per GPU counts as much as asks for so many thousandths of GPUs: a start, soon outvoted."""
PRICE_PRIOR = 32_000
"""Before any ask came, so many thousandths of GPUs count as asked for without naming a model."""
REDRAWN = 1024
FIRST_DRAWN = frozenset({16, 64, 256, 512})
"""The classes of asks are drawn up anew after so many asks: all that hangs on them must be reckoned anew."""
STEP = 0.01
"""A tariff is replaced when a figure of it is further off than this: a part of the ratio, or so much of a price."""


@dataclass(frozen=True, slots=True)
class Tariff:
    """What policies reckon with.

    `cpu_per_gpu` is R, the CPU that asks take per GPU (thousandths per thousandth; 0 while unknown); `prices` says for
    each model how much of the demand can be served by it alone, relative to its part of the supply.
    """

    cpu_per_gpu: float = 0.0
    prices: Mapping[int, float] = field(default_factory=dict[int, float])


class Demand:
    """What was asked for so far.

    `tariff` has the figures to reckon with, and `classes` says how often each class of asks came: each is the same object
    until the figures have moved, or the classes are drawn up anew (see REDRAWN).

    Args:
        classes: how often each class of asks comes, where that is known beforehand; not learnt then.
    """

    def __init__(self, classes: Mapping[AskClass, int] | None = None) -> None:
        self._decay = 0.5 ** (1.0 / HALF_LIFE)
        self._seen = Counter(classes or {})
        self._learns_classes = classes is None
        self._count = 0
        self.classes: Mapping[AskClass, int] = dict(self._seen)
        self._cpu = 0.0
        self._gpu_beside_cpu = 0.0
        self._gpu = 0.0
        self._constrained: dict[int, float] = {}
        self._prior = 0.0
        self.tariff = Tariff()

    def expect(self, cpu_per_gpu: float) -> None:
        """Reckon with the cluster's own CPU per GPU until asks tell otherwise."""
        self._prior = cpu_per_gpu

    def observe(self, ask: Ask, served_by: Collection[int], supply: Mapping[int, int]) -> None:
        """Take note of a new ask. `served_by` are the models that it admits if it names any, `supply` all GPUs."""
        self._observe_class(ask)
        milli = float(ask.member_count * ask.gpu_count * ask.gpu_milli)
        if not milli:
            return
        self._gpu = self._gpu * self._decay + milli
        self._gpu_beside_cpu = self._gpu_beside_cpu * self._decay + (milli if ask.cpu_milli else 0.0)
        self._cpu = self._cpu * self._decay + ask.member_count * ask.cpu_milli
        for model in self._constrained:
            self._constrained[model] *= self._decay
        if served_by and (whole := sum(supply.get(model, 0) for model in served_by)):
            for model in served_by:
                part = milli * supply.get(model, 0) / whole
                self._constrained[model] = self._constrained.get(model, 0.0) + part
        self._renew(self._prices(supply) if self._constrained else {})

    def _observe_class(self, ask: Ask) -> None:
        if not self._learns_classes:
            return
        self._count += 1
        self._seen[class_of(ask)] += ask.member_count
        if self._count % HALF_LIFE == 0:
            self._seen = Counter({one: count // 2 for one, count in self._seen.items() if count > 1})
        if self._count % REDRAWN == 0 or self._count in FIRST_DRAWN:
            self.classes = dict(self._seen)

    def _prices(self, supply: Mapping[int, int]) -> dict[int, float]:
        """The demand for a model over its supply, as if all demand together were the whole supply."""
        scale = sum(supply.values()) / (self._gpu + PRICE_PRIOR)
        return {
            model: milli * scale / supply[model]
            for model, milli in self._constrained.items()
            if supply.get(model, 0)
        }

    def _renew(self, prices: dict[int, float]) -> None:
        weight = CPU_PRIOR if self._prior else 0.0
        gpu = self._gpu_beside_cpu + weight
        ratio = (self._cpu + self._prior * weight) / gpu if gpu else 0.0
        known = self.tariff
        if not math.isclose(ratio, known.cpu_per_gpu, rel_tol=STEP) or (
            prices and any(abs(price - known.prices.get(one, 0.0)) > STEP for one, price in prices.items())
        ):
            self.tariff = Tariff(ratio, prices)
