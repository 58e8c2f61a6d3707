"""Every error that a service answers with is one of the table of reasons, with metadata of the table."""

from collections.abc import Iterator

import grpc
import pytest

from gpuscale.common import errors
from gpuscale.common.rpc import status
from tests.unit.docs.pages import reasons

_TABLE = {
    reason: (cells[1].split(", "), {key.strip("`") for key in cells[3].split(", ")})
    for reason, cells in reasons().items()
}


@pytest.fixture(autouse=True)
def answered_errors_are_in_the_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    code_of, strange = status.status_code, list[str]()

    def looked_up(error: errors.GpuscaleError) -> grpc.StatusCode:
        code = code_of(error)
        codes, keys = _TABLE.get(error.reason, ([], set[str]()))
        if code.name not in codes or not error.metadata.keys() <= keys:
            strange.append(f"{code.name} {error.reason} {sorted(error.metadata)}")
        return code

    monkeypatch.setattr(status, "status_code", looked_up)
    yield
    assert strange == [], (
        "not in docs/reference/errors.md: name the reason where the error is made, and make docs"
    )
