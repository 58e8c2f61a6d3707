"""A damaged state never leads to a wrong answer: it is refused with a reason and kept, or it is all there."""

import os
from pathlib import Path
from random import Random

import pytest

from gpuscale.allocator.app import DATABASE
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.store import sqlite_store
from tests.integration.allocator.damaged_state import CHANGED_ROWS, DAMAGES, WAL, WITNESS, States, known
from tests.support.allocator_process import site

ROUNDS = int(os.environ.get("GPUSCALE_DAMAGE_ROUNDS", "1"))  # ten seconds each; more by hand
REASONS = {"STATE_UNREADABLE", "STATE_INCONSISTENT", "STATE_VERSION"}
HARMLESS = {"a torn tail"}
LOSING = {
    "another version",
    *CHANGED_ROWS,
    "the log gone",
    "the database gone",
    "the database gone below a log",
    "the log of another state",
    "the log of another state on a closed one",
    "an earlier log",
    "the witness",
}


async def test_no_damage_leads_to_a_wrong_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred damaged states: bits, bytes, pages, cuts, logs of other states, other versions, changed rows."""
    states = States(tmp_path)
    held = await states.make()
    assert len(held.reservations) == 43
    refused: dict[str, int] = {}
    wrong: list[str] = []
    for name, (times, killed, damage) in DAMAGES.items():
        monkeypatch.setattr(sqlite_store, "SMALL_FILE", 0 if "writable_schema" in name else 16 << 20)
        for turn in range(times * ROUNDS):
            data_dir = states.copy(killed=killed)
            damage(data_dir, states, Random(f"{name} {turn}"))
            before = kept(data_dir)
            try:
                if await known(data_dir) != held:
                    wrong.append(f"{name} {turn}")
            except FailedPreconditionError as error:
                refused[name] = refused.get(name, 0) + 1
                if error.reason not in REASONS or kept(data_dir) != before:
                    wrong.append(f"{name} {turn}: refused as {error.reason}, or changed")
    assert wrong == []
    assert not HARMLESS & refused.keys()
    assert {name: refused.get(name) for name in LOSING} == {
        name: DAMAGES[name][0] * ROUNDS for name in LOSING
    }


def kept(data_dir: Path) -> dict[str, bytes]:
    """What stands in the files; a look makes an empty log where there is none."""
    files = [data_dir / name for name in (DATABASE, WAL)]
    return {file.name: file.read_bytes() for file in files if file.exists() and file.stat().st_size}


async def test_an_allocator_on_a_damaged_state_does_not_start_and_says_why(tmp_path: Path) -> None:
    """A process: its one line names the file, what is wrong with it, and what to do; and it grants nothing."""
    async with site(tmp_path / "data", gpus=2) as place:
        life = await place.start()
        held = await place.client.reserve(ttl=600)
        await life.kill()
        (tmp_path / "data" / WAL).unlink()
        life = place.prepare()
        life.go()
        code, said = await life.ended()
        assert code == 1
        assert len(said.splitlines()) == 1
        assert "is not what was acknowledged: " in said
        assert "remove" in said
        (tmp_path / "data" / WITNESS).unlink()  # the operator accepts the loss
        await place.start()
        assert await place.client.live() == []
        assert (await place.client.reserve()).name != held.name
