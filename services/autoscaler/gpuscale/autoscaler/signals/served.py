"""Recent metrics of replicas' servers, as their adapters read them, and the signals computed from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from gpuscale.autoscaler.domain.serving import (
    LEVELS,
    METRICS,
    RATE_WINDOW,
    WINDOW,
    Latencies,
    Reading,
    ServerReading,
    percentile,
    percentile_of,
    restarted,
)
from gpuscale.autoscaler.domain.signals import Sample
from gpuscale.common.runtime.tasks import Clock

MAX_READINGS = 64
"""Most readings kept per replica; more than the window has at one per second."""
NAMED = 3
"""Most silent replicas that are named."""


@dataclass(slots=True)
class _Server:
    readings: deque[Reading] = field(default_factory=lambda: deque[Reading](maxlen=MAX_READINGS))
    problem: str = "has not told yet"  # why its last answer was none; empty where it was one


class ReplicaServers:
    """The recent readings of each replica of each endpoint; `keep` sets which replicas there are."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._servers: dict[str, dict[str, _Server]] = {}

    def heard(
        self, endpoint: str, replica: str, age: float, reading: ServerReading | None, problem: str
    ) -> None:
        """Take a replica's reading of `age` seconds ago, or why there is none."""
        server = self._servers.setdefault(endpoint, {}).setdefault(replica, _Server())
        server.problem = problem
        if reading is None:
            return
        at, readings = self._clock.now() - age, server.readings
        if readings and readings[-1][0] >= at:
            return
        if readings and restarted(readings[-1][1], reading):
            readings.clear()
        readings.append((at, reading))
        while len(readings) > 2 and readings[1][0] <= at - WINDOW:
            readings.popleft()

    def keep(self, endpoint: str, replicas: Collection[str]) -> None:
        """Forget all replicas of an endpoint except these."""
        known = self._servers.get(endpoint, {})
        for gone in known.keys() - set(replicas):
            del known[gone]
        if not known:
            self._servers.pop(endpoint, None)

    def by_replica(self, endpoint: str, metric: str, oldest: float) -> dict[str, float]:
        """The value of each replica in the last `oldest` seconds, by its id."""
        known = self._servers.get(endpoint, {})
        found = ((replica, self._value(server, metric, oldest)) for replica, server in known.items())
        return {replica: value for replica, value in found if value is not None}

    def sample(self, endpoint: str, metric: str, replicas: Sequence[str], oldest: float) -> Sample:
        """One value per replica; for a percentile, one for all of them together."""
        if not replicas:
            return Sample(problem="no replica is ready")
        known = self._servers.get(endpoint, {})
        servers = {replica: known.get(replica, _Server()) for replica in replicas}
        joint = percentile_of(metric)
        values: list[float] = []
        told: dict[str, _Server] = {}
        if joint is not None:
            spans = {replica: self._span(server, joint[0], oldest) for replica, server in servers.items()}
            told = {replica: servers[replica] for replica, span in spans.items() if span is not None}
            one = percentile((span for span in spans.values() if span is not None), joint[1])
            values = [] if one is None else [one]
        else:
            for replica, server in servers.items():
                value = self._value(server, metric, oldest)
                if value is not None:
                    told[replica] = server
                    values.append(value)
        silent = {
            replica: server.problem or self._why_not(server, metric, oldest)
            for replica, server in servers.items()
            if replica not in told
        }
        silence = _named(silent)
        at = min((server.readings[-1][0] for server in told.values()), default=None)
        if not values:
            problem = silence if silent else f"nothing was answered in the last {WINDOW:g} s"
            return Sample(at=at, problem=problem, silent_count=len(silent))
        empty = not silent and not any(values)
        return Sample(tuple(values), at, silent_count=len(silent), silence=silence, proven_empty=empty)

    def _value(self, server: _Server, metric: str, oldest: float) -> float | None:
        """A metric of one replica; None if it is absent or too old."""
        if not self._fresh(server, oldest) or (len(server.readings) < 2 and metric not in LEVELS):
            return None
        last = server.readings[-1]
        lately = (one for one in reversed(server.readings) if one[0] <= last[0] - RATE_WINDOW)
        read = METRICS.get(metric)
        return None if read is None else read(next(lately, server.readings[0]), last)

    def _span(self, server: _Server, histogram: str, oldest: float) -> tuple[Latencies, Latencies] | None:
        """A histogram of a replica at the beginning and at the end of the window."""
        if not self._fresh(server, oldest) or len(server.readings) < 2:
            return None
        ends = [getattr(one[1], histogram) for one in (server.readings[0], server.readings[-1])]
        return None if None in ends else (ends[0], ends[1])

    def _why_not(self, server: _Server, metric: str, oldest: float) -> str:
        """Why a replica whose last read succeeded has no value."""
        if not self._fresh(server, oldest):
            return f"has not answered for {self._clock.now() - server.readings[-1][0]:.0f} s"
        once = len(server.readings) < 2 and metric not in LEVELS
        return "has answered once so far" if once else f"tells no {metric}"

    def _fresh(self, server: _Server, oldest: float) -> bool:
        return bool(server.readings) and self._clock.now() - server.readings[-1][0] <= oldest


def _named(silent: dict[str, str]) -> str:
    """Which replicas are silent, and why."""
    words = [f"replica {one} {why}" for one, why in sorted(silent.items())]
    more = f" and {len(words) - NAMED} more" if len(words) > NAMED else ""
    return "; ".join(words[:NAMED]) + more
