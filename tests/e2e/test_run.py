"""`gpuscalectl run` and `reserve --wait`, against one `gpuscalectl up` with simulated GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.support.cli import Ran, run_cli
from tests.support.up import CTL, Typed, Up, ctl_environment
from tests.support.waiting import eventually_sync

SHELL = ("sh", "-c")
ENDLESS = "while :; do sleep 0.05; done"
UNTIL_TOLD = f"echo ready; {ENDLESS}"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("up"), simulate=2) as running:
        yield running


STARTED: list[Typed] = []


@pytest.fixture(autouse=True)
def all_is_given_back(up: Up) -> Iterator[None]:
    """Whatever a command did, and however it ended, its GPUs are free afterwards, and those of a drained node again."""
    yield
    while STARTED:
        STARTED.pop().close()
    ctl(up, "uncordon", node_of(up))
    assert held(up) == []


def ctl(up: Up, *arguments: str) -> Ran:
    return run_cli("--address", up.address, *arguments)


def held(up: Up) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(ctl(up, "get", "reservations", "-o", "json").out)[
        "reservations"
    ]
    return found


def start(up: Up, *arguments: str) -> Typed:
    process = Typed("--address", up.address, *arguments)
    STARTED.append(process)
    return process


def run(up: Up, *command: str, options: tuple[str, ...] = ()) -> Typed:
    return start(up, "run", "--gpus", "1", *options, "--", *command)


def line(stream: IO[str]) -> str:
    return stream.readline().strip()


def node_of(up: Up) -> str:
    return ctl(up, "get", "nodes", "-o", "name").out.strip()


def test_a_command_gets_gpus_of_its_own_and_its_exit_code_is_kept(up: Up) -> None:
    show = "echo $CUDA_VISIBLE_DEVICES; echo $GPUSCALE_RESERVATION $GPUSCALE_FENCE; exit 7"
    ran = start(up, "run", "--gpus", "2", "--holder", "me", "--", *SHELL, show).ended()
    uuids, whose = ran.out.splitlines()
    assert ran.code == 7, ran.err
    assert len(uuids.split(",")) == 2
    name, fence = whose.split()
    assert name.startswith("reservations/r")
    assert int(fence) >= 1
    assert "SIMULATED" in ran.err
    record = json.loads(ctl(up, "get", "reservations", name, "-o", "json").out)
    assert (record["state"], record["holder"]) == ("STATE_RELEASED", "me")
    assert [gpu["uuid"] for gpu in record["gpus"]] == uuids.split(",")


def test_a_recorded_command_ends_with_the_figures_of_its_gpus(up: Up) -> None:
    """Standard output is the command's, then the table; as data it is the data alone, and the recording stays."""
    options = ("--record", "-o", "json")
    ran = start(up, "run", "--gpus", "2", *options, "--", *SHELL, "echo out; exit 4").ended()
    assert ran.code == 4, ran.err
    found = json.loads(ran.out)
    assert set(found) == {"monitoring_duration_seconds", "sample_count", "gpu_stats", "reservation"}
    assert [gpu["milli"] for gpu in found["reservation"]["gpus"]] == [1000, 1000]
    assert (sorted(found["gpu_stats"]), "out" in ran.err) == (["0", "1"], True)
    listed = json.loads(ctl(up, "get", "recordings", "-o", "json").out)["recordings"]
    assert [(one["state"], len(one["gpus"])) for one in listed] == [("STATE_STOPPED", 2)]
    plain = run(up, *SHELL, "echo out", options=("--record",)).ended()
    assert plain.out.splitlines()[0] == "out"
    assert plain.out.splitlines()[1].startswith("NODE")


def test_signals_are_passed_on_and_one_that_kills_is_told_as_by_a_shell(up: Up) -> None:
    numbers = {"TERM": signal.SIGTERM, "INT": signal.SIGINT, "USR1": signal.SIGUSR1}
    traps = " ".join(f"trap 'echo got {name}' {name};" for name in numbers)
    process = run(up, *SHELL, f"{traps} trap 'kill -9 $$' USR2; {UNTIL_TOLD}")
    assert line(process.stdout) == "ready"
    for name, number in numbers.items():
        process.send_signal(number)
        assert line(process.stdout) == f"got {name}"
    process.send_signal(signal.SIGUSR2)
    ran = process.ended()
    assert (ran.code, ran.out, "Traceback" in ran.err) == (137, "", False), ran.err


def test_a_command_that_a_signal_ends_was_stopped(up: Up) -> None:
    process = run(up, *SHELL, "echo $GPUSCALE_RESERVATION; exec sleep 60")
    job = line(process.stdout)
    process.send_signal(signal.SIGINT)
    assert process.ended().code == 130
    assert state_of(up, job) == "STATE_STOPPED"


def test_a_lease_is_kept_for_longer_than_it_lasts(up: Up) -> None:
    """The shortest lease there is: without renewals it would be lost, and the command stopped, after 5 s."""
    ran = run(up, *SHELL, "sleep 6.5; echo done", options=("--ttl", "5s")).ended()
    assert (ran.code, ran.out) == (0, "done\n"), ran.err


def test_a_command_is_told_of_a_drain_and_ends_before_the_deadline(up: Up) -> None:
    process = run(up, *SHELL, f"trap 'echo told; exit 0' TERM; {UNTIL_TOLD}", options=("--ttl", "20s"))
    assert line(process.stdout) == "ready"
    node = node_of(up)
    assert ctl(up, "drain", node, "--grace", "8s", "--reason", "fan").code == 0
    ran = process.ended()
    assert (ran.code, ran.out) == (4, "told\n"), ran.err
    assert f"{node} is drained: fan: the GPUs are revoked in " in ran.err
    assert f"was lost: nodes/{node.removeprefix('nodes/')} is drained: fan" in ran.err


def state_of(up: Up, job: str) -> str:
    found: str = json.loads(ctl(up, "get", "job", job, "-o", "json").out)["job"]["state"]
    return found


def test_a_command_saves_its_work_by_the_signal_that_it_asked_for_and_starts_again(up: Up) -> None:
    """Long before its GPUs are taken away, and once there are others; why it ended is kept."""
    script = f"[ $GPUSCALE_ATTEMPT = 1 ] || exit 5; trap 'echo saved; exit 0' USR1; {UNTIL_TOLD}"
    options = ("--ttl", "12s", "--on-move", "signal:USR1", "--record", "-o", "json")
    process = run(up, *SHELL, script, options=(*options, "--name", "saves"))
    assert "ready\n" in iter(process.stderr.readline, "")
    node = node_of(up)
    assert ctl(up, "drain", node, "--grace", "600s", "--reason", "fan").code == 0
    eventually_sync(lambda: state_of(up, "saves") == "STATE_WAITING", interval=0.2)
    shown = ctl(up, "get", "job", "saves").out
    assert ctl(up, "uncordon", node).code == 0
    ran = process.ended()
    assert ran.code == 5, ran.err
    recorded = json.loads(ran.out)
    assert [len(one["gpu_stats"]) for one in (recorded, *recorded["earlier_attempts"])] == [1, 1]
    assert f"sending SIGUSR1 to the command: {node} is drained: fan" in ran.err
    assert f"starting attempt 2 on {node.removeprefix('nodes/')}" in ran.err
    assert "It is at attempt 2; before it:" in shown
    assert "is drained: fan; it was sent SIGUSR1 to save its work" in " ".join(shown.split())
    name = json.loads(ctl(up, "get", "job", "saves", "-o", "json").out)["name"]
    told = json.loads(ctl(up, "events", "--about", name, "-o", "json").out)["events"]
    happened = [one["what"].split(":")[0].partition(" to ")[0] for one in told]
    left = f"its job left {node.removeprefix('nodes/')}"
    assert happened == ["granted", "its job was asked", left, "granted again", "released"]


def test_a_command_that_takes_too_long_to_save_its_work_is_stopped(up: Up) -> None:
    script = f"[ $GPUSCALE_ATTEMPT = 1 ] || exit 5; trap 'echo saving' USR1; trap 'echo stopped; exit 3' TERM; {UNTIL_TOLD}"
    options = ("--ttl", "12s", "--name", "slow", "--record", "--on-move", "signal:SIGUSR1,grace:1s")
    process = run(up, *SHELL, script, options=options)
    assert line(process.stdout) == "ready"
    node = node_of(up)
    assert ctl(up, "drain", node, "--grace", "600s", "--reason", "fan").code == 0
    eventually_sync(lambda: state_of(up, "slow") == "STATE_WAITING", interval=0.2)
    assert ctl(up, "uncordon", node).code == 0
    ran = process.ended()
    assert ran.code == 5, ran.err
    figures = ["NODE", *[node.removeprefix("nodes/")] * 2]
    assert [one.split()[0] for one in ran.out.splitlines()[:5]] == ["saving", "stopped", *figures]
    assert "it did not end in the grace of --on-move" in ran.err


def test_a_command_that_somebody_ends_as_it_saves_its_work_stays_ended(up: Up) -> None:
    script = f"trap 'echo saving' USR1; trap 'exit 3' TERM; {UNTIL_TOLD}"
    process = run(up, *SHELL, script, options=("--ttl", "12s", "--on-move", "signal:USR1"))
    assert line(process.stdout) == "ready"
    assert ctl(up, "drain", node_of(up), "--grace", "600s", "--reason", "fan").code == 0
    assert line(process.stdout) == "saving"
    process.send_signal(signal.SIGTERM)
    ran = process.ended()
    assert (ran.code, ran.out) == (3, ""), ran.err


DETACHED = {
    "setsid": "setsid {0} &",
    "empty environment": "env -i setsid {0} &",
    "forked twice": "( ( exec setsid {0} ) & );",
    "deaf": "( trap '' TERM; exec env -i setsid {0} ) &",
    "deaf child": "( trap '' TERM; exec {0} ) &",
}
SLEEP = "/bin/sh -c 'echo $$ | tee -a {0}; exec /bin/sleep 900 >/dev/null 2>&1'"


def detaching(told: Path) -> str:
    """A script that starts all of these; each tells its number, and writes it to this file too."""
    return " ".join(each.format(SLEEP.format(told)) for each in DETACHED.values())


def running(pid: int) -> bool:
    """Whether it is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it ended before or while that was read
        return False


def test_a_command_and_what_it_detached_are_stopped_when_its_lease_is_lost(up: Up, tmp_path: Path) -> None:
    """What does not heed SIGTERM is killed: its GPUs may be another's by then."""
    script = f"{detaching(tmp_path / 'told')} trap '' TERM; echo $$; {ENDLESS}"
    process = run(up, *SHELL, script, options=("--ttl", "12s"))
    pids = [int(line(process.stdout)) for _ in (*DETACHED, "the command")]
    node = node_of(up)
    assert ctl(up, "drain", node, "--grace", "0s", "--reason", "fan").code == 0
    ran = process.ended()
    assert ran.code == 4, ran.err
    assert f"{node} is drained: fan" in ran.err
    assert not any(map(running, pids))


def test_what_a_command_left_behind_is_stopped_before_its_gpus_are_given_back(up: Up, tmp_path: Path) -> None:
    told = tmp_path / "told"
    all_told = f"until [ $(cat {told} | wc -l) = {len(DETACHED)} ]; do sleep 0.05; done"
    script = f"{detaching(told)} {all_told}; exit 3"
    ran = run(up, *SHELL, script, options=("--ttl", "12s")).ended()
    assert ran.code == 3, ran.err
    pids = list(map(int, ran.out.split()))
    assert len(pids) == len(DETACHED)
    assert not any(map(running, pids))
    [said] = [one for one in ran.err.splitlines() if "stopping processes that the command left" in one]
    assert all(f"sleep ({pid})" in said for pid in pids)


def test_a_command_does_not_outlive_a_run_that_is_killed(up: Up) -> None:
    """Nothing can be done by a process that gets SIGKILL: the kernel does it."""
    process = run(up, *SHELL, "echo $$ $GPUSCALE_RESERVATION; exec sleep 900 >/dev/null 2>&1")
    pid, name = line(process.stdout).split()
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    eventually_sync(lambda: not running(int(pid)))
    assert ctl(up, "release", name).code == 0


def test_what_ends_by_itself_after_the_command_is_left_to_it(up: Up, tmp_path: Path) -> None:
    """Such as the `tee` that it wrote to: its last lines are not lost."""
    ran = run(up, *SHELL, f"(sleep 0.4; echo last >{tmp_path}/log) & exit 0").ended()
    assert (ran.code, (tmp_path / "log").read_text()) == (0, "last\n")
    assert "stopping" not in ran.err


def test_processes_that_are_not_of_the_command_are_left_alone(up: Up) -> None:
    """A shell that becomes `run` by exec had children before."""
    words = " ".join([*CTL, "--address", up.address, "run", "--gpus", "1", "--", "true"])
    script = f"sleep 900 >/dev/null 2>&1 & echo $!; exec {words}"
    ran = subprocess.run(
        [*SHELL, script], env=ctl_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    pid = int(ran.stdout)
    try:
        assert (ran.returncode, running(pid)) == (0, True), ran.stderr
    finally:
        os.kill(pid, signal.SIGKILL)


def test_without_room_it_waits_its_turn_and_says_so(up: Up) -> None:
    first = run(up, *SHELL, UNTIL_TOLD, options=("--gpus", "2"))
    assert line(first.stdout) == "ready"
    second = run(up, "echo", "mine", options=("--gpus", "2"))
    assert "next in the queue" in line(second.stderr)
    assert run(up, "true", options=("--wait", "0s")).ended().code == 5
    first.send_signal(signal.SIGTERM)
    assert second.ended().out == "mine\n"


def test_a_command_gets_the_gpus_of_a_booking_and_others_do_not(up: Up) -> None:
    booked = ctl(up, "reserve", "--gpus", "2", "--at", "now", "--for", "1h", "--name", "demo", "-o", "json")
    assert booked.code == 0, booked.err
    gpus = {one.rpartition("/")[2] for one in json.loads(booked.out)["gpus"]}
    # However busy a run before this one left the GPUs: the booking alone is in its way.
    any_use = ("--max-utilization", "100")
    other = ctl(up, "run", "--gpus", "1", *any_use, "--wait", "0s", "--", "true")
    assert other.code == 5
    assert "booked by local (bookings/demo)" in other.err
    for _ in range(2):  # as often as its owner likes
        ran = start(up, "run", "--booking", "demo", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").ended()
        assert (ran.code, {one.lower() for one in ran.out.strip().split(",")}) == (0, gpus)
    assert ctl(up, "delete", "booking", "demo", "--yes").code == 0
    assert ctl(up, "run", "--gpus", "1", *any_use, "--", "true").code == 0
