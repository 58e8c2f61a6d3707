"""Decisions: their summaries, what makes two the same, and their file."""

import json
from pathlib import Path

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.decisions import (
    Code,
    Decision,
    DecisionOutcome,
    Stage,
    Step,
    afterwards,
    compose,
    sameness,
)
from gpuscale.autoscaler.state.decision_log import MOST_WAITING, DecisionFile, open_decision_file
from tests.support.autoscaler_values import NOW, down, endpoint, evaluate, observed, seen, spec, up
from tests.support.waiting import eventually

WANTED = spec(up(step=2), down())


def decide(before: int, value: float | None, outcome: DecisionOutcome) -> Decision:
    evaluation = evaluate(WANTED, before, observed(seen(value)), {}, NOW)
    return compose(endpoint(WANTED), evaluation, outcome)


def test_a_change_tells_the_rule_that_made_it() -> None:
    decision = decide(2, 120, DecisionOutcome(4))
    assert (decision.before, decision.wanted, decision.granted, decision.limited_by) == (2, 4, 4, None)
    assert decision.summary == "from 2 to 4: queue = 120 > 10: +2"


def test_a_hold_tells_what_is_unknown() -> None:
    decision = decide(2, None, DecisionOutcome(2))
    assert decision.limited_by is Code.SIGNAL_MISSING
    assert decision.summary == "stays at 2: queue: queue unreachable"


def test_no_capacity_tells_the_allocators_text() -> None:
    full = Step(Stage.GPU, Code.NO_CAPACITY, 4, 3, "3 of 4 GPUs are taken")
    decision = decide(2, 120, DecisionOutcome(3, (full,)))
    assert (decision.limited_by, decision.steps[-1]) == (Code.NO_CAPACITY, full)
    assert decision.summary == "from 2 to 4, 3 granted: 3 of 4 GPUs are taken"


def test_nothing_to_do_says_so() -> None:
    assert decide(2, 7, DecisionOutcome(2)).summary == "stays at 2: no rule wants a change"


def test_between_evaluations_only_the_outcome_is_told() -> None:
    granted = Step(Stage.GPU, Code.GRANTED, 1, 2, "GPUs for one more replica")
    decision = afterwards(endpoint(desired=2), DecisionOutcome(2, (granted,)))
    assert (decision.before, decision.wanted, decision.granted) == (2, 2, 2)
    assert decision.summary == "stays at 2: GPUs for one more replica"


def test_same_codes_are_the_same_decision_whatever_the_values() -> None:
    assert sameness(decide(2, 6, DecisionOutcome(2))) == sameness(decide(2, 7, DecisionOutcome(2)))
    assert sameness(decide(2, 6, DecisionOutcome(2))) != sameness(decide(2, None, DecisionOutcome(2)))
    assert sameness(decide(2, 6, DecisionOutcome(2))) != sameness(decide(2, 6, DecisionOutcome(1)))


def decision(number: int) -> api.Decision:
    return api.Decision(name=f"endpoints/e/decisions/{number:016d}", wanted=number, summary="x" * 100)


def names(path: Path) -> list[str]:
    return [json.loads(line)["name"] for line in path.read_text(encoding="utf-8").splitlines()]


async def test_each_is_a_line_in_order_and_files_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    older = tmp_path / "decisions.jsonl.1"
    async with open_decision_file(path, most_bytes=1_000) as file:
        for number in range(1, 21):
            file.put(decision(number))
            last = decision(number).name
            await eventually(lambda last=last: path.exists() and names(path)[-1] == last)
    both = names(older) + names(path)
    assert both == [decision(number).name for number in range(21 - len(both), 21)]
    assert older.stat().st_size <= 1_000 >= path.stat().st_size
    assert sorted(one.name for one in tmp_path.iterdir()) == [path.name, older.name]


async def test_a_folder_that_is_gone_stops_nothing_and_lines_come_again(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    path = folder / "decisions.jsonl"
    async with open_decision_file(path, most_bytes=65_536) as file:
        file.put(decision(1))
        await eventually(lambda: file._dropping)
        folder.mkdir()
        file.put(decision(2))
        await eventually(lambda: path.exists() and names(path) == [decision(2).name])


async def test_more_than_can_be_written_is_dropped_and_none_without_a_file(tmp_path: Path) -> None:
    slow = DecisionFile(tmp_path / "f", 65_536)  # nobody writes
    for number in range(MOST_WAITING + 10):
        slow.put(decision(number))
    assert slow._dropping
    off = DecisionFile(None, 65_536)
    off.put(decision(1))
    assert off._waiting.empty()
