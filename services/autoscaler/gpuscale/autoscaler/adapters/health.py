"""Whether a replica is well: what its template's probe asks, and what the answers in a row make of it. Pure.

The words and their meaning are those of Kubernetes' probes, with one for both ends of a life: the first success makes a
replica READY, and `failures` in a row make it FAILED. Until the first success failures count only once `start_timeout` is
over, so that a model may take its time to load without a probe that is slow to notice a replica which hangs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ProbeKind(Enum):
    """How a replica is asked."""

    EXEC = "exec"
    """A program that ends with 0."""
    TCP = "tcp"
    """A connection to HOST:PORT."""
    HTTP = "http"
    """A GET of an http:// URL that is answered with a status of 200 to 399."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When a replica is asked; seconds, and failures in a row."""

    initial_delay: float = 0.0
    period: float = 5.0
    timeout: float = 1.0
    failures: int = 3
    start_timeout: float = 300.0


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe with everything filled in: arguments of a program, or one address."""

    kind: ProbeKind
    target: tuple[str, ...]
    timing: Timing


class Verdict(Enum):
    """What an answer makes of a replica."""

    GOES_ON = "goes on"
    READY = "ready"
    UNHEALTHY = "unhealthy"


class Health:
    """The answers of one replica.

    Args:
        timing: when it is asked, and how often it may fail.
        since: when it was started, or taken over; in seconds since boot, as every moment here.
        ready: whether it has been ready before.
    """

    def __init__(self, timing: Timing, since: float, *, ready: bool) -> None:
        self._timing = timing
        self._start_ends = since + timing.start_timeout
        self._ready = ready
        self._failures = 0

    def answered(self, problem: str, now: float) -> Verdict:
        """Take an answer; `problem` is empty where it is well."""
        if not problem:
            first, self._ready, self._failures = not self._ready, True, 0
            return Verdict.READY if first else Verdict.GOES_ON
        if self._ready or now >= self._start_ends:
            self._failures += 1
        return Verdict.UNHEALTHY if self._failures >= self._timing.failures else Verdict.GOES_ON
