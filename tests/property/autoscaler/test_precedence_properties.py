"""Who gives way, for any fleet: enough on one node, nothing needless, nobody below its min."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.autoscaler.domain.precedence import Holder, NodeRoom, choose

RESERVATIONS = [f"{endpoint}{number}" for endpoint in "abc" for number in range(5)]
GPUS = st.frozensets(st.sampled_from([*RESERVATIONS, "x"]), min_size=1, max_size=2)
ROOMS = st.lists(st.builds(NodeRoom, st.integers(0, 2), st.lists(GPUS, max_size=5).map(tuple)), max_size=4)


@given(
    gpus=st.integers(1, 3),
    rooms=ROOMS,
    coming=st.frozensets(st.sampled_from(RESERVATIONS), max_size=4),
    priorities=st.dictionaries(st.sampled_from(RESERVATIONS), st.integers(-2, 2)),
    spare=st.fixed_dictionaries({one: st.integers(-1, 4) for one in "abc"}),
    counted=st.integers(0, 2),
    more=st.integers(0, 4),
)
def test_what_is_freed_serves_those_it_is_freed_for_and_no_less_would(
    gpus: int,
    rooms: list[NodeRoom],
    coming: frozenset[str],
    priorities: dict[str, int],
    spare: dict[str, int],
    counted: int,
    more: int,
) -> None:
    there = {one: priority for one, priority in priorities.items() if one not in coming}
    holders = {one: Holder(one[0], one, priority, int(one[1])) for one, priority in there.items()}
    found = choose(gpus, rooms, coming, holders, spare, counted=counted, more=more)
    assert found == choose(
        gpus, rooms, coming, dict(reversed(holders.items())), spare, counted=counted, more=more
    )
    victims = [one for way in found for one in way]
    assert len(victims) == len(set(victims)), "nobody gives way twice"
    assert set(victims) <= holders.keys()
    given = Counter(one[0] for one in victims)
    assert all(count <= max(0, spare[endpoint]) for endpoint, count in given.items())

    def served(ending: frozenset[str]) -> int:
        return sum((room.free + sum(gpu <= ending for gpu in room.held)) // gpus for room in rooms)

    before, ending = served(coming), coming
    for way in found:
        ending |= way
        assert served(ending) >= min(before + 1, counted + more), "each makes room for one more"
        before = max(served(ending), before)
    assert len(found) <= more
    if found:
        last = found[-1]
        assert all(served(ending - {one}) < served(ending) or one in coming for one in last)
