"""Work is admitted under the highest fence seen on a GPU or a higher one, and processes are known by theirs."""

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.monitor.model.admission import DEAD_KEPT, Admissions, FenceTooLow, Holders
from gpuscale.monitor.model.readings import GpuProcess, ProcessKey

PARENT, CHILD, OTHER = ProcessKey(10, 1), ProcessKey(11, 2), ProcessKey(12, 3)


def admitted(admissions: Admissions | FenceTooLow) -> Admissions:
    assert isinstance(admissions, Admissions)
    return admissions


def of(admissions: Admissions, uuid: str, *lineage: ProcessKey) -> str | None:
    [process] = Holders().mark(admissions, uuid, (GpuProcess(lineage[0].pid, lineage=lineage),))
    return process.reservation


def test_a_lower_fence_is_refused_and_the_same_is_not() -> None:
    one = admitted(Admissions().admit(["a"], "reservations/r5", 5, None))
    assert one.admit(["a"], "reservations/r4", 4, None) == FenceTooLow("a", 5)
    assert admitted(one.admit(["a"], "reservations/r5", 5, None)) == one
    assert admitted(one.admit(["a"], "reservations/r6", 6, None)).fences == {"a": 6}


def test_reservations_of_shares_of_one_gpu_are_admitted_in_any_order() -> None:
    """Each is asked for while both hold the GPU; once the older has ended, it is over."""
    one = admitted(Admissions().admit(["a"], "reservations/r5", 5, PARENT, lowest={"a": 4}))
    both = admitted(one.admit(["a"], "reservations/r4", 4, OTHER, lowest={"a": 4}))
    assert (of(both, "a", PARENT), of(both, "a", OTHER)) == ("reservations/r5", "reservations/r4")
    younger = admitted(both.admit(["a"], "reservations/r5", 5, CHILD, lowest={"a": 5}))
    assert younger.admit(["a"], "reservations/r4", 4, OTHER, lowest={"a": 4}) == FenceTooLow("a", 5)


def test_of_several_gpus_all_or_none_are_admitted() -> None:
    one = admitted(Admissions().admit(["a"], "reservations/r5", 5, None))
    assert one.admit(["b", "a"], "reservations/r4", 4, None) == FenceTooLow("a", 5)
    assert one.fences == {"a": 5}


def test_by_its_user_a_process_is_known_only_where_that_is_asked_for_and_the_user_has_one_reservation() -> (
    None
):
    one = admitted(Admissions().admit(["a"], "reservations/r5", 5, PARENT, user=1001))
    stranger = GpuProcess(12, lineage=(OTHER,), user=1001)
    for by_user, found in ((False, None), (True, "reservations/r5")):
        [process] = Holders(by_user=by_user).mark(one, "a", (stranger,))
        assert (process.reservation, process.holder_unknown) == (found, False)
    both = admitted(one.admit(["a"], "reservations/r6", 6, CHILD, user=1001, lowest={"a": 5}))
    [process] = Holders(by_user=True).mark(both, "a", (stranger,))
    assert (process.reservation, process.holder_unknown) == (None, True)


def test_the_nearest_ancestor_counts() -> None:
    one = admitted(
        admitted(Admissions().admit(["a"], "reservations/r5", 5, PARENT)).admit(
            ["a"], "reservations/r6", 6, CHILD
        )
    )
    assert of(one, "a", CHILD, PARENT) == "reservations/r6"


def test_one_process_may_be_admitted_on_more_gpus_later() -> None:
    one = admitted(
        admitted(Admissions().admit(["a"], "reservations/r5", 5, PARENT)).admit(
            ["b"], "reservations/r5", 5, PARENT
        )
    )
    assert [of(one, gpu, CHILD, PARENT) for gpu in "abc"] == ["reservations/r5", "reservations/r5", None]
    assert len(one.workers) == 1


def test_processes_that_ended_are_forgotten_beyond_a_number_and_fences_are_not() -> None:
    """What a process left behind is its reservation's still."""
    one = admitted(Admissions().admit(["a"], "reservations/r5", 5, PARENT)).without_dead(lambda _: False)
    assert of(one, "a", CHILD, PARENT) == "reservations/r5"
    for pid in range(1000, 1001 + DEAD_KEPT):
        one = admitted(one.admit(["a"], "reservations/r5", 5, ProcessKey(pid, 1)))
    one = one.without_dead(lambda process: process.pid == 1000)
    assert len(one.workers) == DEAD_KEPT + 1
    assert of(one, "a", PARENT) is None
    assert one.admit(["a"], "reservations/r4", 4, None) == FenceTooLow("a", 5)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9))))
def test_the_fence_of_a_gpu_never_falls(asked: list[tuple[str, int]]) -> None:
    admissions, highest = Admissions(), dict.fromkeys("abc", 0)
    for uuid, fence in asked:
        after = admissions.admit([uuid], f"reservations/r{fence}", fence, None)
        assert isinstance(after, FenceTooLow) == (fence < highest[uuid])
        if isinstance(after, Admissions):
            admissions, highest[uuid] = after, fence
