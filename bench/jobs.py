"""From Enter to the exec of a command on another host: `gpuscalectl run` against plain `ssh` and Slurm's `srun`, in turns.

    python -m bench jobs

Hosts are namespaces of this machine with real sshd (`tests.support.lab`), which needs root; connections of ssh are warm
(ControlMaster), all between the services is mutual TLS. Slurm has one node, this machine, without authentication. The command is
`date`, which says when it runs. CPU is that of the caller's process and its children, not that of the other host.
"""

from __future__ import annotations

import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from addons.slurm.tests.slurm_cluster import SlurmCluster, program
from addons.slurm.tests.slurm_cluster import why_unavailable as why_no_slurm
from tests.support import nvml_double
from tests.support.hosts import why_unavailable
from tests.support.lab import LAPTOP, Lab, lab

ROUNDS = 15
GOAL = 0.25
NODE = "beta"
DATE = ("date", "+%s.%N")
WARM = "Host *\n  ControlMaster auto\n  ControlPath ~/.ssh/%C\n  ControlPersist 10m\n"

Way = Callable[[], tuple[float, float]]
"""Starts the command once; seconds to its exec, and of CPU."""


def main() -> None:
    """Measure and print the table."""
    for source in ("services", "protos"):
        compileall.compile_dir(
            Path(__file__).parents[1] / source, quiet=2
        )  # as pip does when it installs them
    if why := why_unavailable() or nvml_double.why_unavailable():
        print(why)
        return
    with tempfile.TemporaryDirectory() as folder, lab(Path(folder), logs=False) as made:
        ways: dict[str, Way] = {
            "ssh": partial(_typed, made, "ssh", NODE),
            "gpuscalectl run": partial(
                _typed, made, "gpuscalectl", "run", "--gpus", "1", "--node", NODE, "--"
            ),
        }
        write = ("sh", "-c", "cat > ~/.ssh/config; chmod 600 ~/.ssh/config")
        made.hosts.run(LAPTOP, *write, user="ann", stdin=WARM)
        if why := why_no_slurm():
            _measure(ways)
            print(why)
            return
        with SlurmCluster(8, cpus=8, message_timeout=10) as cluster:
            ways["srun"] = partial(_timed, [str(program("srun")), "--gres=gpu:1", *DATE], cluster.environment)
            _measure(ways)


def _measure(ways: Mapping[str, Way]) -> None:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            one = way()
            if number:  # the first opens connections
                found[name].append(one)
    base = statistics.median(wall for wall, _ in found["ssh"])
    print(f"{'':<18}{'ms, median':>12}{'p90':>8}{'above ssh':>11}{'ratio':>7}{'CPU ms':>8}")
    for name, times in found.items():
        walls = sorted(wall for wall, _ in times)
        middle, late = statistics.median(walls), walls[int(len(walls) * 0.9)]
        cpu = statistics.median(one for _, one in times)
        above = middle - base
        print(
            f"{name:<18}{middle * 1e3:>12.0f}{late * 1e3:>8.0f}{above * 1e3:>11.0f}{middle / base:>7.1f}{cpu * 1e3:>8.0f}"
        )
    print(f"goal of gpuscalectl run: at most {GOAL * 1e3:.0f} ms above ssh")


def _typed(made: Lab, *words: str) -> tuple[float, float]:
    """A line of ann's on the laptop."""
    return _timed(*made.hosts.typed(LAPTOP, *words, *DATE, user="ann"))


def _timed(words: list[str], environment: Mapping[str, str]) -> tuple[float, float]:
    began, before = time.time(), os.times()
    ran = subprocess.run(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    after = os.times()
    if ran.returncode:
        sys.exit(f"{words}: {ran.stderr.decode()}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return float(ran.stdout.split()[-1]) - began, cpu
