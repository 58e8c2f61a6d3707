"""The histories of all nodes and GPUs, within a budget of memory. Pure: times are arguments."""

from collections.abc import Iterator, Sequence

from gpuscale.monitor.model.metrics import GPU_METRICS, NODE_METRICS, Metric, Sample
from gpuscale.monitor.history.ring import Rows
from gpuscale.monitor.history.series import Series, Tier, most_bytes

LOOK_FOR_ENDED_SECONDS = 60.0
DEFAULT_TIERS = (Tier(1.0, 600.0), Tier(10.0, 6 * 3600.0), Tier(60.0, 7 * 86400.0))
"""1 s for 10 min, 10 s for 6 h, 1 min for 7 d."""


def metrics_of(key: str) -> Sequence[Metric]:
    """What is kept under a key: the name of a node has a slash, a UUID has none."""
    return NODE_METRICS if "/" in key else GPU_METRICS


class History:
    """Series by key: the name of a node, or the UUID of a GPU in lower case.

    A series that there is no memory for is not begun, so that what is kept of the others stays whole. Nobody's history
    is kept beyond the longest retention after its last sample.

    Attributes:
        tiers: from the finest to the coarsest.
    """

    def __init__(self, tiers: Sequence[Tier], budget_bytes: int) -> None:
        self.tiers = tiers
        self._budget = budget_bytes
        self._used = 0
        self._size_of_gpu = most_bytes(len(GPU_METRICS), tiers)
        self._series: dict[str, tuple[Series, int]] = {}
        self._looked_at = float("-inf")

    def __len__(self) -> int:
        return len(self._series)

    @property
    def has_room(self) -> bool:
        """Whether there is memory for one more GPU."""
        return self._used + self._size_of_gpu <= self._budget

    @property
    def used_bytes(self) -> int:
        """The most memory that the series which are kept can come to."""
        return self._used

    def add_node(self, key: str, at: float, sample: Sample) -> None:
        """Take in what was read of a node, in the order of `NODE_METRICS`."""
        self._add(key, at, sample, NODE_METRICS)

    def add_gpu(self, key: str, at: float, sample: Sample) -> None:
        """Take in what was read of a GPU, in the order of `GPU_METRICS`."""
        self._add(key, at, sample, GPU_METRICS)

    def get(self, key: str) -> Series | None:
        """The series of a key; None where none is kept."""
        found = self._series.get(key)
        return found[0] if found else None

    def all(self) -> Iterator[tuple[str, Series]]:
        """Every key and its series, as of now."""
        return ((key, series) for key, (series, _) in list(self._series.items()))

    def restore(self, key: str, rows: Rows) -> bool:
        """Begin a series with buckets of the coarsest tier that a run before kept; whether there was memory for it."""
        metrics = metrics_of(key)
        size = most_bytes(len(metrics), self.tiers)
        if self._used + size > self._budget:
            return False
        series = Series(len(metrics), self.tiers)
        series.restore(rows)
        self._series[key] = series, size
        self._used += size
        return True

    def restore_finer(self, key: str, rows: Rows) -> None:
        """Add buckets of the tier before the coarsest to a series that was restored."""
        found = self._series.get(key)
        if found is not None:
            found[0].restore_finer(rows)

    def _add(self, key: str, at: float, sample: Sample, metrics: Sequence[Metric]) -> None:
        found = self._series.get(key)
        if found is None:
            size = most_bytes(len(metrics), self.tiers)
            if self._used + size > self._budget:
                return
            found = self._series[key] = Series(len(metrics), self.tiers), size
            self._used += size
        found[0].add(at, sample)

    def forget_ended(self, now: float) -> None:
        """Forget what got no sample for the longest retention; to be called often, and looks once a minute."""
        if now - self._looked_at < LOOK_FOR_ENDED_SECONDS:
            return
        self._looked_at = now
        oldest = now - self.tiers[-1].retention
        for key in [key for key, (series, _) in self._series.items() if series.newest() < oldest]:
            self._used -= self._series.pop(key)[1]
