"""Detached jobs on one host, against `gpuscalectl up` with simulated GPUs."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from gpuscale.api.allocator.v1 import Job
from gpuscale.client import ReserveOptions, connect, connect_async, jobs, reserve_request
from gpuscale.client.orders import Orders
from gpuscale.client.over_ssh import SUPERVISOR
from gpuscale.common.errors import DeadlineExceededError, FailedPreconditionError
from tests.e2e.test_run import start
from tests.support.cli import Ran
from tests.support.ports import free_port
from tests.support.shell import Shell
from tests.support.up import Up, ctl_environment
from tests.support.waiting import eventually, eventually_sync

SHELL = ("sh", "-c")


class Site:
    """A server that can be killed and started again, and the folder in which jobs keep what they write."""

    def __init__(self, folder: Path) -> None:
        self.state, self._folder = folder / "state", folder
        self._listen = ("--listen", f"127.0.0.1:{free_port()}")
        self._shell = Shell(ctl_environment())
        self.up = self.begin()

    def begin(self) -> Up:
        return Up(self._folder, simulate=2, arguments=self._listen)

    def ctl(self, *words: str) -> Ran:
        """What a command leaves behind."""
        return self._shell.ctl("--address", self.up.address, *words, environment=ctl_environment())

    def end(self) -> None:
        """Whatever ran is gone."""
        self._shell.close()
        self.up.kill()

    def detached(self, script: str, *options: str) -> str:
        """The name of a job that runs."""
        ran = self.ctl("run", "-d", "--gpus", "1", *options, "--", *SHELL, script)
        assert ran.code == 0, ran.err
        return ran.out.strip()

    def holding(self, gate: Path, *options: str) -> str:
        """The name of a job that has all GPUs until something is written to the gate.

        It waits while a GPU still looks busy with the job before, and one that asks for a single GPU would pass it.
        """
        name = self.detached(f"read x <{gate}", "--gpus", "2", *options)
        eventually_sync(lambda: self.job(name)["state"] == "STATE_RUNNING")
        return name

    def job(self, name: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.ctl("get", "job", name, "-o", "json").out)["job"]
        return found

    def folder(self, name: str) -> Path:
        return self.state / "gpuscale" / "jobs" / f"{name}-0"

    def output(self, name: str) -> str:
        """What the job has written."""
        return (self.folder(name) / "output").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        made = Site(tmp_path_factory.mktemp("jobs"))
        patch.setenv("XDG_STATE_HOME", str(made.state))
        yield made
        assert json.loads(made.ctl("get", "reservations", "-o", "json").out)["reservations"] == []
        made.end()


def test_a_job_whose_output_cannot_be_kept_is_not_started_and_holds_nothing(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()  # a home that is read-only fails alike
    ran = site.ctl("run", "-d", "--gpus", "1", "--name", "homeless", "--", "true")
    assert (ran.code, "Traceback" in ran.err) == (4, False), ran.err
    assert "cannot keep the output of the job (Not a directory: " in ran.err
    assert site.job("homeless")["state"] == "STATE_FAILED"


def test_a_job_goes_on_without_its_caller_and_keeps_what_it_writes_for_its_user(
    site: Site, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    name = site.detached(f"echo first; read x <{go}; echo last >&2; exit 3", "--name", "train")
    eventually_sync(lambda: site.job(name)["state"] == "STATE_RUNNING")
    eventually_sync(lambda: site.output(name) == "first\n")
    assert site.ctl("logs", "train").out == "first\n"
    table = site.ctl("get", "jobs").out
    assert [part for part in (name, "train", "RUNNING") if part not in table] == []
    with go.open("w") as way:
        way.write("\n")
    assert site.ctl("wait", name).code == 3
    assert site.ctl("attach", "train").out.endswith("first\nlast\n")
    assert (site.job(name)["state"], site.job(name)["exitCode"]) == ("STATE_FAILED", 3)
    kept = {one: stat.S_IMODE(one.stat().st_mode) for one in site.folder(name).iterdir()}
    assert {one.name: mode for one, mode in kept.items()} == dict.fromkeys(
        ("job.json", "lock", "output"), 0o600
    )
    assert stat.S_IMODE(site.folder(name).stat().st_mode) == 0o700
    assert json.loads((site.folder(name) / "job.json").read_text())["exitCode"] == 3


def test_a_job_that_waits_keeps_its_place_and_is_started_once(site: Site, tmp_path: Path) -> None:
    """Its caller ended at once, and every service is killed while it waits; the one that runs meanwhile goes on."""
    runs, gate = tmp_path / "runs", tmp_path / "gate"
    os.mkfifo(gate)
    holds = site.holding(gate, "--ttl", "60s")
    name = site.detached(f"echo $$ >>{runs}; exit 6", "--name", "night", "--wait", "1h")
    after = site.detached(f"echo after >>{runs}", "--wait", "1h")
    gone = site.detached("true", "--wait", "1h")
    site.up.kill()
    site.up = site.begin()
    eventually_sync(lambda: "WAITING (1)" in site.ctl("get", "jobs", "night").out)
    eventually_sync(lambda: "WAITING (2)" in site.ctl("get", "jobs", after).out)
    assert "GPU" in site.ctl("get", "job", "night").out.splitlines()[-1]
    said = site.ctl("logs", name)
    assert (said.code, "waits" in said.err) == (4, True), said.err
    assert site.ctl("stop", gone).code == 0
    assert site.job(gone)["state"] == "STATE_STOPPED"
    with gate.open("w") as way:
        way.write("\n")
    assert site.ctl("attach", "night").code == 6
    assert site.ctl("wait", "jobs", holds, after, "--timeout", "90s").code == 0
    assert len(runs.read_text().split()) == 2


def test_a_repeated_request_id_starts_one_job_whenever_the_first_call_ended(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, gate = tmp_path / "runs", tmp_path / "gate"
    os.mkfifo(gate)
    words = ("run", "-d", "--gpus", "1", "--request-id", str(uuid4()), "--")
    words = (*words, *SHELL, f"echo $$ >>{runs}; read x <{gate}")
    path = os.environ["PATH"]
    monkeypatch.setenv(
        "PATH", f"{executable(tmp_path / 'sh', 'touch $0.ran; exec sleep 7416').parent}:{path}"
    )
    killed = start(site.up, *words)  # between its grant and its start
    eventually_sync(lambda: (tmp_path / "sh.ran").exists())
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=30)
    monkeypatch.setenv("PATH", path)
    at_once = [start(site.up, *words) for _ in range(2)]
    names = {(ran.code, ran.out) for ran in [one.ended() for one in at_once]}
    assert [code for code, _ in names] == [0]
    ran = site.ctl(*words)
    assert (ran.code, ran.out) in names
    with gate.open("w") as way:
        way.write("\n")
    assert site.ctl("wait", ran.out.strip()).code == 0
    again = site.ctl(*words)
    assert (again.code, again.out) in names
    assert len(runs.read_text().split()) == 1


def test_a_repeated_request_id_of_an_attached_job_is_refused_at_once(site: Site, tmp_path: Path) -> None:
    """Also before the service knows of the first: it answers nobody while they are started."""
    runs, gate = tmp_path / "runs", tmp_path / "gate"
    os.mkfifo(gate)
    words = ("run", "--gpus", "1", "--request-id", str(uuid4()), "--")
    words = (*words, *SHELL, f"echo $$ >>{runs}; read x <{gate}")
    both = [start(site.up, *words) for _ in range(2)]
    eventually_sync(lambda: any(one.poll() is not None for one in both))
    with gate.open("w") as way:
        way.write("\n")
    said = sorted((ran.code, "earlier call" in ran.err) for ran in [one.ended() for one in both])
    assert said == [(0, False), (4, True)]
    again = site.ctl(*words)
    assert (again.code, "has ended" in again.err) == (4, True), "its GPUs were given back"
    assert len(runs.read_text().split()) == 1


LOSING = """
export GPUSCALE_WORK_ADDRESS=$AGENT
n=$(cat $0.calls 2>/dev/null | wc -l); echo >>$0.calls
for last in "$@"; do :; done
case $n in
1) echo gpuscale supervisor 2; exit 255;;
2) exec 3<&0; setsid sh -c "$last" <&3 3<&- & until ls $XDG_STATE_HOME/gpuscale/jobs/*-0/lock; do sleep 0.05; done; exit 255;;
*) exec sh -c "$last";;
esac
"""
"""An ssh whose second connection ends before the orders are there, and the third while they are carried out."""


def test_what_ssh_lost_of_a_start_in_turn_is_started_again_and_once(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, gate, ssh = tmp_path / "runs", tmp_path / "gate", executable(tmp_path / "ssh", LOSING)
    os.mkfifo(gate)
    holds = site.holding(gate)
    monkeypatch.setenv("AGENT", site.up.address)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    name = site.detached(f"echo $$ >>{runs}; exit 6", "--user", "me", "--wait", "1h")
    with gate.open("w") as way:
        way.write("\n")
    assert site.ctl("wait", name, "--timeout", "90s").code == 6
    eventually_sync(lambda: len(Path(f"{ssh}.calls").read_text()) == 4)
    assert (len(runs.read_text().split()), site.ctl("wait", holds).code) == (1, 0)


@pytest.mark.parametrize("end", ["stop", "release"])
def test_a_start_that_comes_after_its_end_runs_nothing(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Nobody has taken its orders: `stop` sees to it that nobody does, and waits for nothing."""
    with connect(site.up.address) as client:
        # That of the test before is free, and known to do nothing any more.
        eventually_sync(lambda: site.ctl("check", "--gpus", "1").code == 0)
        request = reserve_request(1, "me", ReserveOptions())
        request.job.command = "late"
        granted = client.allocator.Reserve(request)
        monkeypatch.setattr(jobs, "STOP_SECONDS", 3600.0)
        assert site.ctl(end, granted.reservation.name).code == 0
        node = granted.reservation.gpus[0].name.split("/")[1]
        orders = Orders(
            node=node,
            command=("touch", str(tmp_path / "ran")),
            address=site.up.address,
            authority="",
            detached=True,
        )
        [late] = orders.of_grant(granted, node)
    ran = subprocess.run(SUPERVISOR, input=late.line(), capture_output=True, check=False)
    refused = end == "release"  # else it was started before, as far as its node knows
    assert (ran.returncode, b"has ended" in ran.stderr, (tmp_path / "ran").exists()) == (
        refused * 4,
        refused,
        False,
    )
    assert site.job(late.reservation)["state"] == "STATE_STOPPED"


def executable(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def _runs(value: str, variable: str = "GPUSCALE_RESERVATION") -> bool:
    """Whether there is a process in whose environment a variable has this value: one of a job, by the name of its reservation."""
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.environ().get(variable) == value and one.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def test_a_killed_supervisor_leaves_no_process_and_its_job_has_ended(site: Site) -> None:
    name = site.detached("setsid sleep 7414 & trap '' TERM; sleep 7415; wait", "--ttl", "60s")
    os.kill(int((site.folder(name) / "pid").read_text()), signal.SIGKILL)
    eventually_sync(lambda: not _runs(f"reservations/{name}"))
    eventually_sync(lambda: site.job(name)["state"] == "STATE_STOPPED")
    assert "its supervisor was killed" in site.ctl("get", "job", name).out


@pytest.mark.parametrize("killed", [False, True], ids=["from Python", "killed"])
def test_a_job_that_saved_its_work_is_started_again_on_its_own_host_too(
    site: Site, tmp_path: Path, killed: bool
) -> None:
    """Where its node is drained it waits, and goes on once there are GPUs again."""
    saves = "trap 'exit 3' USR1; while :; do sleep 0.05; done"
    script = f"echo $GPUSCALE_ATTEMPT; if [ $GPUSCALE_ATTEMPT = 1 ]; then {saves}; fi; exit 7"
    if killed:
        script = script.replace("exit 3", f"echo saving >{tmp_path}/saving")
        name = site.detached(script, "--ttl", "20s", "--on-move", "signal:USR1")
    else:
        with connect(site.up.address) as client:
            job = client.run([*SHELL, script], ttl="20s", on_move="signal:USR1")
        name = job.name.removeprefix("reservations/")
    node = site.ctl("get", "nodes", "-o", "name").out.strip()
    eventually_sync(lambda: site.output(name) == "1\n", interval=0.2)
    assert site.ctl("drain", node, "--grace", "600s").code == 0
    try:
        if killed:
            eventually_sync((tmp_path / "saving").exists)
            os.kill(int((site.folder(name) / "pid").read_text()), signal.SIGKILL)
        eventually_sync(lambda: site.job(name)["state"] == "STATE_WAITING", interval=0.2)
    finally:
        assert site.ctl("uncordon", node).code == 0
    assert site.ctl("wait", name).code == 7
    assert site.ctl("logs", name).out == "2\n"
    assert f"'exitCode': {137 if killed else 3}" in str(site.job(name)["earlier"])


def test_a_time_limit_warns_and_ends_a_job(site: Site) -> None:
    name = site.detached("exec sleep 7413", "--time-limit", "1s")
    assert site.ctl("wait", name).code == 143
    said = site.ctl("logs", name).out
    assert "the time limit of 1s ends the command in" in said
    assert "its time limit of 1s is over" in said


def test_what_cannot_start_says_so_at_once(site: Site) -> None:
    ran = site.ctl("run", "-d", "--gpus", "1", "--", "no-such-command")
    assert (ran.code, ran.out, "no-such-command" in ran.err) == (127, "", True)


def test_a_member_that_fails_leaves_the_others_alone_where_that_is_wanted(site: Site) -> None:
    script = "if [ $NODE_RANK = 1 ]; then exit 4; fi; sleep 2; echo rank $NODE_RANK of $NNODES"
    options = ("--members", "2", "--on-member-failure", "continue", "--name", "two")
    ran = site.ctl("run", "--gpus", "1", *options, "--", *SHELL, script)
    assert (ran.code, ran.out) == (4, "[0] rank 0 of 2\n"), ran.err


def test_a_program_runs_reads_waits_for_and_stops_jobs(site: Site, tmp_path: Path) -> None:
    gates = [tmp_path / f"gate{rank}" for rank in range(2)]
    for gate in gates:
        os.mkfifo(gate)
    with connect(site.up.address) as client:
        # Those of the test before are free, and known to do nothing any more.
        eventually_sync(lambda: site.ctl("check", "--gpus", "2").code == 0)
        script = f"echo rank $NODE_RANK $MINE; read x <{tmp_path}/gate$NODE_RANK; exit 3"
        job = client.run([*SHELL, script], members=2, title="two", environment={"MINE": "1"})
        waits = client.run(["true"], wait="1h")
        assert "STATE_WAITING" in str(waits.look().job)
        lines = job.logs(follow=True)
        assert sorted([next(lines), next(lines)]) == ["[0] rank 0 1", "[1] rank 1 1"]
        lines.close()
        with pytest.raises(DeadlineExceededError):
            job.wait(timeout=0)
        for gate in gates:
            gate.write_text("\n")
        assert (job.wait(timeout="60s"), waits.wait(timeout=60)) == (3, 0)
        assert sorted(job.logs()) == ["[0] rank 0 1", "[1] rank 1 1"]
        with pytest.raises(FailedPreconditionError, match="can never be granted") as full:
            client.run(["true"], members=3, wait=0)
        assert "only this host" not in full.value.message
        with pytest.raises(FailedPreconditionError, match="has no directory /nowhere") as refused:
            client.run(["true"], directory="/nowhere")
        assert refused.value.reason == "JOB_NOT_STARTED"
        with client.run(["sleep", "7417"]) as block:
            pass
        assert (block.look().job.state, _runs(block.name)) == (Job.STATE_STOPPED, False)


async def test_an_event_loop_runs_reads_waits_for_and_stops_jobs(site: Site) -> None:
    async with connect_async(site.up.address) as client:
        job = await client.run([*SHELL, "echo first; echo last; exit 3"], title="async")
        assert [line async for line in job.logs(follow=True)] == ["first", "last"]
        assert await job.wait(timeout=60) == 3
        async with await client.run(["sleep", "7418"]) as block:

            async def running() -> bool:  # a busy machine may tell of it only after it has started
                return (await block.look()).job.state == Job.STATE_RUNNING

            await eventually(running)
        assert ((await block.look()).job.state, _runs(block.name)) == (Job.STATE_STOPPED, False)
        mine = uuid4().hex
        starts = asyncio.create_task(client.run(["sleep", "7419"], environment={"MINE": mine}))
        await asyncio.sleep(0)  # it begins
        starts.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starts
    eventually_sync(lambda: not _runs(mine, "MINE"))
