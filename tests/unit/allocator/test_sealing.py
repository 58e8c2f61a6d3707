"""Stored rows and their checksums: every field comes back, every column counts, and values are as they were summed."""

import json
import sqlite3
from contextlib import closing
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from gpuscale.allocator.domain.jobs import JobMember, ReservedJob
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Policy, Reservation, Score, ScorePart, State, Wanted
from gpuscale.allocator.state import schema as schema_store
from gpuscale.allocator.state import store
from gpuscale.allocator.state.integrity import is_whole, sealed
from tests.support.allocator_values import NOW, WALL, ask, order, reserved

COLUMNS = sorted({*schema_store.Table.metadata.tables["reservation"].columns.keys()} - {"archived"})


def row() -> dict[str, object]:
    """The row of a reservation that has something in every column."""
    granted = Ledger().grant(order(ttl=60), [reserved("GPU-a")], now=NOW, wall=WALL)
    full = replace(granted, ended=WALL, revoke_at=int(NOW), end_reason="é", preemptible=True, ttl=60)
    return store.to_row(full, "boot", 7)


def test_a_row_is_whole_as_it_was_written() -> None:
    assert sorted(row()) == COLUMNS
    assert is_whole(row())


@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_of_a_reservation_counts(column: str) -> None:
    assert not is_whole(row() | {column: "other"})
    assert not is_whole(row() | {column: None})
    assert not is_whole({name: value for name, value in row().items() if name != column}), "a damaged name"


def test_every_field_of_a_reservation_comes_back_from_its_row() -> None:
    """None has its default here: a field that is added later fails until it is written and read."""
    score = Score(
        0.5, (ScorePart("memory", 0.5, 1.0), ScorePart("utilization", None, 0.4)), "by memory alone"
    )
    part = reserved("MIG-a", node="n1", index=3, milli=500, memory=40_000)
    gpu = replace(part, score=score, member=1, lost=True, parent="GPU-p")
    member = JobMember(1, "nodes/n1", 7, WALL, WALL, 3, "stopped", WALL, 5.0, ("step 4",))
    asked = replace(ask(2), nodes=frozenset({"n1"}), policy=Policy.PACK)
    wanted = Wanted(asked, 60.0, True, 5, 600.0, 3, WALL)  # noqa: FBT003
    kept = Reservation(
        id="r1", fence=7, request_id="request", fingerprint="f", holder="job", owner="ann", tenant="lab",
        labels={"team": "vision é"}, policy=Policy.FGD, gpus=(gpu,), cpu_milli=4000, host_memory_bytes=1 << 40,
        ttl=60.5, state=State.LOST, deadline=NOW + 60.5, until=NOW + 99, revoke_at=NOW + 9, created=WALL, ended=WALL,
        priority=-3, preemptible=True, member_count=2, end_reason="GPU MIG-a vanished", made_by="scaler", wanted=wanted,
        job=ReservedJob("train", "python train.py", "ann", (member,), 2, (member,)),
    )  # fmt: skip
    for one in (kept, gpu, member, kept.job, wanted):
        assert [field.name for field in fields(one) if getattr(one, field.name) == field.default] == []
    row = store.to_row(kept, "boot", 7)
    read = {name: json.loads(str(row[name])) for name in ("labels", "gpus")}
    found = store.from_row(SimpleNamespace(**(row | read)))
    assert found == kept
    assert (found.job.members[0].heard, found.job.members[0].last_lines) == (5.0, ("step 4",))


def test_what_the_database_returns_has_the_same_sum() -> None:
    """Whole numbers in columns of fractions, truth values and texts included."""
    with closing(sqlite3.connect(":memory:")) as connection:
        table = schema_store.Table.metadata.tables["reservation"]
        columns = ", ".join(f"{column.name} {column.type}" for column in table.columns)
        connection.execute(f"CREATE TABLE reservation ({columns})")
        names = list(row())
        values = ", ".join(f":{one}" for one in names)
        connection.execute(f"INSERT INTO reservation ({', '.join(names)}) VALUES ({values})", row())
        connection.row_factory = sqlite3.Row
        assert is_whole(dict(connection.execute("SELECT * FROM reservation").fetchone()))


def test_a_reservation_that_lost_a_gpu_has_the_sum_of_the_labels_that_an_earlier_version_wrote() -> None:
    """The sum is made anew and the labels are not written: they are to be spelled as they were when the row was made."""
    granted = Ledger().grant(order(), [reserved("GPU-a")], now=NOW, wall=WALL)
    labelled = replace(granted, labels={"job": "é", "team": "a"})
    written = store.to_row(labelled, "boot", 7) | {"labels": r'{"job": "\u00e9", "team": "a"}'}
    lost = replace(labelled, gpus=(replace(labelled.gpus[0], lost=True),))
    assert is_whole(written | store.to_lost(lost))


def test_a_row_with_one_sum() -> None:
    kept = sealed({"tenant": "ann", "gpu_milli_limit": None, "weight": 1.0})
    assert is_whole(kept)
    assert not is_whole(kept | {"weight": 2.0})
    assert not is_whole(kept | {"checksum": 0})
