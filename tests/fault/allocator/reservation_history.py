"""What clients saw of an allocator, and whether it can be true of one that keeps its promises.

A grant is provably held from its acknowledgement until its release was asked for, or until the time of the last
acknowledged call about it plus the remaining time that its answer named, counted from when the call was sent: the
server's deadline is not earlier than that. Only what is provable is judged, so a correct allocator is never accused,
whatever is killed or paused. (The method of the lease study behind this project: ten planted bugs, each found.)
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

NEVER = float("inf")
WHOLE = 1000
Holds = dict[str, int]
"""Thousandths of GPUs, by UUID."""


@dataclass
class Grant:
    """An acknowledged reservation. Times are seconds of one clock of the test."""

    request_id: str
    name: str
    fence: int
    holds: Holds
    sent: float
    acked: float
    held_until: float
    released: float = NEVER

    @property
    def until(self) -> float:
        """Until when it is provably held."""
        return min(self.held_until, self.released)


@dataclass(frozen=True)
class Sighting:
    """One complete list of what is held: the GPUs by reservation, and the requests that the reservations are of."""

    sent: float
    received: float
    listed: dict[str, Holds]
    requests: frozenset[str] = frozenset()


@dataclass
class History:
    """Everything that clients saw."""

    grants: list[Grant] = field(default_factory=list[Grant])
    sightings: list[Sighting] = field(default_factory=list[Sighting])
    repetitions: list[tuple[Grant, str, int]] = field(default_factory=list[tuple[Grant, str, int]])
    """A grant, and the name and fence that a repetition of its request was answered with."""
    batches: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    """Requests that were asked for in one batch, and are released in one."""
    oddities: list[str] = field(default_factory=list[str])
    """Answers that no allocator should give, in words."""

    def violations(self) -> list[str]:
        """All broken promises, in words; empty for a history that can be true."""
        return [
            *self.oddities,
            *self._overlaps(),
            *self._double_listings(),
            *self._torn_batches(),
            *self._lost_grants(),
            *self._fences(),
            *self._repetitions(),
        ]

    def _overlaps(self) -> list[str]:
        """GPUs of which more than there is was provably held at one moment."""
        changes: dict[str, list[tuple[float, int, int, str]]] = defaultdict(list)
        for grant in self.grants:
            if grant.acked < grant.until:
                for uuid, milli in grant.holds.items():
                    changes[uuid] += [
                        (grant.acked, 1, milli, grant.name),
                        (grant.until, 0, -milli, grant.name),
                    ]
        found: list[str] = []
        for uuid, moments in changes.items():
            held: dict[str, int] = {}
            for _, _, milli, name in sorted(moments):
                held[name] = held.get(name, 0) + milli
                if milli > 0 and sum(held.values()) > WHOLE:
                    holders = " and ".join(sorted(one for one, share in held.items() if share))
                    found.append(f"double allocation: {uuid} was held by {holders}")
        return found

    def _double_listings(self) -> list[str]:
        found: list[str] = []
        for sighting in self.sightings:
            total: Counter[str] = Counter()
            for holds in sighting.listed.values():
                total.update(holds)
            found += (
                f"{uuid} was listed beyond what there is" for uuid, milli in total.items() if milli > WHOLE
            )
        return found

    def _torn_batches(self) -> list[str]:
        return [
            f"batch torn: of {len(batch)} requests {len(sighting.requests.intersection(batch))} were listed"
            for sighting in self.sightings
            for batch in self.batches
            if 0 < len(sighting.requests.intersection(batch)) < len(batch)
        ]

    def _lost_grants(self) -> list[str]:
        return [
            f"acknowledged grant lost: {grant.name} was not listed as granted"
            for sighting in self.sightings
            for grant in self.grants
            if grant.acked <= sighting.sent
            and sighting.received <= grant.until
            and sighting.listed.get(grant.name) != grant.holds
        ]

    def _fences(self) -> list[str]:
        found = [
            f"fence {fence} was given {times} times"
            for fence, times in Counter(grant.fence for grant in self.grants).items()
            if times > 1
        ]
        highest, at = 0, ""
        by_ack = sorted(self.grants, key=lambda grant: grant.acked)
        acked = iter(by_ack)
        following = next(acked, None)
        for grant in sorted(self.grants, key=lambda grant: grant.sent):
            while following is not None and following.acked <= grant.sent:
                if following.fence > highest:
                    highest, at = following.fence, following.name
                following = next(acked, None)
            if grant.fence <= highest:
                found.append(f"fence went back: {grant.name} has {grant.fence} after {at} had {highest}")
        return found

    def _repetitions(self) -> list[str]:
        found = [
            f"request of {grant.name} was answered with {name} when repeated"
            for grant, name, fence in self.repetitions
            if (name, fence) != (grant.name, grant.fence)
        ]
        names: dict[str, set[str]] = defaultdict(set)
        for grant in self.grants:
            names[grant.request_id].add(grant.name)
        return found + [f"one request made {sorted(made)}" for made in names.values() if len(made) > 1]
