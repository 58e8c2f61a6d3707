"""Decisions as JSON lines: in order, bounded, and harmless where they cannot be written."""

import json
from pathlib import Path

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.state.decision_log import MOST_WAITING, DecisionFile, open_decision_file
from tests.support.waiting import eventually


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
