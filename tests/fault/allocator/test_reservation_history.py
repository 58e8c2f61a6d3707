"""The judge of histories finds each kind of broken promise, and accuses nobody of what cannot be proven."""

from tests.fault.allocator.reservation_history import Grant, History, Sighting


def grant(name: str, fence: int, sent: float, until: float, *uuids: str, request_id: str = "") -> Grant:
    return Grant(request_id or name, name, fence, dict.fromkeys(uuids or ("g",), 1000), sent, sent + 1, until)


def test_a_history_in_order_is_clean() -> None:
    one, other = grant("r1", 1, 0, 10), grant("r2", 2, 10, 20)
    history = History(
        [one, other], [Sighting(2, 3, {"r1": {"g": 1000}}), Sighting(12, 13, {"r2": {"g": 1000}})]
    )
    history.repetitions.append((one, "r1", 1))
    assert history.violations() == []


def test_overlapping_holds_are_found() -> None:
    history = History([grant("r1", 1, 0, 10), grant("r2", 2, 5, 15)])
    assert history.violations() == ["double allocation: g was held by r1 and r2"]


def test_a_hold_that_was_released_or_never_acknowledged_in_time_proves_nothing() -> None:
    released = grant("r1", 1, 0, 10)
    released.released = 5
    late = Grant("r3", "r3", 3, {"g": 1000}, 2, 11, 12)
    assert History([released, grant("r2", 2, 5, 10), late]).violations() == []


def test_a_grant_that_is_not_listed_while_held_is_found() -> None:
    history = History(
        [grant("r1", 1, 0, 10)], [Sighting(2, 3, {}), Sighting(2, 11, {}), Sighting(0.5, 3, {})]
    )
    assert history.violations() == ["acknowledged grant lost: r1 was not listed as granted"]


def test_a_grant_listed_with_other_gpus_is_found() -> None:
    history = History([grant("r1", 1, 0, 10)], [Sighting(2, 3, {"r1": {"h": 1000}})])
    assert len(history.violations()) == 1


def test_a_gpu_listed_twice_is_found() -> None:
    twice = Sighting(0, 1, {"r1": {"g": 600}, "r2": {"g": 500}})
    assert History([], [twice]).violations() == ["g was listed beyond what there is"]
    assert History([], [Sighting(0, 1, {"r1": {"g": 500}, "r2": {"g": 500}})]).violations() == []


def test_shares_that_exceed_a_gpu_together_are_found_and_others_are_not() -> None:
    def shares(*millis: int) -> list[str]:
        grants = [grant(f"r{index}", index, 0, 10) for index in range(1, len(millis) + 1)]
        for one, milli in zip(grants, millis, strict=True):
            one.holds = {"g": milli}
        return History(grants).violations()

    assert shares(500, 500) == []
    assert shares(500, 300, 201) == ["double allocation: g was held by r1 and r2 and r3"]


def test_a_batch_of_which_a_part_is_listed_is_found() -> None:
    sightings = [Sighting(0, 1, {}, frozenset(requests)) for requests in ((), ("a", "b", "c"), ("a", "c"))]
    assert len(History([], sightings, batches=[("a", "b")]).violations()) == 1


def test_fences_that_go_back_or_come_again_are_found() -> None:
    back = History([grant("r5", 5, 0, 2), grant("r4", 4, 3, 4)])
    assert back.violations() == ["fence went back: r4 has 4 after r5 had 5"]
    again = History([grant("r5", 5, 0, 2), grant("r6", 5, 0.5, 2, "h")])
    assert again.violations() == ["fence 5 was given 2 times"]


def test_fences_of_calls_under_way_together_may_come_in_any_order() -> None:
    assert History([grant("r5", 5, 0, 2), grant("r4", 4, 0.5, 2, "h")]).violations() == []


def test_a_repetition_with_another_answer_is_found() -> None:
    one = grant("r1", 1, 0, 2)
    history = History([one], repetitions=[(one, "r2", 2)])
    assert history.violations() == ["request of r1 was answered with r2 when repeated"]
    twice = History([grant("r1", 1, 0, 2, request_id="q"), grant("r2", 2, 3, 4, request_id="q")])
    assert twice.violations() == ["one request made ['r1', 'r2']"]
