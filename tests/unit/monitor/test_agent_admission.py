"""Work is admitted under the highest fence seen on a GPU or a higher one, and processes are known by theirs."""

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.monitor.agent.admission import Admissions, FenceTooLow
from gpuscale.monitor.model.readings import GpuProcess, ProcessKey

PARENT, CHILD, OTHER = ProcessKey(10, 1), ProcessKey(11, 2), ProcessKey(12, 3)


def admitted(admissions: Admissions | FenceTooLow) -> Admissions:
    assert isinstance(admissions, Admissions)
    return admissions


def test_a_lower_fence_is_refused_and_the_same_is_not() -> None:
    one = admitted(Admissions().admit(["a"], 5, None))
    assert one.admit(["a"], 4, None) == FenceTooLow("a", 5)
    assert admitted(one.admit(["a"], 5, None)) == one
    assert admitted(one.admit(["a"], 6, None)).fences == {"a": 6}


def test_of_several_gpus_all_or_none_are_admitted() -> None:
    one = admitted(Admissions().admit(["a"], 5, None))
    assert one.admit(["b", "a"], 4, None) == FenceTooLow("a", 5)
    assert one.fences == {"a": 5}


def test_a_process_and_those_that_it_starts_have_its_fence_on_its_gpus() -> None:
    one = admitted(Admissions().admit(["a"], 5, PARENT))
    child, other = GpuProcess(11, lineage=(CHILD, PARENT)), GpuProcess(12, lineage=(OTHER,))
    assert [process.fence for process in one.mark("a", (child, other))] == [5, None]
    assert [process.fence for process in one.mark("b", (child,))] == [None]


def test_the_nearest_ancestor_counts() -> None:
    one = admitted(admitted(Admissions().admit(["a"], 5, PARENT)).admit(["a"], 6, CHILD))
    assert one.fence_of("a", (CHILD, PARENT)) == 6


def test_one_process_may_be_admitted_on_more_gpus_later() -> None:
    one = admitted(admitted(Admissions().admit(["a"], 5, PARENT)).admit(["b"], 5, PARENT))
    assert (one.fence_of("a", (PARENT,)), one.fence_of("b", (PARENT,))) == (5, 5)
    assert len(one.workers) == 1


def test_a_process_that_ended_is_forgotten_and_its_fence_is_not() -> None:
    one = admitted(Admissions().admit(["a"], 5, PARENT)).without_dead(lambda _: False)
    assert one.workers == ()
    assert one.admit(["a"], 4, None) == FenceTooLow("a", 5)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9))))
def test_the_fence_of_a_gpu_never_falls(asked: list[tuple[str, int]]) -> None:
    admissions, highest = Admissions(), dict.fromkeys("abc", 0)
    for uuid, fence in asked:
        after = admissions.admit([uuid], fence, None)
        assert isinstance(after, FenceTooLow) == (fence < highest[uuid])
        if isinstance(after, Admissions):
            admissions, highest[uuid] = after, fence
