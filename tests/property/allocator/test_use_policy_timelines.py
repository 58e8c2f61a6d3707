"""Random timelines of use, silence, restarts, nights and exemptions: no act on unknown, none twice, none early, none missed.

The model keeps all that was seen and counts it anew at each look.
"""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuscale.allocator.domain.use_policies import (
    MOST_GAP,
    MOST_SILENCE,
    Action,
    Exemption,
    GpuSighting,
    PolicyAct,
    PolicyCondition,
    PolicyStage,
    PolicySubject,
    Scope,
    SeenSubject,
    StageOutcome,
    Track,
    UsePolicy,
    WeeklyHours,
    judge,
)

MONDAY = datetime(2026, 3, 2, 7, 0, tzinfo=UTC)
LABEL = ("keep", "yes")
POLICY = UsePolicy(
    PolicyCondition.IDLE,
    (
        PolicyStage(120.0, (Action.NOTE,)),
        PolicyStage(300.0, (Action.NOTIFY,)),
        PolicyStage(400.0, (Action.REVOKE,), 60.0),
    ),
)
DAY = WeeklyHours((0, 1, 2, 3, 4), 8 * 60, 18 * 60, "Europe/Berlin")
NIGHT = WeeklyHours((0,), 20 * 60, 7 * 60, "Europe/Berlin")
STARTS = [MONDAY, MONDAY - timedelta(minutes=64), MONDAY + timedelta(hours=9, minutes=57)]

RUN = st.tuples(
    st.sampled_from([True, True, True, True, False, None]),
    st.sampled_from([10.0, 30.0, 50.0, 60.0, 60.0, 61.0, 400.0, 3601.0, 40_000.0]),
    st.sampled_from(["", "", "", "restart", "boot"]),
    st.integers(1, 12),
)
"""What is seen, how many seconds after the look before, what happens before the first of these looks, and how many they are."""


@dataclass
class Look:
    """One look: when, what was seen, whether it was one of the hours, and whether time was told by another clock since."""

    at: float
    idle: bool | None
    on: bool
    spared: bool
    begun_anew: bool


@dataclass
class Model:
    """All looks; what they mean is counted from the first one each time."""

    looks: list[Look] = field(default_factory=list[Look])

    def counted(self) -> tuple[float, int]:
        """For how long the condition held at the last look, and where in `looks` its time began."""
        held, since, last, counting = 0.0, 0, float("-inf"), False
        for index, look in enumerate(self.looks):
            changed = index and look.spared is not self.looks[index - 1].spared and look.idle
            if look.begun_anew:
                held, counting, last = 0.0, False, look.at if last > float("-inf") else last
            if look.idle is None:
                counting = False
            elif not look.idle:
                held, since, last, counting = 0.0, index + 1, float("-inf"), False
            else:
                if changed and last > float("-inf"):
                    held, since, last = 0.0, index, look.at
                if counting and look.at - last <= MOST_GAP:
                    held += look.at - last
                elif not counting or look.at - last > MOST_GAP:
                    held = 0.0 if look.at - last > MOST_SILENCE else held
                last, counting = look.at, look.on
        return held, since


@given(
    st.lists(RUN, min_size=1, max_size=12),
    st.sampled_from([(), (DAY,), (NIGHT,)]),
    st.sampled_from(STARTS),
    st.booleans(),
    st.none() | st.integers(0, 1500),
)
@example([(True, 10.0, "", 2), (None, 3601.0, "", 1), (True, 10.0, "restart", 1)], (), MONDAY, False, None)  # noqa: FBT003
def test_only_what_was_seen_to_last_is_acted_on_and_only_once(
    runs: list[tuple[bool | None, float, str, int]],
    hours: tuple[WeeklyHours, ...],
    start: datetime,
    shadow: bool,
    exempt_for: int | None,
) -> None:
    looks = [(run[0], run[1], "" if nth else run[2]) for run in runs for nth in range(run[3])]
    policy = replace(POLICY, shadow=shadow, scope=Scope(hours=hours))
    if exempt_for is not None:
        until = start + timedelta(seconds=exempt_for)
        policy = replace(policy, exemptions=(Exemption(LABEL, "a deadline", until),))
    subject = PolicySubject("reservations/r1", ("r1",), labels=frozenset({LABEL}))
    now, model, track = 1000.0, Model(), None
    acts: list[tuple[int, float, PolicyAct]] = []
    spared_before = False
    for idle, passed, fault in looks:
        begun_anew = False
        if fault and track is not None:  # the program ends right after a look, and comes back
            track = track.after_gap(now)
            begun_anew = fault == "boot"
        now += passed
        wall = start + timedelta(seconds=now - 1000.0)
        if begun_anew and track is not None:
            track = track.rebased(now)
        spared = policy.exemption(subject, wall) is not None
        gpus = (GpuSighting("GPU-1", idle, None, None, None),)
        before, was = track, len(acts)
        track, found = judge("p", policy, SeenSubject(subject, gpus), track, now, wall)
        if fault and before is not None and model.looks:
            model.looks.append(
                Look(model.looks[-1].at, None, on=True, spared=spared_before, begun_anew=False)
            )
        on = policy.scope.now(wall)
        model.looks.append(Look(now, idle, on, spared, begun_anew))
        spared_before = spared if idle else spared_before
        model.looks[-1].spared = spared_before
        held, since = model.counted()
        done = [one for index, _, one in acts if index >= since and one.outcome is not StageOutcome.AVERTED]
        acted = {StageOutcome.DONE, StageOutcome.SHADOW, StageOutcome.EXEMPT}
        stages = [one for one in found if one.outcome in acted]
        if track is not None and idle:
            assert abs(track.held - held) < 1e-6
        if idle is not True:  # unknown is never idle, and neither is busy
            assert not stages
        if not on:
            assert not stages
        for act in stages:
            assert held >= POLICY.stages[act.stage].after
            assert act.stage == len(done), "each once, in order"
            kind = StageOutcome.EXEMPT if spared else StageOutcome.SHADOW if shadow else StageOutcome.DONE
            assert act.outcome is kind
            if done:
                spacing = POLICY.stages[act.stage].after - POLICY.stages[act.stage - 1].after
                assert now - acts[was - 1][1] >= spacing, "the holder had the time that the policy says"
            acts.append((len(model.looks) - 1, now, act))
        if idle and on and not stages and len(done) < len(POLICY.stages):  # none is missed
            stage = POLICY.stages[len(done)]
            late = done and (fault == "boot" or now - acts[-1][1] < stage.after)
            assert held < stage.after or late
        lifted = [one for one in found if one.outcome is StageOutcome.LIFTED]
        assert bool(lifted) is (before is not None and idle is False and before.revoked)
        assert track is None or track.revoked is bool(
            track.done == len(POLICY.stages) and not (shadow or track.spared)
        )


KILLING = UsePolicy(
    PolicyCondition.OUTSIDER,
    (PolicyStage(30.0, (Action.NOTIFY,)), PolicyStage(120.0, (Action.KILL, Action.NOTIFY), 10.0)),
)
SIGHT = st.tuples(
    st.sampled_from([True, True, True, True, True, False, None]),
    st.sampled_from([10.0, 30.0, 60.0, 61.0, 3601.0]),
    st.sampled_from([False] * 7 + [True]),
    st.sampled_from(["", "", "", "", "restart"]),
    st.integers(1, 8),
)
"""Whether the pid is an outsider, seconds after the look before, whether another process has it now, a fault, how many looks."""


@given(st.lists(SIGHT, min_size=1, max_size=12), st.booleans(), st.none() | st.integers(0, 600))
def test_an_outsider_is_killed_once_and_only_for_what_that_very_process_did(
    sights: list[tuple[bool | None, float, bool, str, int]], shadow: bool, exempt_for: int | None
) -> None:
    policy = replace(KILLING, shadow=shadow)
    if exempt_for is not None:
        until = MONDAY + timedelta(seconds=exempt_for)
        policy = replace(policy, exemptions=(Exemption(LABEL, "a deadline", until),))
    now, started, track = 1000.0, 1, None
    seen_for, killed, spared_before = 0.0, False, None
    for outsider, passed, another, fault, count in sights:
        for nth in range(count):
            if fault and not nth and track is not None:
                track = track.after_gap(now)
            now += passed
            wall = MONDAY + timedelta(seconds=now - 1000.0)
            started += another and not nth
            subject = PolicySubject(
                "nodes/n/gpus/g/processes/7", labels=frozenset({LABEL}), process=(7, started)
            )
            spared = policy.exemption(subject, wall) is not None
            pids = None if outsider is None else (7,) if outsider else ()
            gpus = (GpuSighting("g", None, None, pids, None),)
            if (another and not nth) or outsider is False or (outsider and spared is not spared_before):
                seen_for, killed = 0.0, False
            elif outsider:
                seen_for += passed  # at most: gaps and unknown looks count less
            spared_before = spared if outsider else spared_before
            track, acts = judge("p", policy, SeenSubject(subject, gpus), track, now, wall)
            for act in acts:
                if Action.KILL in act.actions and act.outcome is StageOutcome.DONE:
                    assert outsider
                    assert not shadow
                    assert not spared
                    assert not killed
                    assert seen_for >= 120.0
                    killed = True
            assert track is None or not outsider or track.subject.process == (7, started)


def test_a_track_is_all_there_is_to_remember() -> None:
    subject = PolicySubject("reservations/r1", ("r1",))
    idle = SeenSubject(
        subject, (GpuSighting("GPU-1", idle=True, over_use=None, outsiders=None, quarantined=None),)
    )
    track: Track | None = None
    for second in range(0, 60, 10):
        track, _ = judge("p", POLICY, idle, track, float(second), MONDAY)
    back = track.after_gap(55.0)  # it was seen at 50, and the program still ran at 55
    assert (back.held, back.counting) == (55.0, False)
    after, _ = judge("p", POLICY, idle, back, 90.0, MONDAY)
    assert after.held == 55.0  # nobody looked from 55 to 90


@pytest.mark.parametrize(
    ("hours", "local", "inside"),
    [
        (DAY, "2026-03-02T08:00", True),
        (DAY, "2026-03-02T18:00", False),
        (DAY, "2026-03-07T12:00", False),
        (NIGHT, "2026-03-02T19:59", False),
        (NIGHT, "2026-03-03T06:59", True),
        (NIGHT, "2026-03-02T06:59", False),  # of Sunday's night
        (NIGHT, "2026-03-03T21:00", False),
        (replace(DAY, days=(6,)), "2026-03-29T08:00", True),  # the day on which clocks are put forward
    ],
)
def test_hours_of_the_week_go_by_the_clocks_of_their_zone(
    hours: WeeklyHours, local: str, inside: bool
) -> None:
    assert (datetime.fromisoformat(local).replace(tzinfo=ZoneInfo("Europe/Berlin")) in hours) is inside
