"""Jobs: what is shown of a command line, and what is kept of an output."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from gpuscale.cli.commands import detaching
from gpuscale.client.orders import Orders, shown


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
    texts = dict.fromkeys(("lease_token", "node", "directory", "address", "authority"), "")
    orders = Orders(reservation="reservations/r1", fence=1, command=("true",), environment={}, **texts)
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    folder, kept = detaching.JobFolder(orders), tmp_path / "gpuscale" / "jobs" / "r1-0"
    for number in range(30):
        os.write(folder.writing, line := b"%09d\n" % number)
        seen = b""
        while line not in seen:
            with suppress(FileNotFoundError):  # between two parts
                seen = (kept / "output").read_bytes()
    os.close(folder.writing)
    parts = [(kept / name).read_text().split() for name in ("output.1", "output")]
    assert [int(one) for part in parts for one in part] == list(range(10, 30))
