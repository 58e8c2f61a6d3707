"""What history tells is what a plain list of all samples comes to, whatever came when and however often the fleet ended."""

from math import isclose, isnan
from random import Random

import pytest

from gpuscale.monitor.history.history import HistorySeries, Tier
from gpuscale.monitor.history.ring import Rows, chunks, unpack
from gpuscale.monitor.model.metrics import ABSENT

WIDTH = 2
ALL = -(2**31)
MINUTE = 60.0
TIERS = (
    (Tier(1.0, 600.0), Tier(10.0, 6 * 3600.0), Tier(60.0, 7 * 86_400.0)),
    (Tier(1.0, 20.0), Tier(10.0, 300.0), Tier(60.0, 1800.0)),
    (Tier(1.0, 60.0), Tier(10.0, 120.0), Tier(60.0, 600.0)),
)


class Told:
    """A series, and beside it every sample that it took in."""

    def __init__(self, source: Random) -> None:
        self.source = source
        self.tiers = source.choice(TIERS)
        self.series = HistorySeries(WIDTH, self.tiers)
        self.now = source.choice((0.0, 59.9, 1e5 + source.random() * 100))
        self.samples: list[tuple[float, tuple[float, ...]]] = []
        self.restored_until: float | None = None
        self._saved_until = -1.0
        self._open = -1  # second of the newest sample: of one before nothing is taken in

    def sample(self) -> None:
        """One sample: mostly a second later, sometimes after a gap, late, or with a reading absent."""
        gap = self.source.choice((1, 1, 1, 30.0, 100.0, 1000.0))
        self.now += self.source.choice(
            (0.1, 0.5, 1.0, 1.0, 1.0, 1.0, 2.0, 5.0, self.source.random() * 3, gap)
        )
        late = self.source.choice((0.5, 1, 3, 20, 100)) if self.source.random() < 0.05 else 0.0
        at = self.now - late
        values = (ABSENT, 0.0, 100.0, self.source.randrange(1 << 20) / 8.0)
        sample = tuple(self.source.choice(values) for _ in range(WIDTH))
        if self.restored_until is not None and at < self._saved_until:
            return  # no agent tells of what was before the fleet's end
        self.series.add(at, sample)
        if int(at // 1) >= self._open:
            self._open = int(at // 1)
            self.samples.append((at, sample))

    def restart(self) -> None:
        """The fleet ends and another run brings back what was on disk: what the finer steps had not passed on is lost."""
        shift = self.source.choice((0, 7, 28_000_000))
        coarsest = Rows.empty()
        for _, body in chunks(self.series.coarsest(ALL), WIDTH, shift):
            coarsest.extend(unpack([body], WIDTH, shift))
        last = self.series._rings[-2].last
        if not coarsest.numbers or last is None:
            return
        self._saved_until = max(self._saved_until, (last + 1) * 10.0)
        self.samples = [one for one in self.samples if one[0] < self._saved_until]
        self.series = HistorySeries(WIDTH, self.tiers)
        self.restored_until = coarsest.numbers[-1] * MINUTE
        self.series.restore(coarsest)
        self._open = round(self.restored_until)

    def check(self) -> None:
        for metric in range(WIDTH):
            for tier in range(3):
                self._check(metric, tier)

    def _check(self, metric: int, tier: int) -> None:
        start = self.now - self.tiers[tier].retention
        points = self.series.points(metric, tier, start, self.now + 1.0)
        starts = [point.start for point in points]
        assert starts == sorted(set(starts)), "by time, and nothing is told twice"
        values = [(at, row[metric]) for at, row in self.samples if not isnan(row[metric])]
        whole = -(-start // MINUTE) * MINUTE  # what begins before the span may be left out
        needed = [at for at, _ in values if at >= whole]
        assert not needed or starts[0] <= needed[0], "nothing within the retention is missing"
        if tier == 0 and self.restored_until is not None:
            # Since then the finest tier may have overwritten what came first.
            since = min((one for one in starts if one > self.restored_until), default=self.now + 1.0)
            values = [one for one in values if not self._saved_until <= one[0] < since]
        for point, end in zip(points, [*starts, self.now + 1.0][1:], strict=True):
            told = [value for at, value in values if point.start <= at < end]
            assert (point.samples, point.min, point.max) == (len(told), min(told), max(told)), (tier, point)
            assert isclose(point.mean, sum(told) / len(told), rel_tol=1e-5)


@pytest.mark.parametrize("seed", range(40))
def test_every_tier_tells_what_a_list_of_all_samples_does(seed: int) -> None:
    source = Random(seed)
    told = Told(source)
    for _ in range(source.randrange(20, 900)):
        told.sample()
        if source.random() < 0.02:
            told.check()
        if source.random() < 0.004:
            told.restart()
            told.check()
    told.check()
