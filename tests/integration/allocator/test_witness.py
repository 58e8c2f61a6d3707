"""The witness: what it accuses, and whom it must never accuse."""

import struct
from pathlib import Path

import pytest

from gpuscale.allocator.app import DATABASE
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.state.integrity import MOST_RESETS, StateGuard, Witness
from gpuscale.allocator.state.store import open_store
from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.runtime import tasks
from tests.support.allocator_values import NOW, WALL, order, reserved


def begun(folder: Path, number: int, *, salt: int | None = None) -> Path:
    """A database that is there, with a witness of a write, and a log that has this salt."""
    database = folder / DATABASE
    database.write_text("something")
    if salt is not None:
        begin_log(folder, salt)
    witness = Witness(database)
    witness.open(number)
    witness.put(number)
    witness.close()
    return database


def begin_log(folder: Path, salt: int) -> None:
    (folder / f"{DATABASE}-wal").write_bytes(bytes(16) + struct.pack(">LL", salt, 0) + bytes(8))


def found(database: Path, number: int) -> None:
    """What the next start does with a database that knows of so many writes."""
    witness = Witness(database)
    witness.check_before()
    witness.check_after(number)


@pytest.mark.parametrize("number", [7, 8, 900])
def test_a_database_that_knows_as_much_or_more_is_accepted(tmp_path: Path, number: int) -> None:
    found(begun(tmp_path, 7), number)


def test_a_database_that_knows_less_is_not(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="ends with write 6, and write 7 was acknowledged"):
        found(begun(tmp_path, 7), 6)


@pytest.mark.parametrize("later", [0, 1, MOST_RESETS])
def test_a_log_that_was_begun_anew_since_is_accepted(tmp_path: Path, later: int) -> None:
    """Also where the salt, which is counted up, began again at nothing."""
    database = begun(tmp_path, 7, salt=2**32 - 1)
    begin_log(tmp_path, (2**32 - 1 + later) % 2**32 or 1)
    found(database, 7)


@pytest.mark.parametrize("salt", [999, 1000 + MOST_RESETS + 1])
def test_a_log_that_was_not_is_refused(tmp_path: Path, salt: int) -> None:
    database = begun(tmp_path, 7, salt=1000)
    begin_log(tmp_path, salt)
    with pytest.raises(FailedPreconditionError, match="is not the last one written"):
        found(database, 7)


def test_a_log_that_a_start_began_before_it_was_killed_is_accepted(tmp_path: Path) -> None:
    database = begun(tmp_path, 7, salt=1000)
    for salt in (0, 5):  # none was left, and then a migration began one
        begin_log(tmp_path, salt)
        found(database, 7)


def test_a_witness_that_was_made_when_the_power_failed_knows_nothing(tmp_path: Path) -> None:
    database = begun(tmp_path, 7)
    (tmp_path / f"{DATABASE}-witness").write_bytes(b"")
    found(database, 0)


def test_a_transaction_that_failed_is_not_witnessed(tmp_path: Path) -> None:
    guard = StateGuard(tmp_path / DATABASE)
    guard.witness.open(0)
    for committed in (True, False):
        guard.wrote(guard.next())
        guard.ended(committed=committed)
    guard.ended(committed=True)
    guard.witness.close()
    (tmp_path / DATABASE).write_text("something")
    found(tmp_path / DATABASE, 1)
    with pytest.raises(FailedPreconditionError):
        found(tmp_path / DATABASE, 0)


async def test_writes_that_fail_accuse_nobody_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the state refuses, one that cannot be committed, and a change of what has ended already."""
    ledger, other = Ledger(), Ledger(10)
    kept, refused = [
        one.confirm(one.grant(order(), [reserved("GPU-a")], now=NOW, wall=WALL)) for one in (ledger, other)
    ]
    later = [ledger.confirm(ledger.grant(order(), [reserved(gpu)], now=NOW, wall=WALL)) for gpu in "bc"]
    points = tasks.parse_failpoints("allocator.store.before_commit=error")
    for one in later:
        async with open_store(tmp_path / DATABASE, "boot") as store:
            if not (await store.load()).reservations:
                await store.save([kept], [])
            monkeypatch.setattr(tasks, "_points", points)
            for work in (([refused], []), ([], [kept]), ([one], [])):
                with pytest.raises(UnavailableError):
                    await store.save(*work)
            monkeypatch.setattr(tasks, "_points", {})
            await store.save([one], [])  # counted once
            await store.save([], [refused])  # no such row
    async with open_store(tmp_path / DATABASE, "boot") as store:
        assert [one for one, _ in (await store.load()).reservations] == [kept, *later]
