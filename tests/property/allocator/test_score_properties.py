"""The score stays in its range and grows with what it should grow with; a pick obeys the ask."""

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.allocator.domain.model import Ask, Node, NodeState, Pick, Weights
from tests.support.allocator_values import NOW, gpu
from tests.support.placing import explained, obstacle, place

totals = st.integers(1, 200_000)
percents = st.floats(0, 100)


@given(total=totals, data=st.data(), utilization=st.none() | percents)
def test_the_default_score_is_between_0_and_1(
    total: int, data: st.DataObject, utilization: float | None
) -> None:
    free = data.draw(st.integers(0, total))
    score = explained(gpu(free=free, total=total, utilization=utilization), Weights())
    assert 0 <= score.total <= 1
    assert score.total == sum(part.value * part.weight for part in score.parts if part.value is not None)


@given(total=totals, data=st.data(), utilization=percents)
def test_more_free_memory_and_less_use_never_score_less(
    total: int, data: st.DataObject, utilization: float
) -> None:
    free = data.draw(st.integers(0, total))
    more = data.draw(st.integers(free, total))
    less_used = data.draw(st.floats(0, utilization))
    base = explained(gpu(free=free, total=total, utilization=utilization), Weights()).total
    assert explained(gpu(free=more, total=total, utilization=utilization), Weights()).total >= base
    assert explained(gpu(free=free, total=total, utilization=less_used), Weights()).total >= base
    assert explained(gpu(free=free, total=total, utilization=None), Weights()).total <= base


@st.composite
def fleets(draw: st.DrawFn) -> list[Node]:
    """Up to four nodes with up to five GPUs of every sort."""
    nodes = []
    for rank in range(draw(st.integers(0, 4))):
        gpus = [
            gpu(
                f"{rank}-{index}",
                index=index,
                total=draw(st.sampled_from([None, 100, 200])),
                free=draw(st.sampled_from([None, 0, 50, 100])),
                utilization=draw(st.sampled_from([None, 0.0, 49.0, 50.0, 100.0])),
                trouble=draw(st.sampled_from(["", "", "HUNG"])),
                fresh_until=NOW + draw(st.sampled_from([-1, 3])),
            )
            for index in range(draw(st.integers(0, 5)))
        ]
        nodes.append(Node(f"n{rank}", rank, draw(st.sampled_from(NodeState)), tuple(gpus)))
    return nodes


@given(
    nodes=fleets(),
    held=st.sets(st.sampled_from([f"{rank}-{index}" for rank in range(4) for index in range(5)])),
    count=st.integers(1, 6),
    memory=st.sampled_from([0, 50, 101]),
    limit=st.sampled_from([50.0, 100.0]),
    unknown=st.booleans(),
    shuffle=st.randoms(use_true_random=False),
)
def test_a_pick_obeys_the_ask_and_a_refusal_is_true(
    nodes, held, count, memory, limit, unknown, shuffle
) -> None:
    """Every GPU picked fits and is of one node; a refusal means that no node has enough that fit."""
    wish = Ask(count, memory * 1024 * 1024, limit, unknown)
    fits = {
        node.id: {one.uuid for one in node.gpus if obstacle(node, one, held, wish, NOW) is None}
        for node in nodes
    }
    answer = place(nodes, held, wish, NOW)
    if isinstance(answer, Pick):
        chosen = {one.uuid for one in answer.gpus}
        assert len(chosen) == count
        assert {one.node for one in answer.gpus} == {answer.gpus[0].node}
        assert chosen <= fits[answer.gpus[0].node]
        assert not chosen & held
    else:
        assert all(len(fitting) < count for fitting in fits.values())
        assert sum(answer.obstacles.values()) == sum(len(node.gpus) - len(fits[node.id]) for node in nodes)
        assert answer.message
    shuffled = list(nodes)
    shuffle.shuffle(shuffled)
    assert place(shuffled, held, wish, NOW) == answer
