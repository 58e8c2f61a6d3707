"""Metrics that were reported of endpoints and their replicas: the newest value of each, in memory. Pure.

Counters and histograms are the reporter's to reduce: a value here is one number with an age. What is known of a replica
counts only while that replica is ready, so that nothing is left of one that has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuscale.autoscaler.domain.model import TaskReport
from gpuscale.autoscaler.domain.signals import Sample
from gpuscale.common.errors import ResourceExhaustedError

MAX_METRICS_OF_ONE = 100
"""Metrics that are kept of one endpoint or replica."""
MAX_SOURCES = 20_000
"""Endpoints and replicas whose metrics are kept."""
KEPT_SECONDS = 24 * 3600.0
"""A value that is older is forgotten; no signal may count one."""


@dataclass(frozen=True, slots=True)
class Value:
    """A reported value, and when it was measured, in seconds since boot."""

    value: float
    at: float


Subject = tuple[str, str]
"""Ids of an endpoint and of one of its replicas; the latter is empty for the endpoint as a whole."""


class ReportedMetrics:
    """The newest value of each metric of each endpoint and replica."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, dict[str, Value]]] = {}
        self._tasks: dict[str, tuple[TaskReport, float]] = {}

    def report(self, subject: Subject, values: Mapping[str, Value], now: float) -> None:
        """Take in values; one that is older than the one known is left out.

        Raises:
            ResourceExhaustedError: of one subject, or of all, there would be more than is kept; nothing is taken in.
        """
        endpoint, replica = subject
        known = self._values.get(endpoint, {}).get(replica, {})
        kept = {metric: one for metric, one in known.items() if now - one.at <= KEPT_SECONDS}
        newer = {name: one for name, one in values.items() if name not in kept or one.at > kept[name].at}
        if len(kept | newer) > MAX_METRICS_OF_ONE:
            raise _full(f"more than {MAX_METRICS_OF_ONE} metrics of one endpoint or replica are not kept")
        if not known and self._subjects() >= MAX_SOURCES:
            self._forget_old(now)
            if self._subjects() >= MAX_SOURCES:
                raise _full(f"metrics of more than {MAX_SOURCES} endpoints and replicas are not kept")
        self._values.setdefault(endpoint, {})[replica] = kept | newer

    def report_tasks(self, endpoint: str, tasks: TaskReport, at: float) -> None:
        """Take in all tasks of an endpoint, counted at `at`, unless something newer is known.

        Raises:
            ResourceExhaustedError: those of too many endpoints are kept.
        """
        known = self._tasks.get(endpoint)
        if known is None and len(self._tasks) >= MAX_SOURCES:
            raise _full(f"tasks of more than {MAX_SOURCES} endpoints are not kept")
        if known is None or known[1] < at:
            self._tasks[endpoint] = tasks, at

    def tasks_of(self, endpoint: str) -> Sample:
        """What was reported of the tasks of an endpoint."""
        if endpoint not in self._tasks:
            return Sample(problem="nobody has reported tasks")
        tasks, at = self._tasks[endpoint]
        return Sample((float(tasks.total),), at, proven_empty=not tasks.total, tasks=tasks)

    def keep(self, endpoint: str, replicas: Collection[str]) -> None:
        """Forget the replicas of an endpoint but for these."""
        known = self._values.get(endpoint, {})
        for gone in [one for one in known if one and one not in replicas]:
            del known[gone]

    def forget(self, endpoint: str) -> None:
        """Forget an endpoint and its replicas."""
        self._values.pop(endpoint, None)
        self._tasks.pop(endpoint, None)

    def of_endpoint(self, endpoint: str, metric: str) -> Sample:
        """What was reported for the endpoint as a whole."""
        found = self._values.get(endpoint, {}).get("", {}).get(metric)
        if found is None:
            return Sample(problem=f"nobody has reported {metric}")
        return Sample((found.value,), found.at, proven_empty=found.value == 0)

    def of_replicas(
        self, endpoint: str, metric: str, replicas: Sequence[str], now: float, oldest: float
    ) -> Sample:
        """What these replicas reported; those whose last value is older than `oldest` seconds are silent."""
        if not replicas:
            return Sample(problem="no replica is ready")
        known = self._values.get(endpoint, {})
        found = [known[one][metric] for one in replicas if metric in known.get(one, {})]
        fresh = [one for one in found if now - one.at <= oldest]
        told = fresh or found  # where all are too old, their age says so
        silent = len(replicas) - len(fresh)
        if not told:
            return Sample(
                problem=f"none of {len(replicas)} replicas has reported {metric}", silent_count=silent
            )
        values = tuple(one.value for one in told)
        empty = not silent and not any(values)
        return Sample(values, min(one.at for one in told), silent_count=silent, proven_empty=empty)

    def by_replica(self, endpoint: str, metric: str, now: float, oldest: float) -> dict[str, float]:
        """What each replica of an endpoint reported in the last `oldest` seconds, by its id."""
        known = self._values.get(endpoint, {}).items()
        found = {replica: values[metric] for replica, values in known if replica and metric in values}
        return {replica: one.value for replica, one in found.items() if now - one.at <= oldest}

    def list(self, endpoint: str = "", replica: str = "") -> Iterator[tuple[Subject, str, Value]]:
        """What is known, by endpoint, replica and metric; of one of them where it is named."""
        for owner in sorted(self._values.keys() & {endpoint} if endpoint else self._values):
            subjects = self._values[owner]
            for one in sorted(subjects.keys() & {replica} if replica else subjects):
                for metric, value in sorted(subjects[one].items()):
                    yield (owner, one), metric, value

    def _subjects(self) -> int:
        return sum(len(one) for one in self._values.values())

    def _forget_old(self, now: float) -> None:
        for endpoint, subjects in list(self._values.items()):
            for replica, values in list(subjects.items()):
                if all(now - one.at > KEPT_SECONDS for one in values.values()):
                    del subjects[replica]
            if not subjects:
                del self._values[endpoint]


def _full(message: str) -> ResourceExhaustedError:
    return ResourceExhaustedError(message, reason="TOO_MANY_METRICS")
