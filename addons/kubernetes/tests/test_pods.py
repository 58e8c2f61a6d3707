"""Which pod is which replica, and how many pods a Deployment is asked for."""

import random
from dataclasses import replace
from typing import Any

import pytest

from gpuscale_kubernetes.pods import (
    CORRECT_AFTER,
    LONGEST_CORRECTION,
    CorrectionTimer,
    Pod,
    PodCount,
    PodWorkload,
    arrange,
    count,
)

A, B, C = (f"endpoints/e/replicas/{one}" for one in "abc")


def pod(number: int, replica: str = "", **more: Any) -> Pod:
    made = Pod(f"pod-{number}", f"uid-{number}", "worker", replica, created=f"{number:03}")
    return replace(made, **more)


def workload(replicas: int) -> PodWorkload:
    return PodWorkload("worker", replicas, version="1")


def named(pods: list[Pod]) -> dict[str, str]:
    return {one.name: one.replica for one in pods}


def test_replicas_that_wait_get_the_pods_that_are_nobodys_the_ready_ones_first() -> None:
    pods = [pod(1), pod(2, ready=True), pod(3, A), pod(4, going=True), pod(5, over=True)]
    assert named(arrange(pods, [C, B])) == {"pod-1": C, "pod-2": B, "pod-3": A, "pod-4": "", "pod-5": ""}


def test_the_marks_do_not_depend_on_the_order_of_the_list() -> None:
    pods = [pod(number) for number in range(6)] + [pod(7, A), pod(8, A)]
    expected = arrange(pods, [B, C])
    for seed in range(20):
        random.Random(seed).shuffle(pods)
        assert arrange(pods, [B, C]) == expected


def test_two_pods_are_never_the_same_replica() -> None:
    arranged = arrange([pod(1, A, over=True), pod(2, A), pod(3, A, ready=True)], [])
    assert named(arranged) == {"pod-2": A, "pod-3": ""}


def test_where_another_pod_was_ended_than_the_one_asked_to_finish_they_change_names() -> None:
    """The replica that should run goes on in the pod that was left, and the other one is the replica that stops."""
    arranged = arrange([pod(1, A, stopping=True, costly=False, ready=True), pod(2, B, going=True)], [])
    assert arranged == [pod(1, B, ready=True), pod(2, A, going=True, stopping=True)]
    assert arrange(arranged, []) == arranged


def test_a_replica_whose_pod_is_gone_at_once_goes_on_in_the_one_that_was_left() -> None:
    """A pod without a node does not linger: it is never seen as one that is being deleted."""
    left = [pod(1, A, stopping=True, costly=False, ready=True), pod(2, C)]
    assert arrange(left, [], [B]) == [pod(1, B, ready=True), pod(2, C)]
    assert named(arrange([pod(2, C)], [], [B])) == {"pod-2": C}


def test_the_pod_that_was_asked_to_finish_and_is_ended_keeps_its_name() -> None:
    pods = [pod(1, A, stopping=True, going=True), pod(2, B)]
    assert arrange(pods, []) == pods


@pytest.mark.parametrize(
    ("asked", "pods", "waiting", "expected"),
    [
        pytest.param(0, [], 2, PodCount(2), id="up"),
        pytest.param(2, [], 2, PodCount(), id="asked for already"),
        pytest.param(1, [pod(1, A)], 2, PodCount(3), id="two more"),
        pytest.param(3, [pod(1, A)], 1, PodCount(foreign=1), id="one more than ours is coming"),
        pytest.param(2, [pod(1, A, stopping=True), pod(2, B)], 0, PodCount(1), id="down"),
        pytest.param(
            1, [pod(1, A, stopping=True), pod(2, B)], 0, PodCount(), id="down was asked for already"
        ),
        pytest.param(1, [pod(1, A, stopping=True, going=True), pod(2, B)], 0, PodCount(), id="it is going"),
        pytest.param(2, [pod(1, A, stopping=True), pod(2, B)], 1, PodCount(1), id="down before up"),
        pytest.param(1, [pod(1, A), pod(2, B)], 1, PodCount(), id="it is about to end one"),
        pytest.param(4, [pod(1, A), pod(2), pod(3)], 0, PodCount(foreign=3), id="somebody else's"),
        pytest.param(1, [pod(1)], 1, PodCount(), id="one came before it was asked for"),
        pytest.param(1, [pod(1, A, over=True)], 1, PodCount(), id="one that failed is being replaced"),
        pytest.param(2, [pod(1, A), pod(2, B)], 0, PodCount(), id="as it should be"),
    ],
)
def test_how_many_pods_to_ask_for(asked: int, pods: list[Pod], waiting: int, expected: PodCount) -> None:
    assert count(workload(asked), pods, waiting) == expected


@pytest.mark.parametrize("seed", range(40))
def test_whatever_was_there_before_it_ends_with_one_pod_for_each_replica(seed: int) -> None:
    """A cluster that makes and ends any pods it likes, in any order: at the end all replicas run, and no others do."""
    chance = random.Random(seed)
    pods = [
        pod(n, chance.choice(["", A, B]), stopping=chance.random() < 0.3) for n in range(chance.randrange(5))
    ]
    asked, waiting = chance.randrange(5), {A, B, C}
    for turn in range(100, 160):
        pods = arrange(pods, sorted(waiting - {one.replica for one in pods if not one.over}))
        unmet = waiting - {one.replica for one in pods if one.active and not one.stopping}
        unmet -= {one.replica for one in pods if one.going}
        counted = count(workload(asked), pods, len(unmet))
        asked = asked - counted.foreign if counted.replicas is None else counted.replicas
        pods = [one for one in pods if not one.going]
        active = [one for one in pods if one.active]
        if len(active) < asked:
            pods.append(pod(turn))
        elif len(active) > asked:
            struck = chance.choice(active)
            pods = [replace(one, going=True) if one is struck else one for one in pods]
    assert asked == 3
    assert sorted(one.replica for one in pods) == [A, B, C]


def test_what_somebody_else_did_stands_for_longer_and_longer() -> None:
    patience, now = CorrectionTimer(), 0.0
    righted: list[float] = []
    while len(righted) < 4:
        if patience.over(now, foreign=True):
            righted.append(now)
        now += 10.0
    assert righted[0] == CORRECT_AFTER
    assert righted[3] - righted[2] >= 4 * CORRECT_AFTER
    patience.over(now, foreign=False)
    patience.over(now + LONGEST_CORRECTION, foreign=False)
    patience.over(now + LONGEST_CORRECTION + 1, foreign=True)
    assert patience.over(now + LONGEST_CORRECTION + 1 + CORRECT_AFTER, foreign=True)
