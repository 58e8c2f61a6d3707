"""What a dry run says of a recorded past, step by step."""

from dataclasses import replace

import pytest

from gpuscale.allocator.domain import use_policies

HOUR, STEP = 60, 60.0
POLICY = use_policies.UsePolicy(
    use_policies.PolicyCondition.IDLE,
    (
        use_policies.PolicyStage(3600.0, (use_policies.Action.NOTE,)),
        use_policies.PolicyStage(7200.0, (use_policies.Action.REVOKE,), 600.0),
    ),
    shadow=False,
)
ONE = use_policies.RecordedHold(
    use_policies.PolicySubject("reservations/r1", ("r1",)), ("GPU-1",), frozenset(), 0.0, 1e6
)
SHARE = replace(ONE, shared=frozenset(ONE.gpus))
_WORDS = {"idle": use_policies.IDLE, "busy": use_policies.BUSY, "unknown": use_policies.UNKNOWN}


def replayed(
    hold: use_policies.RecordedHold, *runs: tuple[str, int], policy: use_policies.UsePolicy = POLICY
) -> use_policies.DryRun:
    """What is found where a GPU was this for so many minutes, one run after the other."""
    states = bytearray(state for word, count in runs for state in [_WORDS[word]] * count)
    found = use_policies.DryRun()
    found.replay("idle", policy, hold, use_policies.RecordedUse(0.0, STEP, len(states), {"GPU-1": states}))
    return found


def minutes(found: use_policies.DryRun) -> list[tuple[int, int, use_policies.StageOutcome]]:
    return [(round(one.time.timestamp() / 60), one.stage, one.outcome) for one in found.acts]


SHADOW, AVERTED = use_policies.StageOutcome.SHADOW, use_policies.StageOutcome.AVERTED


@pytest.mark.parametrize(
    ("hold", "runs", "acts"),
    [
        (ONE, [("idle", 3 * HOUR)], [(60, 0, SHADOW), (120, 1, SHADOW)]),
        (ONE, [("busy", 3 * HOUR)], []),
        (ONE, [("unknown", 3 * HOUR)], []),
        (ONE, [("idle", 50), ("unknown", 30), ("idle", HOUR)], [(90, 0, SHADOW)]),
        (ONE, [("idle", 50), ("unknown", 90), ("idle", HOUR)], [(200, 0, SHADOW)]),
        (ONE, [("idle", 58), ("busy", 1), ("idle", 59)], [(58, 0, AVERTED)]),
        (SHARE, [("busy", 3 * HOUR)], []),
        (SHARE, [("idle", HOUR)], [(60, 0, SHADOW)]),
        (replace(ONE, begin=630.0), [("idle", 2 * HOUR)], [(71, 0, SHADOW)]),
        (replace(ONE, end=59.5 * 60), [("idle", 2 * HOUR)], [(60, 0, AVERTED)]),
    ],
)
def test_it_acts_when_the_record_says_that_the_condition_lasted(
    hold: use_policies.RecordedHold,
    runs: list[tuple[str, int]],
    acts: list[tuple[int, int, use_policies.StageOutcome]],
) -> None:
    assert minutes(replayed(hold, *runs)) == acts


def test_what_is_known_and_not_adds_up_to_what_was_held() -> None:
    runs = ("idle", 10), ("unknown", 5), ("busy", 20)
    found = replayed(replace(ONE, begin=120.0, end=1800.0), *runs)
    assert (found.known, found.unknown, found.subjects) == (23 * STEP, 5 * STEP, 1)
    shared = replayed(SHARE, *runs)
    assert (shared.known, shared.unknown) == (10 * STEP, 25 * STEP), "whoever used it may be another"


def test_time_that_a_reservation_was_held_before_the_span_counts_for_over_time() -> None:
    policy = replace(POLICY, condition=use_policies.PolicyCondition.OVER_TIME)
    found = replayed(replace(ONE, begin=-3000.0), ("unknown", 90), policy=policy)
    assert minutes(found) == [(10, 0, SHADOW), (70, 1, SHADOW)]
    assert (found.known, found.unknown) == (90 * STEP, 0.0)
