"""Three hosts, from nothing to mutual TLS: one command on the first, and the line that it prints on each of the others."""

import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.fault.hosts.lan import lan, why_unavailable
from tests.support.nvml_double import NvmlDouble, env_with_double
from tests.support.nvml_double import why_unavailable as why_no_double
from tests.support.up import CTL, ctl_environment
from tests.support.waiting import eventually_sync

LINE = re.compile(r"^gpuscalectl (join 10\.77\.0\.1:7070 --token \S+ --ca-hash sha256:\S+)$", re.MULTILINE)
PROGRAMS = {"gpuscale-fleet", "gpuscale-allocator", "gpuscale-autoscaler", "gpuscale-gateway"}


def children(pid: int) -> dict[str, int]:
    """The programs that a process runs: pids by name."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    words = {int(one): Path(f"/proc/{one}/cmdline").read_text().split("\0") for one in pids}
    return {Path(line[1]).name: one for one, line in words.items() if len(line) > 1}  # a zombie has none


@pytest.mark.skipif(bool(why_unavailable() or why_no_double()), reason="no namespaces, or no driver's double")
def test_three_hosts_from_nothing(tmp_path: Path) -> None:
    with lan("first", "left", "right") as hosts:

        def start(host: str, *words: str) -> "subprocess.Popen[bytes]":
            (place := tmp_path / f"double-{host}").mkdir()
            double = NvmlDouble(place)
            for index, gpu in enumerate(double.gpus):
                gpu.uuid = f"GPU-{host}-{index}"
            double.write()
            words = (*CTL, *words, "--dir", str(tmp_path / host))
            return hosts.start(
                host, *words, log=tmp_path / f"{host}.log", environment=env_with_double(double)
            )

        def said(host: str, line: str | re.Pattern[str]) -> "re.Match[str] | None":
            return re.search(line, (tmp_path / f"{host}.log").read_text())

        def ctl(*words: str) -> str:
            who = f"--address 10.77.0.1:7070 --ca-file {tmp_path}/first/pki/ca.crt --token-file {tmp_path}/first/admin.token"
            ran = hosts.run("first", *CTL, *who.split(), *words, environment=ctl_environment())
            assert ran.returncode == 0, ran.stderr
            return ran.stdout

        first = start("first", "init", "--host", "10.77.0.1", "--run")
        line = eventually_sync(partial(said, "first", LINE), timeout=90)
        typed = {"left": line, "right": LINE.search(ctl("join-token", "create"))}
        joined = [
            start(host, *found[1].split(), "--node", host, "--run") for host, found in typed.items() if found
        ]
        for host in typed:
            eventually_sync(partial(said, host, f"{host} is ONLINE"), timeout=90)
        assert ctl("get", "nodes", "-o", "name").split() == ["nodes/left", "nodes/right"]
        eventually_sync(lambda: ctl("get", "adapters").count("CONNECTED") == 2, timeout=60)
        assert "reservations/" in ctl("reserve", "--gpus", "1", "--max-utilization", "100", "-o", "name")
        running = children(first.pid)
        assert running.keys() == PROGRAMS
        fleet = running["gpuscale-fleet"]
        os.kill(fleet, signal.SIGKILL)
        eventually_sync(lambda: children(first.pid).get("gpuscale-fleet", fleet) != fleet)
        for process in (*joined, first):
            process.terminate()
            assert process.wait(60) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in running.values())
