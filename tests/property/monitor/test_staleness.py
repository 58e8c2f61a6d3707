"""Time alone never makes anything look better."""

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.monitor.agent.device import ReadDeadlines, view
from gpuscale.monitor.model.nodes import Epoch, NodeSample, NodeState, is_gone, node_state
from gpuscale.monitor.model.readings import GPU_FIELDS, GpuState, Timed
from tests.support.monitor_values import identity, sample

times = st.floats(0, 1e6)
spans = st.floats(0, 1e4)
# What a source can say of a GPU that answered.
states = st.sampled_from([GpuState.OK, GpuState.DEGRADED, GpuState.LOST, GpuState.RESET_REQUIRED])
WORSE = {GpuState.OK: 0, GpuState.DEGRADED: 0, GpuState.SLOW: 1, GpuState.HUNG: 2}
NODE_ORDER = [NodeState.ONLINE, NodeState.STALE, NodeState.OFFLINE]


@given(read_at=times, took=spans, ordered=spans, first=spans, later=spans, state=states)
def test_a_silent_gpu_only_gets_worse(
    read_at: float, took: float, ordered: float, first: float, later: float, state: GpuState
) -> None:
    last = Timed(sample(state=state), ordered_at=read_at - took, read_at=read_at)
    ordered_at = read_at + ordered
    shown = [
        view(identity(), last, ordered_at=ordered_at, now=now, deadlines=ReadDeadlines())
        for now in (ordered_at + first, ordered_at + first + later)
    ]
    if all(one.state in WORSE for one in shown):
        assert WORSE[shown[0].state] <= WORSE[shown[1].state]
    else:
        assert state in {GpuState.LOST, GpuState.RESET_REQUIRED}


@given(read_at=times, waiting=spans, state=states, ever=st.booleans())
def test_readings_are_shown_only_of_a_gpu_that_is_not_hung(
    read_at: float, waiting: float, state: GpuState, ever: bool
) -> None:
    last = Timed(sample(state=state), ordered_at=read_at, read_at=read_at) if ever else None
    shown = view(identity(), last, ordered_at=read_at, now=read_at + waiting, deadlines=ReadDeadlines())
    known = [name for name in GPU_FIELDS if getattr(shown.reading, name) is not None]
    assert not known or (ever and shown.state is not GpuState.HUNG)


@given(sampled_at=times, period=st.floats(0.1, 3600), now=times, later=spans, streaming=st.booleans())
def test_a_node_that_says_nothing_only_gets_worse(
    sampled_at: float, period: float, now: float, later: float, streaming: bool
) -> None:
    last = NodeSample(Epoch(0.0, "a"), 1, sampled_at, period)
    before, after = (node_state(last, streaming=streaming, now=at) for at in (now, now + later))
    assert NODE_ORDER.index(before) <= NODE_ORDER.index(after)
    assert is_gone(last, streaming=streaming, now=now) <= is_gone(last, streaming=streaming, now=now + later)
