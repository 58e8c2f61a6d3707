"""The rule of goals for servers of language models: the time to the first token, and between two tokens. Pure.

What one replica carries is learnt from what the endpoint itself went through. While its load is steady, it notes how many requests
each replica works on, and with that the requests and tokens a second, the latencies, and the queue. The load at which a latency
meets its goal is read off that, and with it the requests a second: what arrives, by that, is what is needed. A latency is known
only once a request is served and stays low while requests wait (ai-dynamo/dynamo issue 10528), so what arrives counts those that
join the queue, and what waits by the time that a new replica is ready is work on top.

As a start takes its time, what arrives is what may be there when it is over: the trend, and what came lately. Of that so much is
kept ready for that no more of the requests came at a higher rate than the percentile leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from gpuscale.autoscaler.domain.decisions import Code
from gpuscale.autoscaler.domain.inputs import (
    Aggregation,
    Carried,
    Inputs,
    InputSeries,
    Learnt,
    ObservationStatus,
)
from gpuscale.autoscaler.domain.rules.rule import Kind, Proposal, Rule, ceiling
from gpuscale.autoscaler.domain.serving import PREFIX, WINDOW

UNTRIED = 2.0
"""Of the largest load that was seen a replica is trusted with so much at most, and no more than its latencies leave room for."""
STEADY, STEADY_FOR = 0.4, WINDOW + 15.0
"""Share by which the load may differ where it counts as steady, and for how many seconds: latencies tell of the past."""
FULL = 0.8
"""Share of its load that a replica is given of which nothing is known but that requests queue."""
UNEVEN = 1.5
"""How much more than the mean the fullest replica may have where the load counts as even."""
STEP = 1.25
"""Loads that are noted apart differ by this factor."""
NEWEST = 0.3
"""What the newest latencies weigh in those of a load."""
FORGOTTEN = 24 * 3600.0
"""Seconds after which a load that was not seen again is forgotten."""
CATCH_UP = 30.0
"""Seconds in which what waits is to be worked off once new replicas are ready."""
STARTUP = 60.0
"""Seconds that a start is taken to last until one was seen."""
KEPT_STARTS, SHORTEST_KEPT, LONGEST_KEPT = 4.0, 120.0, 900.0
"""What came in so many start-up times, within bounds in seconds, may come again."""


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """What one replica carries within the goals: requests that it works on, requests and tokens a second, and the goal that binds."""

    load: float
    requests: float
    tokens: float
    binds: str
    fastest: float  # requests a second that it was seen to serve at most, whatever the goals


@dataclass(frozen=True, slots=True)
class SloRule(Kind):
    """As many replicas as hold the goals: seconds to the first token (`ttft`) and between two tokens (`itl`)."""

    ttft: float | None = None
    itl: float | None = None
    percentile: float = 95.0
    proportional: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    reads_signal: ClassVar[bool] = False

    @property
    def goals(self) -> Mapping[str, float]:
        """The goals that there are, in seconds."""
        return {name: goal for name in ("ttft", "itl") if (goal := getattr(self, name)) is not None}

    @property
    def metrics(self) -> Mapping[str, tuple[str, Aggregation]]:
        """As `Kind.metrics`."""
        found = {
            "running": (f"{PREFIX}running", Aggregation.AVG),
            "fullest": (f"{PREFIX}running", Aggregation.MAX),
            "waiting": (f"{PREFIX}waiting", Aggregation.SUM),
            "requests": (f"{PREFIX}requests_per_second", Aggregation.SUM),
            "served": (f"{PREFIX}served_per_second", Aggregation.SUM),
            "tokens": (f"{PREFIX}generated_tokens_per_second", Aggregation.SUM),
        }
        latencies = {
            goal: (f"{PREFIX}{goal}_p{self.percentile:g}_seconds", Aggregation.MAX) for goal in self.goals
        }
        return found | latencies

    @property
    def past(self) -> float:
        """As far back as arrivals may come again."""
        return LONGEST_KEPT

    def also_reads(self, signals: Iterable[str]) -> frozenset[str]:
        """Its own signals, those that end with a name of its metrics."""
        return frozenset(one for one in signals if one.rpartition(".")[2] in self.metrics)

    def propose(self, rule: Rule, value: float, inputs: Inputs) -> Proposal:
        """As many replicas as carry what arrives, and what waits, within the goals."""
        before, seen = inputs.before, self._seen(rule, inputs)
        remembered = inputs.bursts.get(rule.id)
        learnt = remembered if isinstance(remembered, Learnt) else Learnt((), inputs.ready, inputs.now)
        if before == 0:
            return Proposal(1, "without a replica nobody tells what arrives: at least 1", burst=learnt)
        if absent := [name for name in ("running", "waiting", "requests", "served") if name not in seen]:
            text = f"{rule.id}.{absent[0]} cannot be had"
            return Proposal(before, text, code=Code.SIGNAL_MISSING, burst=learnt)
        running, requests = seen["running"], seen["requests"]
        untold = [goal for goal in self.goals if goal not in seen]
        if not untold:
            learnt = self._learnt(learnt, rule, seen, inputs)
        capacity = self.capacity(learnt.carried)
        late = {goal: seen[goal] / most for goal, most in self.goals.items() if goal in seen}
        shown = ", ".join(f"{goal} {_time(seen[goal])} of {_time(self.goals[goal])}" for goal in late)
        said = f"{shown or 'no latency is told'}; {running:.3g} requests each, {requests:.3g}/s"
        if capacity is None:
            # Those that are on their way count, or each evaluation would double what the one before asked for.
            short = requests / seen["served"] if seen["served"] > 0 and seen["waiting"] > 0 else 1.0
            worst = max(min(2.0, max(late.values(), default=0.0)), short)
            count = max(before, ceiling(inputs.serving * worst)) if worst > 1 else before
            text = f"{said}; what a replica carries is not known yet"
            return Proposal(count, text, count != before, burst=learnt)
        needed, why = self._needed(rule, seen, capacity, inputs)
        count = max(1, ceiling(needed))
        text = f"{said}; {capacity.binds} binds: each carries {capacity.requests:.3g}/s"
        text += f" and {capacity.tokens:.4g} tokens/s with {capacity.load:.3g} requests; {why}: {count}"
        if count < before and untold and running > 0:
            return Proposal(
                before, f"{text}, but no {untold[0]} is told", code=Code.SIGNAL_MISSING, burst=learnt
            )
        return Proposal(count, text, count != before, burst=learnt)

    def _seen(self, rule: Rule, inputs: Inputs) -> dict[str, float]:
        """What its signals show, of those that can be had."""
        found = {name: inputs.observations.get(f"{rule.id}.{name}") for name in self.metrics}
        return {
            name: one.value
            for name, one in found.items()
            if one is not None and one.value is not None and one.status is ObservationStatus.OK
        }

    def _learnt(self, learnt: Learnt, rule: Rule, seen: Mapping[str, float], inputs: Inputs) -> Learnt:
        """What is known with what is seen now, if that was so for a while."""
        now, ready, serving = inputs.now, inputs.ready, inputs.serving
        if ready != learnt.ready:
            return Learnt(learnt.carried, ready, now)
        history = inputs.history(f"{rule.id}.running")
        part = history.since(now - STEADY_FOR).values
        if not part or not ready or now - learnt.since < STEADY_FOR or not history.covers(now - STEADY_FOR):
            return learnt
        load = math.fsum(part) / len(part)
        if load <= 0 or max(part) - min(part) > STEADY * load + 1:
            return learnt
        fullest = inputs.history(f"{rule.id}.fullest").since(now - STEADY_FOR).values
        if max(fullest, default=0.0) > UNEVEN * load + 4:
            return learnt  # the latencies are those of a few that are full, and the load that of all
        new = Carried(
            load,
            seen["served"] / serving,
            seen.get("tokens", 0.0) / serving,
            seen["waiting"] / serving,
            seen.get("ttft"),
            seen.get("itl"),
            now,
        )
        place = round(math.log(load, STEP))
        kept = [one for one in learnt.carried if now - one.at <= FORGOTTEN]
        same = next((one for one in kept if round(math.log(one.load, STEP)) == place), None)
        others = [one for one in kept if one is not same]
        newest = new if same is None else _mixed(same, new)
        return Learnt(tuple(sorted((*others, newest), key=lambda one: one.load)), ready, learnt.since)

    def capacity(self, carried: Sequence[Carried]) -> ReplicaCapacity | None:
        """What one replica carries within the goals; None while nothing is known.

        A latency that is beyond its goal with a single request stays so with more replicas: it binds nothing.
        """
        if not carried:
            return None
        loads = [one.load for one in carried]
        found: list[tuple[float, str]] = []
        for goal, most in self.goals.items():
            told = [(one, late) for one in carried if (late := _latency(one, goal)) is not None]
            if told:
                found.append((_reached(told, most, queues=goal == "ttft"), goal))
        if not found:
            return None
        load, binds = min(found)
        requests = _between(loads, [one.requests for one in carried], load)
        tokens = _between(loads, [one.tokens for one in carried], load)
        fastest = max(requests, *(one.requests for one in carried))
        return ReplicaCapacity(load, requests, tokens, binds, fastest) if requests > 0 else None

    def _needed(
        self, rule: Rule, seen: Mapping[str, float], capacity: ReplicaCapacity, inputs: Inputs
    ) -> tuple[float, str]:
        """Replicas that what may arrive needs, and what waits when a new one is ready; and that in words."""
        startup = STARTUP if inputs.startup is None else inputs.startup
        history = inputs.history(f"{rule.id}.requests")
        kept = min(LONGEST_KEPT, max(SHORTEST_KEPT, KEPT_STARTS * startup))
        usual = _usual(history.since(inputs.now - kept), self.percentile)
        ahead = min(_trend(history, inputs.now, startup), max(usual, 1.5 * seen["requests"]))
        arrivals = max(seen["requests"], usual, ahead)
        waiting = seen.get("waiting", 0.0)
        if waiting:
            growth = inputs.history(f"{rule.id}.waiting").slope(inputs.now - WINDOW) or 0.0
            waiting = max(0.0, waiting + growth * startup)
        needed = arrivals / capacity.requests + waiting / (capacity.fastest * CATCH_UP)
        why = f"{arrivals:.3g}/s may arrive within {startup:.3g} s"
        return needed, f"{why}, and {waiting:.3g} wait then" if waiting else why

    def problems(self, signals: Collection[str]) -> Iterator[tuple[str, str]]:
        """No goal at all, and a percentile that is none of a server's histogram."""
        if not self.goals:
            yield "ttft", "must be set, or itl"
        if self.percentile != int(self.percentile) or not 50 <= self.percentile <= 99:
            yield "percentile", "must be a whole number from 50 to 99"


def _mixed(old: Carried, new: Carried) -> Carried:
    def mix(one: float, other: float) -> float:
        return one + NEWEST * (other - one)

    def known(one: float | None, other: float | None) -> float | None:
        return other if one is None else one if other is None else mix(one, other)

    return Carried(
        mix(old.load, new.load),
        mix(old.requests, new.requests),
        mix(old.tokens, new.tokens),
        mix(old.waiting, new.waiting),
        known(old.ttft, new.ttft),
        known(old.itl, new.itl),
        new.at,
    )


def _latency(one: Carried, goal: str) -> float | None:
    return one.ttft if goal == "ttft" else one.itl


def _reached(told: Sequence[tuple[Carried, float]], goal: float, *, queues: bool) -> float:
    """The load at which a latency, which a queue makes longer where it `queues`, reaches its goal; at least 1."""
    # What a larger load was within, a smaller one is: what was noted of it came from a queue before that.
    late = [min(one for _, one in told[place:]) for place in range(len(told))]
    loads = [one.load for one, _ in told]
    if late[-1] <= goal:
        more = UNTRIED if late[-1] <= 0 else min(UNTRIED, goal / late[-1])
        return max(1.0, loads[-1] * more)
    above = next(place for place, one in enumerate(late) if one > goal)
    if above == 0:
        # A queue makes the time to the first token as long as it likes; without one it would not be that of the goal.
        return max(1.0, loads[0] * max(goal / late[0], FULL if queues and told[0][0].waiting >= 1 else 0.0))
    low, high = late[above - 1], late[above]
    reached = loads[above - 1] + (loads[above] - loads[above - 1]) * (goal - low) / (high - low)
    if queues and told[above][0].waiting >= 1:  # it begins somewhere between the two, and not in proportion
        reached = max(reached, min(UNTRIED * loads[above - 1], FULL * loads[above]))
    return max(1.0, reached)


def _between(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """The value at a place: on the line between its neighbours, and beyond the last in proportion.

    Below the first, which was too much, tokens came more slowly: with fewer requests a replica does less by less than that.
    """
    if at <= places[0]:
        return values[0] * math.sqrt(at / places[0])
    if at >= places[-1]:
        return values[-1] * at / places[-1]
    for (low, first), (high, last) in pairwise(zip(places, values, strict=True)):
        if at <= high:
            return first + (last - first) * (at - low) / (high - low)
    return values[-1]


def _usual(history: InputSeries, percentile: float) -> float:
    """The least rate that not more than the rest beyond the percentile of all requests came faster than."""
    spans = [
        (rate, later - at)
        for (at, later), rate in zip(pairwise(history.times), history.values[1:], strict=False)
    ]
    rest = (1 - percentile / 100) * math.fsum(rate * span for rate, span in spans)
    for rate, span in sorted(spans, reverse=True):
        rest -= rate * span
        if rest < 0:
            return rate
    return 0.0


def _trend(history: InputSeries, now: float, ahead: float) -> float:
    """The rate after so many seconds, by the growth from one window to the next."""
    newest, older = history.mean(now - WINDOW), history.since(now - 2 * WINDOW)
    before = [value for at, value in zip(older.times, older.values, strict=True) if at < now - WINDOW]
    if newest is None or not before:
        return 0.0
    return newest + (newest - math.fsum(before) / len(before)) / WINDOW * ahead


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
