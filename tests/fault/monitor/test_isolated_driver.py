"""A driver that never answers again: threads are lost on it for good, and a process of its own is killed and replaced."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import seconds, to_duration
from gpuscale.monitor.agent.isolated import ChildProcess, IsolatedSource, _Lane
from gpuscale.monitor.agent.nvml import NvmlSource
from gpuscale.monitor.agent.sources import GpuSourceError
from tests.support.nvml_double import NvmlDouble, env_with_double
from tests.support.nvml_site import FRESH_SECONDS, HUNG, LOST, OK, site
from tests.support.waiting import eventually_sync

CHILD = "gpuscale.monitor.agent.isolated"
# What the agent in this process starts; children of other tests are none of it.
PARENT = """
import sys, threading, time
from gpuscale.monitor.agent.isolated import IsolatedSource
source = IsolatedSource()
gpu = source.open().gpus[0].uuid
threading.Thread(target=source.read, args=(gpu,), daemon=True).start()
print(source.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def eight(eight: NvmlDouble, monkeypatch: pytest.MonkeyPatch) -> NvmlDouble:
    """The machine whose driver child processes find as well."""
    monkeypatch.setenv("LD_LIBRARY_PATH", env_with_double(eight)["LD_LIBRARY_PATH"])
    return eight


EARLIER = set[int]()
"""Children that were there before the test: dead ones of other tests look like any."""


@pytest.fixture(autouse=True)
def _earlier() -> None:
    EARLIER.clear()
    EARLIER.update(one.pid for one in psutil.Process().children())


def children() -> list[psutil.Process]:
    """The children of this process that read the driver, dead ones that nobody has reaped among them."""
    found = (one for one in psutil.Process().children() if one.pid not in EARLIER)
    return [one for one in found if reads_the_driver(one)]


def reads_the_driver(process: psutil.Process) -> bool:
    """Whether it is a child that reads the driver; the agent's threads may end and reap it while this looks."""
    try:
        return CHILD in process.cmdline()
    except psutil.ZombieProcess:
        return True
    except psutil.NoSuchProcess:
        return False


def stop_for_ever(double: NvmlDouble) -> None:
    """One call takes the lock of the driver and never comes back."""
    double.driver_lock = True
    double.hold(double.gpus[0].rules, "nvmlDeviceGetPowerUsage")
    double.write()


def heal(double: NvmlDouble) -> None:
    """The driver works again; what is stuck in it stays there."""
    double.driver_lock = False
    double.gpus[0].rules.holds.clear()
    double.write()


async def test_a_stuck_process_is_replaced_over_and_over_until_all_gpus_are_well_again(
    eight: NvmlDouble,
) -> None:
    """One at a time, with pauses. Meanwhile everything is answered, and the GPUs hang and are never said to be lost."""
    async with site(eight, isolate=True) as one:
        await one.until_all(OK)
        [first] = children()
        stop_for_ever(eight)
        snapshot = await one.until_all(HUNG)
        assert seconds(snapshot.host_reading.age) < FRESH_SECONDS
        seen, states = {first.pid}, set[int]()

        def third(snapshot: types_api.Snapshot) -> bool:
            found = children()
            assert len(found) <= 1
            seen.update(child.pid for child in found)
            states.update(gpu.state for gpu in snapshot.gpus)
            return len(seen) >= 3

        def well(snapshot: types_api.Snapshot) -> bool:
            states.update(gpu.state for gpu in snapshot.gpus)
            return {gpu.state for gpu in snapshot.gpus} == {OK}

        await one.until(third)
        await one.until_all(HUNG)
        heal(eight)
        await one.until(well)
        assert LOST not in states
    assert children() == [], "no process is left, and no zombie"


async def test_a_driver_that_holds_a_call_is_released_by_force(
    eight: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuscale.monitor.agent.gpus.RELEASE_SECONDS", 0.5)
    async with site(eight, isolate=True) as one:
        await one.until_all(OK)
        eight.hold(eight.gpus[0].rules)
        eight.write()
        await one.until(lambda snapshot: snapshot.gpus[0].state == HUNG)
        request = monitor_api.ReleaseDriverRequest(max_duration=to_duration(600), reason="reset")
        await one.driver.ReleaseDriver(request, timeout=30)
        assert children() == []


def test_what_the_process_reads_arrives_as_it_was(eight: NvmlDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, ask = list[int](), _Lane.ask

    def counted(lane: _Lane, question: tuple[str, Any]) -> Any:
        answer = ask(lane, question)
        if question[0] == "read":
            sent.append(len(answer))
        return answer

    monkeypatch.setattr(_Lane, "ask", counted)
    there, here = IsolatedSource(), NvmlSource()
    try:
        inventory = there.open()
        assert inventory == here.open()
        for heat in (40, 71, 71):  # then only what changed is sent
            eight.gpus[1].temperature_celsius = heat
            eight.write()
            there_and_here = [(there.read(gpu.uuid), here.read(gpu.uuid)) for gpu in inventory.gpus]
            assert [one for one, _ in there_and_here] == [one for _, one in there_and_here]
            assert there_and_here[1][0].reading.temperature_celsius == heat
        first, second, third = (sent[at : at + 8] for at in (0, 8, 16))
        assert min(first) > 10 > max(second)
        assert (len(sent), third) == (24, [0] * 8)
    finally:
        there.close()
        here.close()


def test_beside_a_process_that_cannot_be_ended_no_other_is_started(
    eight: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends none that is stuck in it (state D)."""
    source = IsolatedSource()
    source.open()
    with monkeypatch.context() as stuck:
        stuck.setattr(ChildProcess, "end", lambda _: False)
        source.close()
    with pytest.raises(GpuSourceError, match=f"process {source.pid} is stuck"):
        source.open()
    source.close()
    assert (source.pid, children()) == (None, [])


def test_an_interrupt_ends_a_process_that_does_nothing_by_itself_any_more(eight: NvmlDouble) -> None:
    """One that stands still does not notice that its lanes or its parent's end are gone: only a kill ends it."""
    source = IsolatedSource()
    source.open()
    child = psutil.Process(source.pid)
    child.suspend()
    try:
        source.interrupt()
        eventually_sync(lambda: is_zombie(child.pid))
    finally:
        child.kill()
        source.close()
    assert (source.pid, children()) == (None, [])


def test_who_waits_is_told_at_once_even_if_the_process_cannot_be_killed(
    eight: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends none that is stuck in it (state D), so its end of the lane stays open."""
    source = IsolatedSource()
    gpu = source.open().gpus[0].uuid
    child = psutil.Process(source.pid)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(source.probe, gpu).result()  # this thread has a lane from here on
        child.suspend()
        try:
            waiting = pool.submit(source.read, gpu)
            with monkeypatch.context() as stuck:
                stuck.setattr(subprocess.Popen, "kill", lambda _: None)
                source.interrupt()
            with pytest.raises(GpuSourceError, match="was killed"):
                waiting.result(timeout=120.0)
        finally:
            child.kill()
            pool.shutdown()
            source.close()


def test_a_process_dies_with_a_parent_that_is_killed(eight: NvmlDouble) -> None:
    """Even while it is stuck in the driver."""
    stop_for_ever(eight)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=env_with_double(eight)
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    eventually_sync(lambda: not Path(f"/proc/{child}").exists() or is_zombie(child))


def is_zombie(pid: int) -> bool:
    """Whether a process is dead and not reaped: whoever inherits orphans may take its time, or may not at all."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
