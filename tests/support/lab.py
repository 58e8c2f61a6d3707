"""A lab: the GPU hosts alpha, beta and gamma with two GPUs each (of the driver's double), the services on alpha, and a laptop.

Set up as docs/deploy.md says, by init and join: mutual TLS between all, and ann and bob log in from the laptop.
"""

import json
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.cli import Ran
from tests.support.hosts import USERS, Hosts, Running
from tests.support.nvml_double import NvmlDouble, env_with_double
from tests.support.nvml_double.build import library_folder
from tests.support.waiting import eventually_sync

LAPTOP, GPU_HOSTS = "laptop", ("alpha", "beta", "gamma")
JOIN = re.compile(r"^gpuscalectl join alpha:7070 --token \S+ --ca-hash (\S+)$", re.MULTILINE)
CTL = "gpuscalectl"
PATIENT = {"GPUSCALE_AGENT_PERIOD_SECONDS": "2"}
"""Of agents: they count as silent after three periods, for which a busy machine may stand still."""


class Lab:
    """The hosts, and what people type on them."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts

    def ctl(self, *words: str, user: str = "ann", host: str = LAPTOP, stdin: str = "") -> Ran:
        """What a person types, who has logged in."""
        return self.hosts.ctl(host, *words, user=user, stdin=stdin)

    def must(self, *words: str, user: str = "ann", host: str = LAPTOP) -> str:
        """The same where it must succeed; what it prints."""
        ran = self.ctl(*words, user=user, host=host)
        assert ran.code == 0, f"{words}: {ran.out}{ran.err}"
        return ran.out

    def start(self, *words: str, log: str, user: str = "ann", host: str = LAPTOP) -> Running:
        """A command that goes on."""
        return self.hosts.start(host, CTL, *words, user=user, log=log)

    def admin(self, *words: str) -> str:
        """What the admin types on alpha."""
        files = ("--ca-file", "/etc/gpuscale/pki/ca.crt", "--token-file", "/etc/gpuscale/admin.token")
        return self.must("--address", "alpha:7070", *files, *words, user="root", host="alpha")

    def job(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.must("get", "job", name, "-o", "json"))["job"]
        return found

    def held(self) -> list[dict[str, Any]]:
        found: dict[str, list[dict[str, Any]]] = json.loads(self.must("get", "reservations", "-o", "json"))
        return found["reservations"]

    def left(self, beginning: str) -> list[str]:
        """What runs on any host with a command line that begins so."""
        up = [host for host in GPU_HOSTS if host in self.hosts.up]
        return [f"{host}: {line}" for host in up for line in self.hosts.command_lines(host, beginning)]

    def kill(self, host: str, pattern: str) -> None:
        """kill -9 what runs on a host with such a command line."""
        self.hosts.run(host, "pkill", "-9", "-f", pattern)

    def said(self, host: str) -> str:
        return (self.hosts.folder / f"{host}.log").read_text()

    def set_up(self) -> None:
        """Services, agents, people."""
        self._run("alpha", "init", "--host", "alpha", "--run")
        digest = eventually_sync(lambda: JOIN.search(self.said("alpha")), timeout=90.0).group(1)
        for host in GPU_HOSTS:
            token = self.admin("join-token", "create", "--node", host, "-o", "jsonpath={.token}").strip()
            self.join(host, "--token", token, "--ca-hash", digest)
        codes = self.admin(
            "login-code", "create", *USERS, "--role", "operator", "-o", "jsonpath={.codes[*].code}"
        )
        for user, code in zip(USERS, codes.split(), strict=True):
            self.hosts.run(LAPTOP, "sh", "-c", "umask 77; cat > ~/code", user=user, stdin=code)
            self.must(
                "login", "alpha:7070", "--ca-hash", digest, "--code-file", f"/home/{user}/code", user=user
            )
        for host in GPU_HOSTS:
            eventually_sync(partial(self._online, host), timeout=90.0)

    def join(self, host: str, *words: str) -> None:
        """Have a host join, or start again what it runs."""
        place = (
            ("--dir", "/etc/gpuscale-host") if host == "alpha" else ()
        )  # where people do not reach the agent
        self._run(host, "join", "alpha:7070", *words, "--node", host, *place, "--run")

    def _online(self, host: str) -> bool:
        return f"{host} is ONLINE" in self.said(host)

    def _run(self, host: str, *words: str) -> None:
        variables = double(self.hosts.folder / f"double-{host}", host)
        self.hosts.start(host, CTL, *words, log=f"{host}.log", environment={**variables, **PATIENT})


def double(folder: Path, host: str) -> Mapping[str, str]:
    """Variables by which a host has two GPUs of its own."""
    folder.mkdir(exist_ok=True)
    gpus = NvmlDouble(folder)
    for index, gpu in enumerate(gpus.gpus):
        gpu.uuid = f"GPU-{host}-{index}"
    gpus.write()
    return {name: value for name, value in env_with_double(gpus).items() if os.environ.get(name) != value}


@contextmanager
def lab(folder: Path, *, logs: bool = True) -> Generator[Lab]:
    """The lab, set up; its logs are printed at the end, which a test that passes does not show."""
    with Hosts((LAPTOP, *GPU_HOSTS), folder, shared=[library_folder()]) as hosts:
        made = Lab(hosts)
        try:
            made.set_up()
            yield made
        finally:
            for log in sorted(folder.glob("*.log")) if logs else ():
                print(f"== {log.name}\n{log.read_text()[-20_000:]}")
