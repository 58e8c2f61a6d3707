"""Jobs: what is shown of a command line, and what is kept of an output."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.cli.commands import detaching, supervise
from gpuscale.client.orders import Orders, shown
from gpuscale.common.errors import UnavailableError

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import AllocatorServiceStub

NO_TEXTS = dict.fromkeys(("lease_token", "node", "directory", "address", "authority"), "")


@pytest.mark.parametrize(
    "command",
    [
        ("train", "--api-key", "hunter2", "--steps", "5"),
        ("train", "--hf_token=hunter2", "--steps", "5"),
        ("sh", "-c", "export DB_PASSWORD=hunter2; train --steps 5"),
        ("sh", "-c", "WANDB_API_KEY='hunter2' train --steps 5"),
        ("train", "amqp://me:hunter2@host/", "--steps", "5"),
    ],
)
def test_what_is_named_like_a_secret_is_not_shown(command: tuple[str, ...]) -> None:
    line = shown(command)
    assert [part for part in ("***", "train", "--steps 5") if part not in line] == []
    assert "hunter2" not in line


def test_the_newest_of_an_output_is_kept_in_two_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(detaching, "MOST_BYTES", 100)
    orders = Orders(reservation="reservations/r1", fence=1, command=("true",), environment={}, **NO_TEXTS)
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    kept = tmp_path / "gpuscale" / "jobs" / "r1-0"
    kept.mkdir(parents=True)
    folder = detaching.JobFolder(orders)
    assert (kept / "output").read_bytes() == b""  # for who attaches to it
    for number in range(30):
        os.write(folder.writing, line := b"%09d\n" % number)
        seen = b""
        while line not in seen:
            with suppress(FileNotFoundError):  # between two parts
                seen = (kept / "output").read_bytes()
    os.close(folder.writing)
    parts = [(kept / name).read_text().split() for name in ("output.1", "output")]
    assert [int(one) for part in parts for one in part] == list(range(10, 30))


class Starting:
    """An allocator that answers nobody at first."""

    def __init__(self, unanswered: int) -> None:
        self.unanswered = unanswered
        self.told: list[int] = []

    def RenewReservation(
        self, request: api.RenewReservationRequest, **_: object
    ) -> api.RenewReservationResponse:
        if self.unanswered:
            self.unanswered -= 1
            raise UnavailableError("starting")
        self.told.append(request.member.exit_code)
        return api.RenewReservationResponse()

    def ReleaseReservation(self, *_: object, **__: object) -> api.ReleaseReservationResponse:
        return api.ReleaseReservationResponse()


def test_an_allocator_that_starts_hears_how_a_command_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "RETRY", 0.0)
    orders = Orders(
        reservation="reservations/r1", fence=1, command=("true",), environment={}, reports=True, **NO_TEXTS
    )
    allocator = Starting(unanswered=3)
    holder = supervise.LeaseHolder(orders, cast("list[AllocatorServiceStub]", [allocator]))
    holder.started(7)
    holder.ended(137, "")
    assert allocator.told == [137]
    allocator.unanswered = 3  # as while the link is down on which a supervisor was killed
    supervise.LeaseHolder(orders, cast("list[AllocatorServiceStub]", [allocator])).killed(138)
    assert allocator.told[-1] == 138
