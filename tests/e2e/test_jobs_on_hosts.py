"""Jobs on three GPU hosts under mutual TLS, typed by people without rights on a laptop; see `tests.support.lab`.

The leases of beta and gamma are kept through the socket of their agents, those of alpha by the gateway, with the lease token
alone: both ways of docs/jobs.md.
"""

import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support import nvml_double
from tests.support.fixtures import need
from tests.support.hosts import why_unavailable
from tests.support.killing import Round
from tests.support.lab import GPU_HOSTS, LAPTOP, Lab
from tests.support.lab import lab as made_lab
from tests.support.waiting import eventually_sync

SHELL = ("sh", "-c")
MEET = f"{sys.executable} {Path(__file__).parents[1] / 'support' / 'meet.py'}"
MEMBERS = ("--members", "2", "--strategy", "strict-spread")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    need(why_unavailable())
    need(nvml_double.why_unavailable())
    with made_lab(tmp_path_factory.mktemp("lab")) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(lab: Lab) -> Iterator[None]:
    """Whatever a job did, and however it ended: no process of it runs, and nothing is held."""
    yield
    eventually_sync(lambda: (lab.left("sleep 7"), lab.held()) == ([], []), timeout=60.0, interval=0.5)


def detached(lab: Lab, script: str, *options: str) -> str:
    """The name of a job that runs."""
    ran = lab.ctl("run", "-d", "--gpus", "1", *options, "--", *SHELL, script)
    assert ran.code == 0, ran.err
    return ran.out.strip()


@pytest.mark.parametrize("node", ["alpha", "beta"], ids=["by-the-gateway", "by-its-agent"])
def test_a_command_runs_on_the_host_that_was_granted_as_who_types_it(lab: Lab, node: str) -> None:
    script = "hostname; id -un; pwd; echo $CUDA_VISIBLE_DEVICES $MINE; wc -c; exit 7"
    words = f"run --gpus 1 --node {node} --env MINE=1 --directory /usr --".split()
    ran = lab.ctl(*words, *SHELL, script, stdin="x" * 300_000)
    host, user, directory, last, count = ran.out.splitlines()
    assert (host, user, directory, ran.code) == (node, "ann", "/usr", 7), ran.err
    assert last.startswith(f"GPU-{node}-")
    assert (last.endswith(" 1"), count) == (True, "300000")
    assert "is not counted" not in ran.err


def test_nothing_is_started_nor_held_where_something_is_missing(lab: Lab) -> None:
    ran = lab.ctl("run", "--gpus", "1", "--node", "beta", "--directory", "/nowhere", "--", "true")
    assert (ran.code, "beta has no directory /nowhere" in ran.err) == (4, True)
    ran = lab.ctl("run", "--gpus", "1", "--node", "beta", "--user", "root", "--", "true")
    assert (ran.code, "no supervisor came up on beta" in ran.err) == (7, True)


@pytest.mark.parametrize("how", [(), ("-d",)], ids=["attached", "detached"])
def test_no_member_starts_where_one_cannot(lab: Lab, how: tuple[str, ...]) -> None:
    lab.hosts.run("beta", "mkdir", "-p", "/home/ann/only", user="ann")
    where = (*MEMBERS, "--node", "beta", "--node", "gamma", "--directory", "/home/ann/only")
    ran = lab.ctl("run", "--gpus", "1", *how, *where, "--", "touch", "ran")
    assert (ran.code, "gamma has no directory /home/ann/only" in ran.err) == (4, True), ran.err
    assert lab.hosts.run("beta", "ls", "/home/ann/only").out == ""


RESOLVES = "sed -i '/ beta$/d' /etc/hosts", "cp /etc/hosts.all /etc/hosts"
SETTINGS = "mkdir -p ~/.ssh; cat > ~/.ssh/config; chmod 600 ~/.ssh/config"


def test_ssh_goes_by_the_settings_keys_and_known_hosts_of_who_types_it(lab: Lab) -> None:
    """A name that only ~/.ssh/config leads to its host, a host whose key is not known, and another user there."""

    def settings(text: str) -> None:
        assert lab.hosts.run(LAPTOP, *SHELL, SETTINGS, user="ann", stdin=text).code == 0

    on_beta, on_gamma = (("run", "--gpus", "1", "--node", one) for one in ("beta", "gamma"))
    lab.hosts.run(LAPTOP, *SHELL, f"cp /etc/hosts /etc/hosts.all; {RESOLVES[0]}")
    try:
        lost = lab.ctl(*on_beta, "--", "hostname")
        assert (lost.code, "Could not resolve hostname beta" in lost.err) == (7, True), lost.err
        settings(f"Host beta\n  HostName {lab.hosts.address('beta')}\n")
        assert lab.must(*on_beta, "--", "hostname") == "beta\n"
        settings("Host gamma\n  GlobalKnownHostsFile /dev/null\n")
        strange = lab.ctl(*on_gamma, "--", "hostname")
        assert (strange.code, "Host key verification failed" in strange.err) == (7, True), strange.err
    finally:
        settings("")
        lab.hosts.run(LAPTOP, *SHELL, RESOLVES[1])
    let_in = f"cat {lab.hosts.folder}/keys/ann.pub >> /home/bob/.ssh/authorized_keys"
    lab.hosts.run("gamma", *SHELL, let_in)
    as_bob = ("-d", "--user", "bob", "--directory", "/tmp")
    name = lab.must(*on_gamma, *as_bob, "--", *SHELL, "id -un; pwd").strip()
    assert lab.must("attach", name) == "bob\n/tmp\n"


TOKEN_OF = """
import sys
from gpuscale.api.allocator import v1 as api
from gpuscale.client import connect
with connect() as client:
    print(client.allocator.GetReservation(api.GetReservationRequest(name=f"reservations/{sys.argv[1]}")).lease_token)
"""
FIND = """
cat > /mnt/secret
find /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null > /mnt/where
find /home /root /run /tmp /etc/gpuscale* /var/lib -xdev -type f -newercm /etc/hostname 2>/dev/null >> /mnt/where
grep -c . /mnt/where
xargs -a /mnt/where grep -slaFf /mnt/secret
rm /mnt/secret
"""
"""Which files, arguments and environments of a host hold what comes on standard input; and how many there are.

Of the files those that changed since the host got its name, before anything ran there.
"""


def places(lab: Lab, secret: str) -> dict[str, list[str]]:
    """Where it is found: files, arguments (/proc/PID/cmdline) and environments (/proc/PID/environ), by host."""
    found = {
        host: lab.hosts.run(host, *SHELL, FIND, stdin=secret).out.split() for host in (LAPTOP, *GPU_HOSTS)
    }
    assert all(int(one[0]) > 20 for one in found.values())
    return {host: paths for host, (_, *paths) in found.items() if paths}


def told(lab: Lab, *secrets: str) -> list[str]:
    """Which outputs of ours hold one of them: lists, descriptions, and logs of all programs and callers."""
    shown = {
        " ".join(words): lab.must(*words)
        for kind in ("jobs", "reservations")
        for words in (("get", kind, "-o", "json", "-a"), ("get", kind, "-o", "wide", "-a"))
    }
    logs = {path.name: path.read_text() for path in lab.hosts.folder.glob("*.log")}
    assert {f"{host}.log" for host in GPU_HOSTS} <= logs.keys()
    return [where for where, text in {**shown, **logs}.items() if any(one in text for one in secrets)]


def test_a_detached_job_is_its_users_alone_and_shows_its_token_to_nobody(lab: Lab) -> None:
    script = "id -un; while [ ! -e /home/ann/go ]; do sleep 0.1; done; exit 3"
    name = detached(lab, script, "--name", "train", "--node", "beta")
    eventually_sync(lambda: lab.must("logs", "train") == "ann\n", interval=0.5)
    kept = f"/home/ann/.local/state/gpuscale/jobs/{name}-0"
    stranger = lab.hosts.run("beta", "cat", f"{kept}/output", user="bob")
    assert (stranger.code, "Permission denied" in stranger.err) == (1, True), stranger.err
    token = lab.hosts.run(LAPTOP, sys.executable, "-c", TOKEN_OF, name, user="ann").out.strip()
    assert len(token) == 43
    assert lab.hosts.run(LAPTOP, sys.executable, "-c", TOKEN_OF, name, user="bob").out.strip() == ""
    assert places(lab, token) == {}
    assert places(lab, "train").keys() >= {"alpha"}  # what is no secret is found in the ledger
    assert told(lab, token) == []
    for refused in ("stop", "release"):  # by name, fence or ssh: bob is not ann
        assert lab.ctl(refused, name, user="bob").code != 0
    lab.hosts.run("beta", "touch", "/home/ann/go")
    assert lab.ctl("attach", name).code == 3
    assert lab.job(name)["state"] == "STATE_FAILED"


VALUE = "c4n4ry-of-a-variable"


@pytest.mark.parametrize("how", [(), ("-d",)], ids=["attached", "detached"])
def test_values_of_variables_and_what_the_person_logs_in_with_are_where_they_were_put(
    lab: Lab, how: tuple[str, ...]
) -> None:
    """What is typed stands in the arguments of the program that was typed, and in the environment of the command."""
    words = ["run", *how, *f"--gpus 1 --gpu beta/gpu-beta-0 --env MINE={VALUE} --name canary".split()]
    typed = lab.start(*words, "--", *SHELL, "setsid sleep 7471 & sleep 7472; wait", log="canary.log")
    eventually_sync(lambda: len(lab.left("sleep 747")) == 2, interval=0.2)
    if how:
        assert typed.wait() == 0
    found = places(lab, VALUE)
    started = lab.hosts.run("beta", "pgrep", "-u", "ann", "-f", "^(sh -c |)(setsid )?sleep 747").out.split()
    assert sorted(found.pop("beta")) == sorted(f"/proc/{pid}/environ" for pid in started)
    assert len(started) == 3
    if not how:
        [own] = found.pop(LAPTOP)
        arguments = lab.hosts.run(LAPTOP, "cat", own).out
        assert (own.endswith("/cmdline"), "\0".join(words) in arguments) == (True, True)
    assert found == {}
    [login] = lab.hosts.run(LAPTOP, *SHELL, "ls ~/.config/gpuscale/*.token", user="ann").out.split()
    person = lab.hosts.run(LAPTOP, "cat", login).out.strip()
    assert (len(person) > 20, places(lab, person)) == (True, {LAPTOP: [login]})
    assert told(lab, VALUE, person) == []
    assert VALUE not in lab.must("describe", "job", "canary")
    lab.must("stop", "canary") if how else typed.kill()


def test_a_detached_job_is_stopped_with_all_that_it_started(lab: Lab) -> None:
    name = detached(lab, "trap '' TERM; setsid sleep 7421 & sleep 7422 & wait; wait", "--ttl", "20s")
    eventually_sync(lambda: len(lab.left("sleep 742")) == 2)
    lab.must("stop", name)
    assert (lab.left("sleep 742"), lab.job(name)["state"]) == ([], "STATE_STOPPED")


def test_a_lease_that_is_revoked_leaves_no_process_on_any_host(lab: Lab) -> None:
    script = "trap '' TERM; setsid sleep 7461 & sleep 7462 & wait; wait"
    ttl = 32.0
    name = detached(lab, script, *MEMBERS, "--ttl", f"{ttl:g}s")
    eventually_sync(lambda: len(lab.left("sleep 746")) == 4)
    lab.admin("release", name)
    # Heard of after a twelfth of it, and killed after a fifth more.
    eventually_sync(lambda: lab.left("sleep 746") == [], timeout=ttl - 2.0, interval=0.2)
    assert lab.job(name)["state"] == "STATE_STOPPED"


def test_members_on_two_hosts_meet_at_the_first(lab: Lab) -> None:
    out = lab.must("run", "--gpus", "1", *MEMBERS, "--", *SHELL, f"hostname; exec {MEET}")
    of = {
        number: [one[4:] for one in out.splitlines() if one.startswith(f"[{number}] ")] for number in (0, 1)
    }
    assert of[0][0] != of[1][0]
    assert (of[0][1:], of[1][1:]) == (["0 of 2 heard 1"], ["1 of 2 heard 1"])


RUN = """
from gpuscale.client import connect
with connect() as client:
    job = client.run(["hostname"], members=2, gang_strategy="strict_spread")
    print(sorted(job.logs(follow=True)), job.wait(timeout=60))
    with client.run(["sleep", "7455"], nodes=["gamma"]) as block:
        print(next(iter(block.look().gpus)).name)
"""


def test_a_program_on_the_laptop_runs_jobs_on_the_hosts(lab: Lab) -> None:
    ran = lab.hosts.run(LAPTOP, sys.executable, "-c", RUN, user="ann")
    first, second = ran.out.splitlines()
    where = [f"['[0] {one}', '[1] {other}'] 0" for one in GPU_HOSTS for other in GPU_HOSTS if one != other]
    assert (first in where, second.startswith("nodes/gamma/gpus/")) == (True, True), ran.out
    assert (ran.err, lab.left("sleep 7455")) == ("", [])


@pytest.mark.parametrize("how", [(), ("-d",)], ids=["attached", "detached"])
def test_a_member_that_is_killed_stops_the_others_at_once(lab: Lab, how: tuple[str, ...]) -> None:
    script = "if [ $NODE_RANK = 1 ]; then sleep 1; kill -9 $$; fi; setsid sleep 7431 & sleep 7432"
    ran = lab.ctl("run", "--gpus", "1", *MEMBERS, *how, "--name", "pair", "--", *SHELL, script)
    # If a member ended before all had started, -d itself tells the code, and no name.
    name = ran.out.strip() if how else ""
    assert (lab.ctl("wait", name) if name else ran).code == 137, ran.err
    stopped, killed = lab.job("pair")["members"]
    assert stopped["endReason"] == "member 1 ended with 137"
    ended = [datetime.fromisoformat(one["endTime"]) for one in (killed, stopped)]
    assert (ended[1] - ended[0]).total_seconds() < 30


def starter(lab: Lab, host: str, job: str) -> int:
    """0 where what starts a job that waits runs on this host as its user, else 1."""
    return lab.hosts.run(host, "pgrep", "-u", "ann", "-f", f"supervise --job {job}-queued").code


def test_a_job_that_waits_is_started_as_its_user_from_the_host_of_the_services(lab: Lab) -> None:
    """Whatever is killed meanwhile: the program that typed it has ended, the allocator is killed and comes back."""
    holder = lab.must(
        "run", "-d", "--gpus", "2", "--members", "3", "--name", "all", "--", "sleep", "7451"
    ).strip()
    script = "hostname; id -un; pwd; sleep 7452"
    name = detached(
        lab, script, "--name", "night", "--wait", "1h", "--gpus", "2", "--env", "MINE=c4n4ry-of-a-night"
    )
    assert lab.job(name)["queuePosition"] == 0
    assert places(lab, "c4n4ry-of-a-night") == {}  # it is in the memory of who starts it
    assert starter(lab, "alpha", name) == 0
    other = detached(lab, "true", "--wait", "1h", "--via", "gamma")
    assert (starter(lab, "gamma", other), starter(lab, "alpha", other)) == (0, 1)
    lab.must("stop", other)
    eventually_sync(lambda: starter(lab, "gamma", other) == 1)
    lab.kill("alpha", "gpuscale-allocator")
    eventually_sync(lambda: "WAITING (1)" in lab.ctl("get", "jobs").out, interval=0.5)
    lab.must("stop", holder)
    eventually_sync(lambda: len(lab.left("sleep 7452")) == 1, interval=0.5)
    eventually_sync(lambda: len(lab.must("logs", name).split()) == 3, interval=0.5)  # its output is copied
    node, user, folder = lab.must("logs", name).split()
    assert (lab.left("sleep 7452"), user, folder) == ([f"{node}: sleep 7452"], "ann", "/home/ann")
    lab.must("stop", name)
    assert lab.job(name)["state"] == "STATE_STOPPED"


SAVES = (
    "trap 'touch ~/saving; while [ ! -e ~/go ]; do sleep 0.1; done; exit 3' USR1;"
    " echo attempt $GPUSCALE_ATTEMPT; while :; do sleep 7481 & wait; done"
)
EITHER = ("--node", "beta", "--node", "gamma")
AT_ONCE = r"""
cd /etc/gpuscale; grep -q preemption gpuscale.toml && exit
sed -i 's/^\[allocator\]$/[allocator]\npreemption_min_runtime_seconds = 0/' gpuscale.toml; pkill -9 -f gpuscale-allocator
"""


def where(lab: Lab, name: str) -> str:
    """The host on which a job has its GPUs."""
    [held] = [one for one in lab.held() if one["name"] == f"reservations/{name}"]
    [node] = {gpu["nodeName"].removeprefix("nodes/") for gpu in held["gpus"]}
    return str(node)


@pytest.mark.parametrize("killed", ["allocator", "the way"])
def test_a_job_that_saves_its_work_makes_room_and_starts_again_on_another_host(lab: Lab, killed: str) -> None:
    """Whatever is killed as it saves its work: it runs once more, on GPUs that are its own, and nothing else is left of it."""
    lab.hosts.run("alpha", *SHELL, AT_ONCE)
    for host in GPU_HOSTS:
        lab.hosts.run(host, "rm", "-f", "/home/ann/saving", "/home/ann/go")
    eventually_sync(lambda: lab.ctl("check", "--gpus", "2", "--node", "gamma").code == 0, timeout=60.0)
    name = detached(lab, SAVES, *EITHER, "--ttl", "20s", "--on-move", "signal:USR1,grace:60s")
    eventually_sync(lambda: lab.must("logs", name) == "attempt 1\n", interval=0.5)
    old = where(lab, name)
    [new] = {"beta", "gamma"} - {old}
    beside = lab.must("run", "-d", "--gpus", "1", "--node", new, "--", "sleep", "7482").strip()
    large = lab.must("run", "-d", "--gpus", "2", *EITHER, "--", "sleep", "7483").strip()
    saving = ("test", "-e", "/home/ann/saving")
    if killed == "the way":  # by ssh from one host to the other: the command goes on until there is one
        lab.hosts.run(old, "mv", "/home/ann/.ssh/id_ed25519", "/home/ann/key")
    eventually_sync(
        lambda: "makes room" in lab.admin("plan", "rebalance", "--apply", "--yes"), timeout=60.0, interval=0.5
    )
    if killed == "the way":
        eventually_sync(lambda: "the command stays" in lab.must("logs", name), timeout=60.0, interval=0.5)
        assert lab.hosts.run(old, *saving).code == 1
        lab.hosts.run(old, "mv", "/home/ann/key", "/home/ann/.ssh/id_ed25519")
    eventually_sync(lambda: lab.hosts.run(old, *saving).code == 0, timeout=60.0, interval=0.2)
    if killed == "allocator":
        lab.kill("alpha", "gpuscale-allocator")
    lab.hosts.run(old, "touch", "/home/ann/go")

    def again() -> bool:
        shown = lab.ctl("get", "job", name, "-o", "json")
        job = json.loads(shown.out)["job"] if shown.code == 0 else {}
        return job.get("attempt") == 2 and job.get("state") == "STATE_RUNNING"

    eventually_sync(again, timeout=90.0, interval=0.5)
    now = where(lab, name)
    eventually_sync(lambda: lab.left("sleep 7481") == [f"{now}: sleep 7481"], interval=0.5)
    eventually_sync(lambda: lab.must("logs", name) == "attempt 2\n", interval=0.5)
    gpus = [gpu["name"] for one in lab.held() for gpu in one.get("gpus", ())]
    assert len(gpus) == len(set(gpus)), gpus
    if killed != "allocator":  # which takes its notices back when it starts
        assert now == new
        eventually_sync(lambda: lab.left("sleep 7483") == [f"{old}: sleep 7483"], timeout=60.0, interval=0.5)
    [before] = lab.job(name)["earlier"]
    assert (before["node"], before["exitCode"]) == (f"nodes/{old}", 3)
    told = json.loads(lab.must("events", "--about", f"reservations/{name}", "-o", "json"))["events"]
    happened = [one["what"].partition("; it was sent")[0].partition(": moved")[0] for one in told]
    if killed != "allocator":
        asked, left = f"its job was asked to save its work: {old}", f"its job left {old}"
        grants = [happened[0].rpartition(" ")[2], happened[-1].rpartition(" ")[2]]
        assert (happened[1:-1], grants) == ([asked, left], [old, now])
    for one in (name, beside, large):
        lab.must("stop", one)


def test_a_port_is_forwarded_while_the_command_runs(lab: Lab) -> None:
    server = "import socket; s = socket.create_server(('127.0.0.1', 8123)); s.accept()[0].sendall(b'here'); "
    words = ("run", "--gpus", "1", "--forward", "8123", "--", sys.executable, "-c", server)
    running = lab.start(*words, log="forward.log")
    ask = "import socket; print(socket.create_connection(('127.0.0.1', 8123)).recv(9).decode(), end='')"
    eventually_sync(lambda: lab.hosts.run(LAPTOP, sys.executable, "-c", ask).out == "here", interval=0.2)
    assert running.wait(30) == 0


TTL = 24.0
SERVED = f"""kind: Endpoint
name: served
spec: {{minReplicas: 1, maxReplicas: 1, template: {{template: worker, gpuCount: 1, leaseTtl: {TTL:g}s}}}}
"""
TEMPLATE = '\n[templates.worker]\ncommand = ["/bin/sleep", "7491"]\n'


def test_a_replica_lives_on_that_was_cut_off_for_longer_than_its_lease_and_was_not_replaced(lab: Lab) -> None:
    """The allocator is killed meanwhile, and another host has the template and free GPUs."""

    def replicas(state: str) -> list[list[str]]:
        """Node, lease, name and process of each, if there is one, and in this state."""
        ran = lab.ctl("get", "replicas", "-o", "json")
        found = json.loads(ran.out)["replicas"] if ran.code == 0 else []
        facts = [[one.get(key, "") for key in ("node", "reservation", "name", "pid")] for one in found]
        return facts if [one["state"] for one in found] == [f"STATE_{state}"] else []

    for one in ("beta", "gamma"):
        lab.hosts.run(one, *SHELL, "cat >> /etc/gpuscale/gpuscale.toml", stdin=TEMPLATE)
        lab.kill(one, "gpuscale-adapter")
    told = ("get", "adapters", "-o", "json")
    eventually_sync(lambda: lab.must(*told).count('"worker"') == 2, timeout=60.0, interval=0.5)
    (manifest := lab.hosts.folder / "served.yaml").write_text(SERVED)
    lab.must("apply", "-f", str(manifest))
    before = eventually_sync(lambda: replicas("READY"), timeout=90.0, interval=0.5)
    [[node, lease, *_]] = before
    over = datetime.now(UTC) + timedelta(seconds=2 * TTL)  # of a lease that is renewed one lease after this

    def renewed() -> bool:
        [ends] = [one["expireTime"] for one in lab.held() if one["name"] == lease]
        return datetime.fromisoformat(ends) > over

    lab.hosts.cut(node.removeprefix("nodes/"))
    lab.kill("alpha", "gpuscale-allocator")
    assert eventually_sync(lambda: replicas("UNKNOWN"), timeout=90.0, interval=0.5) == before
    eventually_sync(renewed, timeout=90.0, interval=0.5)
    assert replicas("UNKNOWN") == before
    lab.hosts.mend(node.removeprefix("nodes/"))
    assert eventually_sync(lambda: replicas("READY"), timeout=90.0, interval=0.5) == before
    lab.must("delete", "endpoint", "served", "--yes")


ROUNDS = int(os.environ.get("GPUSCALE_KILL_ROUNDS", "1"))  # half a minute each; 20 by hand


@pytest.mark.parametrize("seed", range(1, 1 + ROUNDS))
def test_whatever_is_killed_no_gpu_has_two_jobs_and_none_outlasts_its_lease(lab: Lab, seed: int) -> None:
    Round(lab, seed).play()


def test_a_host_that_dies_silently_stops_the_other_member_and_its_last_lines_are_known(lab: Lab) -> None:
    script = "echo rank $NODE_RANK; setsid sleep 7441 & sleep 7442"
    where = (*MEMBERS, "--node", "beta", "--node", "gamma")
    # At once, for all of the job's time to be that of its members.
    eventually_sync(lambda: lab.ctl("check", "--gpus", "1", *where).code == 0, interval=0.2)
    name = detached(lab, script, *where, "--ttl", "12s", "--name", "pair")
    eventually_sync(
        lambda: [one.get("lastLines") for one in lab.job(name)["members"]] == [["rank 0"], ["rank 1"]]
    )
    of = {one["node"]: one for one in lab.job(name)["members"]}
    lab.hosts.kill("gamma")
    eventually_sync(lambda: lab.left("sleep 744") == [], interval=0.5)
    eventually_sync(lambda: lab.job(name)["state"] == "STATE_LOST", interval=0.5)
    dead = next(one for one in lab.job(name)["members"] if one["node"] == "nodes/gamma")
    assert (dead["lastLines"], "nothing was heard" in dead["endReason"]) == (
        [f"rank {of['nodes/gamma'].get('member', 0)}"],
        True,
    )
