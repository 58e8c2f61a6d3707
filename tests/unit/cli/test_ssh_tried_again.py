"""ssh that a host turns away before it says who it is, as sshd does beyond its MaxStartups: for what a person sees live."""

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.client import jobs, over_ssh
from gpuscale.client.orders import GREETING, Orders
from gpuscale.common.errors import UnavailableError

WHY = "kex_exchange_identification: read: Connection reset by peer"
SSHD = f"""
echo >> {{log}}
test $(wc -l < {{log}}) -gt {{times}} || {{{{ echo "{WHY}" >&2; exit 255; }}}}
{{then}}
"""
GREETS = f"echo {GREETING.decode().strip()}; read orders"
TOUCH = "echo touch your key >&2; until grep -q touch {seen}; do sleep 0.01; done"
"""Goes on once it was seen what it asks for."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_ssh, "FIRST_PAUSE", 0.002)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("times", "tries"), [(0, 1), (2, 3), (9, 5)])
def test_an_attached_run_tries_again_and_shows_what_ssh_asks(
    times: int, tries: int, tmp_path: Path, capfd: Any
) -> None:
    touch = TOUCH.format(seen=f"/proc/{os.getpid()}/fd/2")
    script = SSHD.format(log=tmp_path / "log", times=times, then=f"{touch}; {GREETS}; echo done")
    orders = Orders(node="beta", address="", authority="")
    made = [over_ssh.Supervised(orders, ["sh", "-c", script])]
    with pytest.raises(UnavailableError, match="on beta") if times >= tries else nullcontext():
        assert over_ssh.supervise_all(made, stdout=1, patience=60.0) == [0]
    assert (tmp_path / "log").read_text().count("\n") == tries
    shown = f"{WHY}\n" * min(times, tries) + "touch your key\n" * (times < tries)
    assert capfd.readouterr() == ("done\n" * (times < tries), shown)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("times", "then", "code", "tries", "out"),
    [
        (2, "cat; echo line", 0, 3, "line\n"),
        (9, "echo line", 255, 5, ""),
        (0, f'echo line; echo "{WHY}" >&2; exit 255', 255, 1, "line\n"),
        (0, "echo no key >&2; exit 255", 255, 1, ""),
    ],
    ids=["for-now-and-reads-nothing", "always", "after-a-part", "for-another-reason"],
)
def test_logs_are_read_at_another_try(
    times: int, then: str, code: int, tries: int, out: str, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    def late(process: Any, source: Any, errors: bool) -> bytes:
        time.sleep(0.1 * (errors and process.wait() > 0))  # all that it says is shown, even so
        return reads(process, source, errors)

    reads = over_ssh._next_of
    monkeypatch.setattr(over_ssh, "_next_of", late)
    script = SSHD.format(log=tmp_path / "log", times=times, then=then)
    member = over_ssh.Member(0, "beta", ["sh", "-c", script])
    assert over_ssh.write_together([member], 1, in_turn=False) == [(code, bool(out))]
    assert (tmp_path / "log").read_text().count("\n") == tries
    shown = capfd.readouterr()
    assert (shown.out, shown.err.count("\n")) == (out, tries - (code == 0))


def test_who_follows_a_job_is_told_of_a_lost_connection_and_of_no_line_twice(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The last lines that the service knows are for who has read none: they are older than what was read."""
    found = api.Reservation(name="reservations/r1", job={"members": [{"last_lines": ["old"]}]})
    for then, out, reason in (
        ("echo old; echo new", "old\nnew\n", "CONNECTION_LOST"),
        ("true", "old\n", "NO_SUPERVISOR"),
    ):
        members = [over_ssh.Member(0, "beta", ["sh", "-c", f"{then}; exit 255"])]
        monkeypatch.setattr(jobs.Job, "look", lambda _: found)
        monkeypatch.setattr(jobs.Job, "_on_nodes", lambda *_, members=members: members)
        with pytest.raises(UnavailableError) as caught:
            jobs.Job(None, found.name).write(1, follow=False)
        assert (caught.value.reason, capfd.readouterr().out) == (reason, out)
