"""Rounds of kills at random moments on the hosts of a lab, and what must hold meanwhile: see `Round`."""

import json
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tests.support.hosts import Running
from tests.support.lab import GPU_HOSTS, Lab
from tests.support.waiting import eventually_sync

TTL, SHORT_TTL = 24.0, 12.0
"""Seconds of the leases; the short one where the link is cut for twice as long."""
WINDOW = 4.0
"""Seconds in which all kills of a round begin."""
TRUE_WITHIN, LOOKS = 15.0, 10
"""Seconds in which `get jobs` must say what is so, and how often it must be seen not to: on a busy machine that takes longer."""
COMMAND = ("sh", "-c", "setsid sleep 7601 & sleep 7602; wait")
_FIND = r"grep -saoE '(CUDA_VISIBLE_DEVICES|GPUSCALE_RESERVATION)=[[:graph:]]+' /proc/[0-9]*/environ | tr '\0' '\n'"
_FOUND = re.compile(r"/proc/(\d+)/environ:(\w+)=([\w/-]+)")
_NAME = re.compile(r"^(?:gpuscalectl run: reservations/)?(r[a-z2-7]{12})\b", re.MULTILINE)


class Watcher:
    """Looks again and again, until `stop`, which jobs are said to run and which do; `wrong` has what must not be."""

    def __init__(self, lab: Lab) -> None:
        self.wrong: list[str] = []
        self.states: dict[str, str] = {}
        self.why: dict[str, list[str]] = {}
        self.running: dict[str, set[str]] = {}
        self._lab = lab
        self._untrue: dict[str, tuple[float, int]] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(1.0):
            ran = self._lab.ctl("get", "jobs", "-a", "-o", "json")
            if ran.code == 0:
                self._compare(json.loads(ran.out)["jobs"])
            else:  # the allocator starts: from then on it has so long again
                self._untrue.clear()

    def _compare(self, known: list[dict[str, Any]]) -> None:
        states = {one["name"]: one["job"]["state"].removeprefix("STATE_") for one in known}
        over = {one["name"] for one in known if "endTime" in one}
        for one in known:
            ends = (one, *one["job"].get("members", ()))
            self.why[one["name"]] = [end["endReason"] for end in ends if "endReason" in end]
        running: dict[str, set[str]] = defaultdict(set)
        for host in GPU_HOSTS:
            users: dict[str, set[str]] = defaultdict(set)
            processes: dict[str, dict[str, str]] = defaultdict(dict)
            for pid, name, value in _FOUND.findall(self._lab.hosts.run(host, "sh", "-c", _FIND).out):
                processes[pid][name] = value
            for one in processes.values():
                if reservation := one.get("GPUSCALE_RESERVATION"):
                    users[one.get("CUDA_VISIBLE_DEVICES", "")].add(reservation)
                    running[reservation].add(host)
            self.wrong += [f"{gpu} has the jobs {jobs}" for gpu, jobs in users.items() if len(jobs) > 1]
        self.wrong += [f"{one} has ended, and runs on {running[one]}" for one in over & set(running)]
        now = time.monotonic()
        untrue = {name for name, state in states.items() if (state == "RUNNING") != (name in running)}
        before = {name: self._untrue.get(name, (now, 0)) for name in untrue}
        self._untrue = {name: (since, looks + 1) for name, (since, looks) in before.items()}
        self.wrong += [
            f"{name} was said to be {states[name]} for {now - since:.1f} s"
            for name, (since, looks) in self._untrue.items()
            if now - since > TRUE_WITHIN and looks >= LOOKS
        ]
        self.states, self.running = states, dict(running)


class Round:
    """Six jobs of one GPU each, and one that waits; a caller, an sshd session, a supervisor, the allocator and an agent are killed
    with SIGKILL, and two links are cut, one for half and one for twice the lease.

    Meanwhile no GPU has two jobs, no process outlasts its reservation, and `get jobs` is true within 10 s. In the end those run
    on that nobody killed, and what waited runs.
    """

    def __init__(self, lab: Lab, seed: int) -> None:
        self._lab = lab
        self._random = random.Random(seed)
        self._seed = seed
        self._short, self._long = self._random.sample(("beta", "gamma"), 2)
        self._roles: dict[str, tuple[str, str]] = {}
        self._attached: dict[str, Running] = {}

    def play(self) -> None:
        free = ("check", "--gpus", "2", "--members", "3")
        eventually_sync(lambda: self._lab.ctl(*free).code == 0, timeout=60.0, interval=0.5)
        slots = [host for host in GPU_HOSTS for _ in range(2)]
        self._random.shuffle(slots)
        roles = ("caller", "session", "supervisor", "one", "two", "three", "waits")
        watcher = Watcher(self._lab)
        try:
            with ThreadPoolExecutor() as pool:
                list(pool.map(self._begin, roles, (*slots, "")))
            kills: list[Callable[[], object]] = [
                self._attached["caller"].kill,
                partial(self._lab.hosts.run, self._roles["session"][1], "kill", "-9", *self._sessions()),
                self._kill_supervisor,
                lambda: self._kill_the_allocator_and_cut(self._short),
                lambda: self._lab.kill(self._random.choice(GPU_HOSTS), "gpuscale-agent"),
                lambda: self._cut(self._long, SHORT_TTL * 2),
            ]
            gone = "caller", "session", "supervisor"
            ended = [name for role, (name, host) in self._roles.items() if role in gone or host == self._long]
            left = [name for name, _ in self._roles.values() if name not in ended]
            with ThreadPoolExecutor() as pool:
                list(pool.map(self._at_a_random_moment, kills))
            eventually_sync(lambda: self._stand(watcher, ended, left), timeout=180.0, interval=0.5)
        except AssertionError as error:
            stand = {
                role: (host, watcher.states.get(name), watcher.why.get(name), watcher.running.get(name))
                for role, (name, host) in self._roles.items()
            }
            what = f"seed {self._seed}, {self._long} was cut for long: {watcher.wrong}, {stand}"
            raise AssertionError(what) from error
        finally:
            watcher.stop()
            for one in self._attached.values():
                one.kill()
            with ThreadPoolExecutor(2) as pool:
                names = [one["name"] for one in self._lab.held()]
                stopped = list(pool.map(lambda name: self._lab.ctl("stop", name), names))
        assert watcher.wrong == [], f"seed {self._seed}: {watcher.wrong}, {self._roles}"
        assert [ran.err for ran in stopped if ran.code] == []

    @staticmethod
    def _stand(watcher: Watcher, ended: Iterable[str], left: Iterable[str]) -> bool:
        gone = all(
            watcher.states.get(one) not in {None, "RUNNING"} and one not in watcher.running for one in ended
        )
        return gone and all(watcher.states.get(one) == "RUNNING" and one in watcher.running for one in left)

    def _begin(self, role: str, host: str) -> None:
        """Start a job; it is acknowledged when its name was written."""
        ttl = SHORT_TTL if host == self._long else TTL
        attached = role in {"caller", "session"}
        where = ("--node", host) if host else ("--exclude-node", self._long, "--wait", "1h")
        log = f"{self._seed}-{role}.job"
        how = () if attached else ("-d",)
        if not host:  # after the others
            eventually_sync(lambda: len(self._roles) == 6, timeout=90.0)
        words = ("run", *how, "--gpus", "1", *where, "--ttl", f"{ttl:g}s", "--name", role, "--", *COMMAND)
        started = self._lab.start(*words, log=log)
        path = self._lab.hosts.folder / log
        found = eventually_sync(lambda: _NAME.search(path.read_text()), timeout=90.0)
        if attached:
            self._attached[role] = started
        else:
            assert started.wait() == 0, path.read_text()
        self._roles[role] = f"reservations/{found[1]}", host

    def _at_a_random_moment(self, kill: Callable[[], object]) -> None:
        time.sleep(self._random.uniform(0.0, WINDOW))
        kill()

    def _kill_the_allocator_and_cut(self, host: str) -> None:
        """One after the other: together they may take longer than a lease."""
        self._lab.kill("alpha", "gpuscale-allocator")
        time.sleep(1.0)
        eventually_sync(lambda: self._lab.ctl("get", "jobs").code == 0, interval=0.2)
        time.sleep(self._random.uniform(TTL / 8, TTL / 4))
        self._cut(host, TTL / 2)

    def _cut(self, host: str, seconds: float) -> None:
        self._lab.hosts.cut(host)
        time.sleep(seconds)
        self._lab.hosts.mend(host)

    def _sessions(self) -> list[str]:
        """The sshd sessions of attached jobs: not the one that may start what waits, whose end leaves that job LOST."""
        return self._lab.hosts.run(self._roles["session"][1], "pgrep", "-u", "ann", "sshd").out.split()

    def _kill_supervisor(self) -> None:
        name, host = self._roles["supervisor"]
        file = f"/home/ann/.local/state/gpuscale/jobs/{name.partition('/')[2]}-0/pid"
        self._lab.hosts.run(host, "sh", "-c", f"kill -9 $(cat {file})")
