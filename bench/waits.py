"""How well is it told how long something will wait: learned, by leases, and by the mean of the user's last two jobs?

The jobs of an openb trace (`bench._traces`), first come first served over a pool of GPUs that they fill. Its users are not told:
jobs of the same class, models, CPU and memory are one user's here, as an application always asks for the same there; the class is
the tenant. Everything is learned in the order in which jobs end. Of the later half of the jobs it is foreseen how long each will go on at its
start, and whenever one comes how long a random one of those that run will go on, and how long the new one waits. Shown: the median of |log(foreseen / real)|, with its
ratio to ours, and how many of the real ones lie in the range that is told (60 % should).
"""

from __future__ import annotations

import argparse
import csv
import heapq
import os
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import fmean, median

from gpuscale.allocator.domain.durations import Durations, Kin, Span
from gpuscale.allocator.queueing.queue import MOST_FORESEEN

LEASE = 300.0
"""Seconds of a lease where nobody says, renewed after a third: what is left of it is all that a lease tells."""
BUSY = (0.3, 0.4, 0.5, 0.6)
"""Parts of the pools that the jobs fill on average: they come in bursts."""


@dataclass(frozen=True)
class Job:
    """A job of the trace."""

    number: int
    at: float
    kin: Kin
    lasts: float


Foreseer = Callable[[Kin, float], Span]
"""How long a job of a kin goes on that has lasted so long."""


def read_jobs(path: Path) -> list[Job]:
    """The jobs of a trace that have GPUs and ended, in turn."""
    found = []
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if not int(row["num_gpu"]) or not row["scheduled_time"] or not row["deletion_time"]:
                continue  # it never ran
            if (lasts := float(row["deletion_time"]) - float(row["scheduled_time"])) > 0:
                user = " ".join(row[name] for name in ("qos", "gpu_spec", "cpu_milli", "memory_mib"))
                kin = Kin(user, row["qos"], int(row["num_gpu"]), int(row["gpu_milli"]))
                found.append((float(row["creation_time"]), kin, lasts))
    found.sort(key=lambda one: one[0])
    return [Job(number, *one) for number, one in enumerate(found)]


class LastTwo:
    """The mean of the user's last two jobs (Tsafrir, IEEE TPDS 2007); what has lasted longer goes on as long again."""

    def __init__(self) -> None:
        self._last: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=2))
        self._all: deque[float] = deque(maxlen=2)

    def add(self, kin: Kin, seconds: float) -> None:
        self._last[kin.owner].append(seconds)
        self._all.append(seconds)

    def remaining(self, kin: Kin, age: float) -> Span:
        known = self._last.get(kin.owner) or self._all
        mean = fmean(known) if known else LEASE
        left = mean - age if mean > age else age
        return Span(left, left, left)


def by_lease(_kin: Kin, age: float) -> Span:
    """A lease that is not renewed any more."""
    left = LEASE - age % (LEASE / 3)
    return Span(left, left, left)


class Pool:
    """GPUs, first come first served."""

    def __init__(self, jobs: list[Job], gpus: int, foreseers: dict[str, Foreseer]) -> None:
        self.free, self.gpus = gpus * 1000, gpus
        self.jobs, self.foreseers = jobs, foreseers
        self.line: deque[Job] = deque()
        self.running: dict[int, tuple[Job, float]] = {}
        self.began: dict[int, float] = {}

    def start(self, now: float) -> list[tuple[float, int]]:
        """Start what fits, in turn; the ends."""
        ends = []
        while self.line and milli(self.line[0]) <= self.free:
            job = self.line.popleft()
            self.free -= milli(job)
            self.running[job.number], self.began[job.number] = (job, now), now
            ends.append((now + job.lasts, job.number))
        return ends

    def foresee(self, now: float, remaining: Foreseer) -> Span:
        """How long the last of the line waits, if everything goes on for so long."""
        ends: list[tuple[float, int, int, Span]] = []
        for job, began in self.running.values():
            span = remaining(job.kin, now - began)
            ends.append((span.early, job.number, milli(job), span))
        heapq.heapify(ends)
        free, at, last = self.free, 0.0, Span(0.0, 0.0, 0.0)
        for job in self.line:
            while free < milli(job):
                at, _, freed, last = heapq.heappop(ends)
                free += freed
            free -= milli(job)
            own = remaining(job.kin, 0.0)
            then = Span(last.low + own.low, at + own.likely, last.high + own.high)
            heapq.heappush(ends, (at + own.early, job.number, milli(job), then))
        return Span(last.low, at, last.high)


def milli(job: Job) -> int:
    """Thousandths of GPUs."""
    return job.kin.gpus * job.kin.milli


def play(jobs: list[Job], seed: int, busy: float) -> dict[str, list[tuple[str, Span, float]]]:
    """(who foresaw, what, real) by what was foreseen."""
    dice, learned, last_two = random.Random(seed), Durations(), LastTwo()

    def by_learning(kin: Kin, age: float) -> Span:
        return learned.remaining(kin, age) or by_lease(kin, age)

    foreseers: dict[str, Foreseer] = {
        "learned": by_learning,
        "leases that nobody renews": by_lease,
        "mean of the user's last two": last_two.remaining,
    }
    half = len(jobs) // 2
    span = jobs[-1].at - jobs[half].at
    gpus = round(sum(milli(one) / 1000 * one.lasts for one in jobs[half:]) / span / busy)
    pool = Pool(jobs, max(gpus, 8), foreseers)
    told: dict[str, list[tuple[str, Span, float]]] = defaultdict(list)
    waiting: list[tuple[int, float, dict[str, Span]]] = []
    events = [(job.at, 0, job.number) for job in jobs]
    heapq.heapify(events)
    while events:
        now, kind, number = heapq.heappop(events)
        job = jobs[number]
        if kind == 1:
            del pool.running[number]
            pool.free += milli(job)
            learned.add(job.kin, job.lasts)
            last_two.add(job.kin, job.lasts)
        else:
            pool.line.append(job)
            if number >= half and pool.running:
                other, began = dice.choice([*pool.running.values()])
                left = began + other.lasts - now
                told["the rest of one that runs"] += [
                    (name, foresee(other.kin, now - began), left) for name, foresee in foreseers.items()
                ]
        for end, started in pool.start(now):
            heapq.heappush(events, (end, 1, started))
            if started >= half:
                length = jobs[started].lasts
                for name, foresee in foreseers.items():
                    told["a whole job"].append((name, foresee(jobs[started].kin, 0.0), length))
        if (
            kind == 0
            and number >= half
            and pool.line
            and pool.line[-1] is job
            and len(pool.line) <= MOST_FORESEEN
        ):
            waiting.append((number, now, {name: pool.foresee(now, one) for name, one in foreseers.items()}))
    for number, since, spans in waiting:
        if (wait := pool.began[number] - since) > 0:
            told["a wait"] += [(name, one, wait) for name, one in spans.items()]
    return told


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench waits", description=__doc__)
    folder = Path(os.environ.get("GPUSCALE_TRACES", "."))
    parser.add_argument("--pods", type=Path, default=folder / "openb_pod_list_default.csv")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if not given.pods.exists():
        print("no trace here: name it by --pods, or its folder by GPUSCALE_TRACES", flush=True)
        return
    print(
        "| what | foreseen by | cases | median of abs log error | to ours | in the range |\n| --- | --- | --- | --- | --- | --- |"
    )
    jobs, told = read_jobs(given.pods), dict[str, list[tuple[str, Span, float]]]()
    for busy in BUSY:
        for what, cases in play(jobs, given.seed, busy).items():
            told.setdefault(what, []).extend(cases)
    for what, cases in told.items():
        errors: dict[str, list[float]] = defaultdict(list)
        within: dict[str, list[bool]] = defaultdict(list)
        for name, span, real in cases:
            errors[name].append(abs(log(max(span.likely, 1.0) / max(real, 1.0))))
            within[name].append(span.low <= real <= span.high)
        ours = median(errors["learned"])
        for name, of in errors.items():
            inside = f"{100 * fmean(within[name]):.0f} %" if name == "learned" else ""
            print(
                f"| {what} | {name} | {len(of)} | {median(of):.2f} | {median(of) / ours:.2f} | {inside} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
