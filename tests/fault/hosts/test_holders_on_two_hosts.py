"""Holders are known on two hosts at once: forks, a process that detaches, a container, shares, and outsiders beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.fault.hosts.lan import why_unavailable
from tests.fault.hosts.site import AGENT, LEFT, RIGHT, Site, typing_on_hosts
from tests.support.cli import Ran
from tests.support.nvml_double import GIB, DoubleProcess
from tests.support.nvml_double import why_unavailable as why_no_double
from tests.support.podman import IMAGE, Podman
from tests.support.waiting import eventually_sync

BUSY = ("--max-utilization", "100", "--min-memory", "0")
SHARE = ("run", "--gpus", "1", "--wait", "0s", "--share", "0.25", *BUSY)
# Mounts of a container are made in a mount namespace that is the host's own, as its user namespace is.
CONTAINER = ("unshare", "--mount", "podman", "run", "--rm", "--volume", "/dev/pts:/dev/pts", IMAGE)

Usage = list[tuple[int | None, list[int]]]
"""What each reservation of a GPU uses, None where that is not known, and the pids of the outsiders there."""


class Host:
    """One of the two, with work of five kinds; each is a `sleep` for a time of its own, by which it is found."""

    def __init__(self, site: Site, name: str, number: int) -> None:
        self.name = name
        self.site = site
        # Of this run of the tests alone: another may go on beside it.
        self._seconds = 1_000_000_000 + 10_000 * (os.getpid() % 10_000) + 100 * number
        self._agent = f"{site.hosts.lan.address(name)}:{AGENT}"

    def start(self, podman: Podman) -> None:
        """Two shares of the first GPU, a container on the second, and one who asked nobody."""
        child, grandchild, detached, inside, outside = (str(self._seconds + kind) for kind in range(5))
        forks = f"sleep {child} & sh -c 'sleep {grandchild} & wait' & wait"
        detaches = f"env -i setsid /bin/sh -c '/bin/sleep {detached} & exit'; sleep 900"
        share = (*SHARE, "--gpu-memory", "20GiB", "--gpu", self._gpu(0), "--", "sh", "-c")
        whole = ("run", "--gpus", "1", *BUSY, "--gpu", self._gpu(1), "--", *CONTAINER, "/bin/sleep", inside)
        for words in ((*share, forks), (*share, detaches), whole):
            log = self.site.hosts.folder / f"{self.name}-runs.log"
            variables = {"GPUSCALE_WORK_ADDRESS": self._agent, **podman.environment}
            self.site.start(self.name, *words, log=log, **variables)
        self.site.hosts.lan.start(self.name, "sleep", outside, log=self.site.hosts.folder / "outside.log")

    def pids(self) -> list[int]:
        """Of a child, a grandchild, who detached, the container and the outsider.

        Raises:
            KeyError: one does not run yet.
        """
        found = {
            process.info["cmdline"][1]: process.pid
            for process in psutil.process_iter(["cmdline"])
            if len(process.info["cmdline"] or ()) == 2 and process.info["cmdline"][0].endswith("sleep")
        }
        return [found[str(self._seconds + kind)] for kind in range(5)]

    def use(self, outside: int) -> None:
        """Let the shares use 20 GiB each, the container 30 GiB, and the outsider so much of the first GPU."""
        child, grandchild, detached, inside, outsider = self.pids()
        first = [(child, 12), (grandchild, 8), (detached, 20)] + [(outsider, outside)] * bool(outside)
        double = self.site.hosts.doubles[self.name]
        for gpu, used in zip(double.gpus, (first, [(inside, 30)]), strict=True):
            gpu.memory_reserved_bytes = 0
            gpu.processes = [DoubleProcess(pid, amount * GIB) for pid, amount in used]
            gpu.memory_used_bytes = sum(amount for _, amount in used) * GIB
        double.write()

    def expected(self, outside: int) -> dict[str, Usage]:
        """What each GPU's reservations use, in GiB, and the outsiders there."""
        outsiders = [self.pids()[-1]] if outside else []
        first, second = (gpu.uuid for gpu in self.site.hosts.doubles[self.name].gpus)
        return {first: [(20, outsiders), (20, outsiders)], second: [(30, [])]}

    def share(self, amount: int) -> Ran:
        """A third share of the first GPU."""
        words = (*SHARE, "--gpu-memory", f"{amount}GiB", "--gpu", self._gpu(0), "--", "true")
        return self.site.ctl(self.name, *words, GPUSCALE_WORK_ADDRESS=self._agent)

    def end_container(self) -> None:
        """Kill what runs in it: Podman removes it, and `run` gives its GPU back."""
        with suppress(KeyError):
            psutil.Process(self.pids()[3]).kill()

    def _gpu(self, index: int) -> str:
        return f"{self.name}/{index}"


@pytest.fixture
def hosts(tmp_path: Path, podman: Podman) -> Iterator[list[Host]]:
    reason = why_unavailable() or why_no_double()
    if reason is not None:
        pytest.skip(reason)
    with typing_on_hosts(tmp_path) as site:
        found = [Host(site, name, number) for number, name in enumerate((LEFT, RIGHT))]
        try:
            for host in found:
                host.start(podman)
            eventually_sync(lambda: [host.pids() for host in found], timeout=60, retry_on=(KeyError,))
            yield found
        finally:
            for host in found:
                host.end_container()
            seconds = {site.hosts.doubles[host.name].gpus[1].uuid for host in found}
            eventually_sync(lambda: not seconds & held(site).keys(), timeout=60)


def held(site: Site) -> dict[str, Usage]:
    """What each reservation uses, in GiB, and the outsiders on its GPU; by GPU."""
    found: dict[str, Usage] = {}
    for one in site.listed("reservations"):
        for gpu in one["usage"]["gpus"]:
            used = int(gpu["memoryUsedBytes"]) // GIB if "memoryUsedBytes" in gpu else None
            found.setdefault(gpu["uuid"], []).append((used, [int(pid) for pid in gpu["outsiderPids"]]))
    return found


def holders(site: Site) -> dict[int, str]:
    """The GPU of the reservation that each process is of, by pid; empty for an outsider. As the fleet has it."""
    gpu_of = {one["name"]: one["gpus"][0]["uuid"] for one in site.listed("reservations")}
    found: dict[int, str] = {}
    for node in site.listed("nodes"):
        for gpu in node["snapshot"]["gpus"]:
            for process in gpu["reading"]["processes"]:
                assert process["holderUnknown"] is False
                found[int(process["pid"])] = gpu_of.get(process.get("reservation", ""), "")
    return found


def test_each_host_knows_its_holders_and_its_outsiders(hosts: list[Host]) -> None:
    """The outsider of the one uses 5 GiB, that of the other nothing yet."""
    site, outside = hosts[0].site, {LEFT: 0, RIGHT: 5}
    for host in hosts:
        host.use(outside[host.name])
    expected = {uuid: used for host in hosts for uuid, used in host.expected(outside[host.name]).items()}
    eventually_sync(lambda: held(site) == expected)
    gpus = {gpu["uuid"]: gpu["reading"] for gpu in site.listed("gpus")}
    for host in hosts:
        first, second = (gpu.uuid for gpu in site.hosts.doubles[host.name].gpus)
        pids, free = host.pids(), 40 - outside[host.name]
        whose = dict(zip(pids, (first, first, first, second, ""), strict=True))
        known = holders(site)
        assert {pid: known[pid] for pid in pids if pid in known} == {
            pid: gpu for pid, gpu in whose.items() if gpu or outside[host.name]
        }
        assert [int(gpus[uuid]["memoryFreeBytes"]) // GIB for uuid in (first, second)] == [free, 50]
        fits, refused = host.share(free), host.share(free + 1)
        assert fits.code == 0, fits.err
        assert refused.code == 5, refused.err
        assert (f"sleep ({pids[-1]})" in refused.err) == bool(outside[host.name])
        assert not [pid for pid in pids[:-1] if f"({pid})" in refused.err]
