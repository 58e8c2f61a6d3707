"""Whose the processes on a GPU are, through all that tells it: from /proc and the driver's list to what the allocator says.

Hundreds of hosts are read from memory, and some by the whole agent: from a /proc on a disk, over the driver's double.

A generator makes hosts: shares and their holders, trees of processes that fork, detach, lose their parents, run in
containers, hide, and outsiders that pretend. Of each it is known whose it is. What is said must be that: no false outsider,
no missed outsider, no byte counted twice, and unknown where it cannot be known.
"""

import asyncio
import itertools
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import UUID

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.usage import usage_of
from gpuscale.allocator.placing.columns import available, outsiders
from gpuscale.allocator.usecases.fleet import FleetView, node_of
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.security.auth import Principal, Role
from gpuscale.monitor.agent import collector
from gpuscale.monitor.agent.collector import Collector
from gpuscale.monitor.agent.device import ReadDeadlines
from gpuscale.monitor.agent.gpus import Gpus
from gpuscale.monitor.agent.nvml import NvmlSource
from gpuscale.monitor.agent.processes import ProcessNames
from gpuscale.monitor.agent.work import LeaseChecks, Work
from gpuscale.monitor.model.admission import Admissions, Holders
from gpuscale.monitor.model.readings import (
    Absent,
    GpuIdentity,
    GpuReading,
    GpuState,
    GpuView,
    HostIdentity,
    HostReading,
    ProcessKey,
    ReadingStatus,
    Snapshot,
)
from gpuscale.monitor.wire import to_snapshot
from tests.support.allocator_values import MIB, order, reserved
from tests.support.clock import ManualClock
from tests.support.fixtures import need
from tests.support.nvml_double import (
    DoubleProcess,
    NvmlDouble,
    NvmlReturn,
    ProcessKind,
    in_process,
    why_unavailable,
)

GIB = 1 << 30
TOTAL = 80 * GIB
GPU, NODE = "GPU-a", "alpha"
OWN_NAMESPACE, OTHER_NAMESPACE = "pid:[4026531836]", "pid:[4026532999]"
HOST_CGROUP = "0::/user.slice/user-1000.slice/session-3.scope\n"
PATIENCE = 30.0
"""Seconds that a snapshot waits for its readings, however busy the machine is."""
NOW, WALL = 1000.0, datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Process:
    """One process: `owner` is the number of the holder whose it truly is, None of an outsider."""

    pid: int
    parent: int
    owner: int | None
    used: int | None = 0
    user: int = 1000
    cgroup: str = HOST_CGROUP
    mark: str = ""
    started: int = 0
    hidden: bool = False
    first_of_container: bool = False
    on_gpu: bool = True

    @property
    def ids(self) -> str:
        """What /proc says of its ids: a container has a PID namespace of its own."""
        inner = "1" if self.first_of_container else str(self.pid)
        return f"NSpid:\t{self.pid}" + (f"\t{inner}" if self.cgroup != HOST_CGROUP else "")


@dataclass
class Host:
    """Holders with what they hold of the GPU in bytes, their first processes, and all processes in two moments.

    `foreign` is of an agent in a PID namespace of its own, `unlisted` of a driver that refuses to list processes.
    """

    claims: list[int]
    whole: bool
    admitted: list[int] = field(default_factory=list[int])
    before: dict[int, Process] = field(default_factory=dict[int, Process])
    after: dict[int, Process] = field(default_factory=dict[int, Process])
    foreign: bool = False
    unlisted: bool = False


class Maker:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._pid = 100

    def host(self) -> Host:
        whole = self.random.random() < 0.2
        count = 1 if whole else self.random.randint(1, 3)
        claims = [TOTAL] if whole else [self.random.randint(5, 20) * GIB for _ in range(count)]
        foreign, unlisted = (self.random.random() < 0.05 for _ in range(2))
        host = Host(claims, whole, foreign=foreign, unlisted=unlisted)
        self._add(host, Process(1, 0, None, on_gpu=False, user=0))
        for number in range(count):
            self._holder(host, number)
        for _ in range(self.random.choice((0, 0, 1, 2))):
            self._outsider(host)
        return host

    def _holder(self, host: Host, number: int) -> None:
        user = 1000 + number
        where = self.random.choice(("host",) * 6 + ("its container",) * 3 + ("another's container",))
        contained = where == "its container"
        shim = self._new(host, 1, None, on_gpu=False, user=0)
        cgroup = HOST_CGROUP if where == "host" else self._container()
        if where == "another's container":  # it comes in by `exec`, and what is there stays whose it was
            self._new(host, shim.pid, None, user=0, cgroup=cgroup, first_of_container=True)
        root = self._new(
            host,
            1 if where == "host" else shim.pid,
            number,
            user=user,
            cgroup=cgroup,
            first_of_container=contained,
            on_gpu=self.random.random() < 0.5,
        )
        host.admitted.append(root.pid)
        tree = [root]
        for _ in range(self.random.randint(0, 4)):
            kind = self.random.choice(("child", "child", "orphan", "marked", "contained", "hidden", "orphan"))
            parent = self.random.choice(tree)
            if (
                kind == "contained" and contained
            ):  # as by `exec`, or beside it in its pod: its parent is outside
                beside = self._beside(cgroup) if "kubepods" in cgroup else cgroup
                child = self._new(host, shim.pid, number, user=0, cgroup=beside)
            elif kind == "marked":  # forked twice before anybody looked; its environment is what is left
                child = self._new(host, 1, number, user=user, mark=reservation(number))
            else:
                child = self._new(host, parent.pid, number, user=self.random.choice((user, 0)), cgroup=cgroup)
                if kind == "hidden":
                    child.hidden = host.after[child.pid].hidden = True
                else:
                    tree.append(child)
            if kind == "orphan":  # seen with its parent, which then ends
                host.after[child.pid].parent = 1
        if self.random.random() < 0.2:  # the first process ends, as by kill -9; what it started goes on
            self._ends(host, root)

    def _ends(self, host: Host, root: Process) -> None:
        del host.after[root.pid]
        for one in host.after.values():
            if one.parent == root.pid:
                one.parent = 1

    def _outsider(self, host: Host) -> None:
        number = self.random.randrange(len(host.claims))
        kind = self.random.choice(("plain", "forged", "contained", "reused", "sibling"))
        mark = reservation(number) if kind == "forged" else ""
        one = self._new(host, 1, None, user=2000, mark=mark)
        if kind == "contained":
            one.cgroup = self._container()
            host.after[one.pid].cgroup = one.cgroup
        root = host.admitted[number]
        if kind == "reused" and root not in host.after:  # the pid of what was admitted, once that had ended
            host.after[root] = Process(root, 1, None, 3 * GIB, 2000, started=99_999)
        if kind == "sibling":  # of the same Unix user, which proves nothing
            one.user = host.after[one.pid].user = 1000 + number

    def _new(self, host: Host, parent: int, owner: int | None, **fields: object) -> Process:
        self._pid += 1
        used = self.random.choice((None, *range(1, 5), *range(1, 5)))
        one = Process(self._pid, parent, owner, None if used is None else used * GIB, started=self._pid)
        for name, value in fields.items():
            setattr(one, name, value)
        self._add(host, one)
        return one

    def _container(self) -> str:
        pod = UUID(int=self.random.getrandbits(128))
        forms = (
            "0::/system.slice/docker-{}.scope\n",
            "4:memory:/docker/{}\n",
            "0::/machine.slice/libpod-{}.scope/c\n",
            f"0::/kubepods/besteffort/pod{pod}/{{}}\n",
            f"0::/kubepods.slice/kubepods-pod{str(pod).replace('-', '_')}.slice/cri-containerd-{{}}.scope\n",
        )
        return self._beside(self.random.choice(forms).format("0" * 64))

    def _beside(self, cgroup: str) -> str:
        """Another container, in the same pod."""
        return re.sub("[0-9a-f]{64}", f"{self.random.getrandbits(256):064x}", cgroup)

    @staticmethod
    def _add(host: Host, one: Process) -> None:
        host.before[one.pid] = one
        host.after[one.pid] = Process(**vars(one))


class Names(ProcessNames):
    """Reads a /proc that is not on a disk: thousands of hosts would take minutes there."""

    def __init__(self, proc: Path, processes: dict[int, Process]) -> None:
        with patch.object(psutil, "PROCFS_PATH", str(proc)):
            super().__init__()
        self._there = {pid: one for pid, one in processes.items() if not one.hidden}

    def _entry(self, pid: int) -> Any:
        one = self._there.get(pid)
        return one and (ProcessKey(pid, one.started), one.parent)

    def _text(self, pid: int, name: str) -> str:
        one = self._there.get(pid)
        if one is None:
            return ""
        return {"cgroup": one.cgroup, "status": f"Name:\tx\n{one.ids}\n"}[name]

    def _of_system(self, pid: int) -> Any:
        one = self._there[pid]
        user, mark = SimpleNamespace(effective=one.user), {"GPUSCALE_RESERVATION": one.mark}
        return SimpleNamespace(name=lambda: "x", uids=lambda: user, cmdline=list, environ=lambda: mark)


@pytest.fixture(scope="module")
def procs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The root of a /proc: of a host, and of a container with PIDs of its own."""
    found = {foreign: tmp_path_factory.mktemp("proc") for foreign in (False, True)}
    for foreign, proc in found.items():
        (proc / "sys/kernel").mkdir(parents=True)
        (proc / "sys/kernel/pid_max").write_text("32768\n")
        (proc / "self/ns").mkdir(parents=True)
        (proc / "self/ns/pid").symlink_to(OTHER_NAMESPACE if foreign else OWN_NAMESPACE)
    return found


def told(proc: Path, host: Host) -> types_api.Snapshot:
    """What the agent says of the second moment, when it has seen the first."""
    names, admissions, holders = Names(proc, host.before), Admissions(), Holders()
    for number, pid in enumerate(host.admitted):
        found = names.find(pid)
        container = found.container if names.leads(found) else ""
        key, name = found.lineage[0], reservation(number)
        admitted = admissions.admit([GPU], name, number + 1, key, container=container, user=found.user)
        assert isinstance(admitted, Admissions)
        admissions = admitted
    holders.mark(admissions, GPU, names.merge(listed(host.before)))
    names = Names(proc, host.after)
    marked = holders.mark(admissions, GPU, names.merge(listed(host.after)))
    used = sum(true_bytes(one) for one in host.after.values() if one.on_gpu)
    reading = GpuReading(
        utilization_percent=0.0,
        memory_total_bytes=TOTAL,
        memory_used_bytes=used,
        memory_free_bytes=TOTAL - used,
        processes=None if host.unlisted else marked,
        absent=(Absent("processes", ReadingStatus.NO_PERMISSION, "refused"),) * host.unlisted,
    )
    view = GpuView(GpuIdentity(GPU, 0, "Test GPU"), GpuState.OK, reading, NOW)
    identity = HostIdentity("alpha", "Linux", "boot", process_ids_foreign=names.foreign)
    snapshot = Snapshot(NODE, "e", 1, NOW, WALL, 1.0, identity, HostReading(), NOW, gpus=(view,))
    return to_snapshot(snapshot, NOW)


def reservation(number: int) -> str:
    return f"reservations/r{number + 1}-aa"


def listed(processes: dict[int, Process]) -> list[tuple[int, int | None]]:
    return [(one.pid, one.used) for one in processes.values() if one.on_gpu]


def true_bytes(one: Process) -> int:
    """What a process uses, though the driver may not tell."""
    return 2 * GIB if one.used is None else one.used


def granted(host: Host) -> Ledger:
    names = map(reservation, itertools.count())
    ledger = Ledger(new_id=lambda _: next(names).partition("/")[2])
    for claim in host.claims:
        memory = None if host.whole else claim // MIB
        gpu = reserved(GPU, node=NODE, milli=1000 if host.whole else 250, memory=memory)
        ledger.confirm(ledger.grant(order(), [gpu], now=NOW, wall=WALL))
    return ledger


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NvmlDouble]:
    """A driver with one GPU."""
    need(why_unavailable())
    with in_process(NvmlDouble(tmp_path_factory.mktemp("driver"), 1)) as found:
        found.gpus[0].uuid = GPU
        found.gpus[0].memory_reserved_bytes = 0
        found.fail("nvmlEventSetCreate", NvmlReturn.NOT_SUPPORTED)
        yield found


class Granted(LeaseChecks):
    """Every lease holds its GPUs."""

    async def check(self, work: monitor_api.AdmitWorkRequest, caller: Principal) -> dict[str, int]:
        return dict.fromkeys(work.gpu_uuids, 1)


class Agent:
    """An agent of a host, with what the driver says and the /proc that it reads."""

    def __init__(self, double: NvmlDouble, proc: Path, host: Host, seed: int) -> None:
        self._double = double
        self._proc = proc
        self._host = host
        self._random = random.Random(seed)
        double.process_record_bytes = self._random.choice((24, 24, 32))

    async def told(self) -> types_api.Snapshot:
        """What it says of the second moment, when it has seen the first and admitted the holders' first processes."""
        host, clock = self._host, ManualClock(NOW)
        deadlines = ReadDeadlines()
        here = HostIdentity(NODE, "Linux", "boot", process_ids_foreign=host.foreign)
        gpus = Gpus(NvmlSource(clock.now, sys=self._proc), clock, deadlines, node=NODE)
        work = Work(gpus.knows, Granted(None, NODE))
        one = Collector(
            NODE, 2 * PATIENCE, gpus, HostReading, here, clock, deadlines, admitted=lambda: work.admissions
        )
        try:
            self._show(host.before)
            await one.collect()
            for number, pid in enumerate(host.admitted):
                asked = monitor_api.AdmitWorkRequest(
                    reservation=reservation(number), fence=number + 1, gpu_uuids=(GPU,), pid=pid
                )
                await work.admit(asked, Principal("root", Role.ADMIN, "local"))
            await one.collect()
            self._show(host.after)
            clock.advance(10.0)
            return to_snapshot(await one.collect(), clock.now())
        finally:
            await one.close()

    def _show(self, processes: dict[int, Process]) -> None:
        for old in self._proc.glob("[0-9]*"):
            shutil.rmtree(old)
        for one in processes.values():
            if not one.hidden:
                self._add(one)
        gpu = self._double.gpus[0]
        refusal = NvmlReturn.NO_PERMISSION if self._host.unlisted else NvmlReturn.SUCCESS
        gpu.fail("nvmlDeviceGetComputeRunningProcesses_v3", refusal)
        there = [one for one in processes.values() if one.on_gpu]
        of = [(one, kind) for one in there for kind in self._random.choice(KINDS)]
        gpu.processes = [DoubleProcess(one.pid, one.used, kind) for one, kind in of]
        gpu.memory_used_bytes = sum(true_bytes(one) for one in processes.values() if one.on_gpu)
        self._double.write()

    def _add(self, one: Process) -> None:
        """As proc(5) shows it."""
        entry = self._proc / str(one.pid)
        entry.mkdir()
        between, after = " ".join(["0"] * 17), " ".join(["0"] * 30)
        texts = {
            "stat": f"{one.pid} (x) S {one.parent} {between} {one.started} {after}\n",
            "status": f"Name:\tx\nUid:\t0\t{one.user}\t0\t0\n{one.ids}\n",
            "cgroup": one.cgroup,
            "environ": f"A=1\0GPUSCALE_RESERVATION={one.mark}\0" if one.mark else "",
        }
        for name, text in texts.items():
            (entry / name).write_text(text)


HOSTS = settings().max_examples * 6
"""How many hosts are drawn."""
KINDS = ((ProcessKind.COMPUTE,), (ProcessKind.GRAPHICS,), (ProcessKind.COMPUTE, ProcessKind.GRAPHICS))
"""The lists in which the driver names a process: one that computes and draws is in both."""


@settings(max_examples=HOSTS)
@given(seed=st.integers(0, 2**32))
def test_whose_each_process_and_byte_is(procs: dict[bool, Path], seed: int) -> None:
    host = Maker(seed).host()
    expect_truth(host, told(procs[host.foreign], host))


@settings(max_examples=HOSTS // 15)
@given(seed=st.integers(0, 2**32))
def test_whose_they_are_as_an_agent_reads_them_from_the_driver(
    procs: dict[bool, Path], double: NvmlDouble, seed: int
) -> None:
    host = Maker(seed).host()
    proc = procs[host.foreign]
    with (
        patch.object(psutil, "PROCFS_PATH", str(proc)),
        patch.object(collector, "LONGEST_WAIT_SECONDS", PATIENCE),
    ):
        expect_truth(host, asyncio.run(Agent(double, proc, host, seed).told()))


def expect_truth(host: Host, snapshot: types_api.Snapshot) -> None:
    """No false outsider, no missed one, no byte twice, unknown where unknown."""
    message = monitor_api.Node(
        name=f"nodes/{NODE}", state=monitor_api.NodeState.NODE_STATE_ONLINE, snapshot=snapshot
    )
    node, ledger = node_of(message, FleetView({}), NOW), granted(host)
    [gpu] = node.gpus
    on_gpu = [one for one in host.after.values() if one.on_gpu]
    there = [] if host.unlisted else on_gpu
    seen = [one for one in there if not (one.hidden or host.foreign)]
    strangers = [one for one in seen if one.owner is None]
    hidden = len(there) - len(seen)

    assert {one.pid: one.reservation for one in gpu.processes} == {
        one.pid: f"r{one.owner + 1}-aa" if one in seen and one.owner is not None else None for one in there
    }
    assert {one.pid for one in gpu.processes if one.unknown} == {one.pid for one in there if one not in seen}
    live = list(ledger.reservations(ended=False))
    assert len(outsiders(gpu, live)) == len(strangers)

    taken = sum(one.used or 0 for one in strangers)
    missing = 0
    for number, one in enumerate(live):
        own = [process for process in seen if process.owner == number]
        known = sum(process.used or 0 for process in own)
        taken += max(host.claims[number], known)
        missing += max(0, host.claims[number] - known)
        usage = usage_of(one, {NODE: node}.get, ledger.use, NOW).gpus[GPU]
        assert set(usage.outsiders) == {process.pid for process in strangers}
        if host.whole:
            assert usage.memory_bytes == gpu.memory_used_bytes
        elif (
            host.unlisted or hidden or any(process.used is None for process in own) or (strangers and not own)
        ):
            assert usage.memory_bytes is None
        else:
            assert usage.memory_bytes == known
    if any(one.used is None for one in there) or hidden or host.unlisted:
        # Bytes of which nobody knows whose they are count once: as the holders', as far as they hold more than they use.
        nobodys = sum(map(true_bytes, on_gpu)) - sum(one.used or 0 for one in seen)
        taken += max(0, nobodys - missing)
    assert available(gpu, live) == max(0, TOTAL - taken)
