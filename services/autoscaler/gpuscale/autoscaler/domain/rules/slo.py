"""A rule with latency goals for language model servers: time to the first token, and time between tokens. Pure.

The capacity of a replica is learned from the endpoint's own history. While its load is steady, the rule records requests in
work per replica, with requests and tokens per second, latencies and queue. From these it derives the load at which a latency
reaches its goal, and the requests per second at that load; arrivals divided by that are the replicas needed. A latency is only
known once a request is served and stays low while requests wait (ai-dynamo/dynamo issue 10528), so arrivals include those that
join the queue, and what waits when a new replica is ready is extra work.

Since a start takes time, arrivals are predicted for when it is over: from the trend, and from recent arrivals. Of these, enough
is kept ready that only the requests beyond the percentile came at a higher rate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from gpuscale.autoscaler.domain.decisions import Code
from gpuscale.autoscaler.domain.inputs import Aggregation, Carried, Inputs, InputSeries, Learnt
from gpuscale.autoscaler.domain.rules.rule import Kind, Proposal, Rule, ceiling
from gpuscale.autoscaler.domain.serving import PREFIX, WINDOW

UNTRIED = 2.0
"""A replica is given at most this much of the largest load seen, and no more than its latencies leave room for."""
STEADY, STEADY_FOR = 0.4, WINDOW + 15.0
"""The share by which a steady load may vary, and for how many seconds: latencies lag."""
FULL = 0.8
"""The share of its load for a replica of which only queueing is known."""
UNEVEN = 1.5
"""How much more than the mean the fullest replica may have for the load to count as even."""
STEP = 1.25
"""Recorded loads differ by this factor."""
NEWEST = 0.3
"""The weight of the newest latencies at a load."""
FORGOTTEN = 24 * 3600.0
"""Seconds after which a load that was not seen again is forgotten."""
CATCH_UP = 30.0
"""Seconds to work off what waits once new replicas are ready."""
STARTUP = 60.0
"""The assumed start-up time, in seconds, until one was seen."""
KEPT_STARTS, SHORTEST_KEPT, LONGEST_KEPT = 4.0, 120.0, 900.0
"""Arrivals of so many start-up times, within bounds in seconds, may come again."""


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """Capacity of a replica within the goals: requests in work, requests and tokens per second, and the binding goal."""

    load: float
    requests: float
    tokens: float
    binds: str
    fastest: float  # most requests per second that it was seen to serve, whatever the goals


@dataclass(frozen=True, slots=True)
class SloRule(Kind):
    """The replicas that meet the goals: seconds to the first token (`ttft`) and between tokens (`itl`)."""

    ttft: float | None = None
    itl: float | None = None
    percentile: float = 95.0
    proportional: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    reads_signal: ClassVar[bool] = False

    @property
    def goals(self) -> Mapping[str, float]:
        """The goals that are set, in seconds."""
        return {name: goal for name in ("ttft", "itl") if (goal := getattr(self, name)) is not None}

    @property
    def metrics(self) -> Mapping[str, tuple[str, Aggregation]]:
        """See `Kind.metrics`."""
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
        """Its own signals: those that end with a name of its metrics."""
        return frozenset(one for one in signals if one.rpartition(".")[2] in self.metrics)

    def propose(self, rule: Rule, value: float, inputs: Inputs) -> Proposal:
        """The replicas that serve what arrives, and what waits, within the goals."""
        before = inputs.before
        seen = {name: one for name in self.metrics if (one := inputs.value(f"{rule.id}.{name}")) is not None}
        remembered = inputs.bursts.get(rule.id)
        learnt = remembered if isinstance(remembered, Learnt) else Learnt((), inputs.ready, inputs.now)
        if before == 0:
            return Proposal(1, "arrivals are unknown without a replica: at least 1", burst=learnt)
        if absent := [name for name in ("running", "waiting", "requests", "served") if name not in seen]:
            text = f"{rule.id}.{absent[0]} is not available"
            return Proposal(before, text, code=Code.SIGNAL_MISSING, burst=learnt)
        running, requests = seen["running"], seen["requests"]
        untold = [goal for goal in self.goals if goal not in seen]
        if not untold:
            learnt = self._learnt(learnt, rule, seen, inputs)
        capacity = self.capacity(learnt.carried)
        late = {goal: seen[goal] / most for goal, most in self.goals.items() if goal in seen}
        shown = ", ".join(f"{goal} {_time(seen[goal])} of {_time(self.goals[goal])}" for goal in late)
        said = f"{shown or 'no latency is reported'}; {running:.3g} requests each, {requests:.3g}/s"
        if capacity is None:
            # Starting ones count, or each evaluation would double the previous one's request.
            short = requests / seen["served"] if seen["served"] > 0 and seen["waiting"] > 0 else 1.0
            worst = max(min(2.0, max(late.values(), default=0.0)), short)
            count = max(before, ceiling(inputs.serving * worst)) if worst > 1 else before
            text = f"{said}; the capacity of a replica is not known yet"
            return Proposal(count, text, count != before, burst=learnt)
        startup = STARTUP if inputs.startup is None else inputs.startup
        history = inputs.history(f"{rule.id}.requests")
        kept = min(LONGEST_KEPT, max(SHORTEST_KEPT, KEPT_STARTS * startup))
        usual = _usual(history.since(inputs.now - kept), self.percentile)
        ahead = min(_trend(history, inputs.now, startup), max(usual, 1.5 * requests))
        arrivals = max(requests, usual, ahead)
        why = f"{arrivals:.3g}/s may arrive within {startup:.3g} s"
        waiting = seen["waiting"]  # when a new replica is ready
        if waiting:
            growth = inputs.history(f"{rule.id}.waiting").slope(inputs.now - WINDOW) or 0.0
            waiting = max(0.0, waiting + growth * startup)
        if waiting:
            why += f", and {waiting:.3g} wait then"
        count = max(1, ceiling(arrivals / capacity.requests + waiting / (capacity.fastest * CATCH_UP)))
        text = f"{said}; {capacity.binds} binds: each carries {capacity.requests:.3g}/s"
        text += f" and {capacity.tokens:.4g} tokens/s with {capacity.load:.3g} requests; {why}: {count}"
        if count < before and untold and running > 0:
            return Proposal(
                before, f"{text}, but {untold[0]} is not reported", code=Code.SIGNAL_MISSING, burst=learnt
            )
        return Proposal(count, text, count != before, burst=learnt)

    def _learnt(self, learnt: Learnt, rule: Rule, seen: Mapping[str, float], inputs: Inputs) -> Learnt:
        """The knowledge updated with a steady load."""
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
            return learnt  # the latencies are those of a few full ones, and the load that of all
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
        """The capacity of a replica within the goals; None while nothing is known.

        A latency beyond its goal with a single request stays so with more replicas: it does not bind.
        """
        if not carried:
            return None
        loads = [one.load for one in carried]
        found: list[tuple[float, str]] = []
        for goal, most in self.goals.items():
            lates = ((one, one.ttft if goal == "ttft" else one.itl) for one in carried)
            told = [(one, late) for one, late in lates if late is not None]
            if told:
                found.append((_reached(told, most, queues=goal == "ttft"), goal))
        if not found:
            return None
        load, binds = min(found)
        requests = _between(loads, [one.requests for one in carried], load)
        tokens = _between(loads, [one.tokens for one in carried], load)
        fastest = max(requests, *(one.requests for one in carried))
        return ReplicaCapacity(load, requests, tokens, binds, fastest) if requests > 0 else None

    def problems(self, signals: Collection[str]) -> Iterator[tuple[str, str]]:
        """No goals at all, or an unsupported percentile."""
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


def _reached(told: Sequence[tuple[Carried, float]], goal: float, *, queues: bool) -> float:
    """The load at which a latency, which a queue increases if it `queues`, reaches its goal; at least 1."""
    # If a larger load met the goal, a smaller one does: its recorded latency came from an earlier queue.
    late = [min(one for _, one in told[place:]) for place in range(len(told))]
    loads = [one.load for one, _ in told]
    if late[-1] <= goal:
        more = UNTRIED if late[-1] <= 0 else min(UNTRIED, goal / late[-1])
        return max(1.0, loads[-1] * more)
    above = next(place for place, one in enumerate(late) if one > goal)
    if above == 0:
        # A queue makes the time to the first token arbitrarily long; without one it would not reach the goal.
        return max(1.0, loads[0] * max(goal / late[0], FULL if queues and told[0][0].waiting >= 1 else 0.0))
    low, high = late[above - 1], late[above]
    reached = loads[above - 1] + (loads[above] - loads[above - 1]) * (goal - low) / (high - low)
    if queues and told[above][0].waiting >= 1:  # it begins somewhere between the two, and not in proportion
        reached = max(reached, min(UNTRIED * loads[above - 1], FULL * loads[above]))
    return max(1.0, reached)


def _between(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Interpolate the value at a place; beyond the last, in proportion.

    Below the first, which was too much, tokens came more slowly: with fewer requests a replica slows down by less than that.
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
    """The least rate that only the requests beyond the percentile came faster than."""
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
    """The rate after `ahead` seconds, by the growth from one window to the next."""
    newest, older = history.mean(now - WINDOW), history.since(now - 2 * WINDOW)
    before = [value for at, value in zip(older.times, older.values, strict=True) if at < now - WINDOW]
    if newest is None or not before:
        return 0.0
    return newest + (newest - math.fsum(before) / len(before)) / WINDOW * ahead


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
