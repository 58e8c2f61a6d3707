"""The pages of errors: docs/errors.md explains every status, and speaks only of reasons that the code has."""

import re

from gpuscale.common import errors
from gpuscale.common.rpc.status import status_code
from tests.unit.docs.pages import read, reasons, rows

REASON = r"[A-Z]+(?:_[A-Z]+)+"


def test_every_reason_has_a_status_and_most_have_their_message() -> None:
    found = reasons()
    assert len(found) > 100
    assert found["NO_CAPACITY"][1:3] == ["RESOURCE_EXHAUSTED", "5"]
    assert "{name}" in found["ETAG_MISMATCH"][4]
    without = [reason for reason, (_, status, *_) in found.items() if not status]
    assert set(without) <= {"NOT_INSTALLED", "UNKNOWN", "UNWELL"}
    assert sum(1 for cells in found.values() if cells[4]) > 80


def test_no_reason_is_explained_that_cannot_happen() -> None:
    explained = set(re.findall(f"`({REASON})`", read("errors.md").partition("## Reasons")[2]))
    others = {"NOT_SERVING", "GPUSCALE_FAILPOINTS"}
    assert len(explained) > 40
    assert sorted(explained - reasons().keys() - others) == []


def test_every_status_is_explained_with_its_error() -> None:
    table = [cells for cells in rows(read("reference/errors.md")) if cells[1].endswith("Error`")]
    shown = {cells[0].strip("`"): cells[1].strip("`") for cells in table}
    assert all(cells[2] for cells in table)
    for cls in errors.GpuscaleError.__subclasses__():
        if cls.__module__ == errors.__name__:
            assert shown[status_code(cls("")).name] == cls.__name__
