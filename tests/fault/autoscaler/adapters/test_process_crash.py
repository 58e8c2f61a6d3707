"""The process adapter is killed at any moment: no replica is lost, none is started twice, none is forgotten."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from gpuscale.api.autoscaler import v1 as api
from tests.support.scripted_autoscaler import (
    ENDPOINT,
    AdapterProcess,
    ScriptedAutoscaler,
    adapter_process,
    log_of,
    processes_of,
    replica,
    scripted_autoscaler,
)
from tests.support.waiting import eventually

READY = api.Replica.STATE_READY
DRAINING = api.Replica.STATE_DRAINING
STOPPED = api.Replica.STATE_STOPPED
FAILED = api.Replica.STATE_FAILED
ONE = replica(1)


async def again(autoscaler: ScriptedAutoscaler, process: AdapterProcess, end: Callable[[], object]) -> None:
    """End the adapter in this way, start the next, and wait until it has reported."""
    assert not await asyncio.to_thread(end)
    autoscaler.reports.clear()
    process.start()
    await eventually(lambda: autoscaler.reports)


async def test_living_replicas_are_adopted(tmp_path: Path) -> None:
    """However their adapter ends: same process, still ready; its end is noticed, and so is a request to end, once."""
    diary = tmp_path / "diary"
    async with scripted_autoscaler() as (autoscaler, address):
        with adapter_process(tmp_path, address) as process:
            process.start()
            await autoscaler.run(ONE, "diary", parameters={"file": str(diary)})
            await autoscaler.run(replica(2), "sleeper")
            one = await autoscaler.shows(ONE, READY)
            two = await autoscaler.shows(replica(2), READY)
            for end in (process.kill, process.terminate):
                await again(autoscaler, process, end)
                assert (await autoscaler.shows(ONE, READY)).pid == one.pid
                assert (await autoscaler.shows(replica(2), READY)).pid == two.pid
                assert autoscaler.states(ONE) == ["READY"]

            os.kill(two.pid, signal.SIGKILL)
            lost = await autoscaler.shows(replica(2), FAILED)
            assert not lost.HasField("exit_code")
            assert "exit code is unknown" in lost.reason

            await autoscaler.stop(ONE)
            await autoscaler.shows(ONE, DRAINING)
            await eventually(lambda: diary.read_text() == "start\nasked\n")
            await again(autoscaler, process, process.kill)
            await autoscaler.shows(ONE, DRAINING)
            await autoscaler.stop(ONE)
            diary.with_name("diary.end").touch()
            await autoscaler.shows(ONE, STOPPED)
            assert diary.read_text() == "start\nasked\n"


async def test_what_ended_while_no_adapter_watched_is_reported(tmp_path: Path) -> None:
    """And what it left behind is ended too."""
    async with scripted_autoscaler() as (autoscaler, address):
        with adapter_process(tmp_path, address) as process:
            process.start()
            await autoscaler.run(ONE, "family")
            report = await autoscaler.shows(ONE, READY)
            await eventually(lambda: len(processes_of(ONE)) >= 3)
            await asyncio.to_thread(process.kill)
            os.kill(report.pid, signal.SIGKILL)
            assert len(processes_of(ONE)) >= 2
            process.start()
            report = await autoscaler.shows(ONE, FAILED)
            assert "exit code is unknown" in report.reason
            assert not processes_of(ONE)


async def test_one_found_after_a_crash_in_its_start_drains_when_it_should_stop(tmp_path: Path) -> None:
    """Nobody wrote down that it runs: it is neither lost nor killed at once."""
    diary = tmp_path / "diary"
    async with scripted_autoscaler() as (autoscaler, address):
        with adapter_process(tmp_path, address) as process:
            process.start(GPUSCALE_FAILPOINTS="adapter.start.after_spawn=kill")
            await autoscaler.run(ONE, "diary", parameters={"file": str(diary)})
            assert process.process is not None
            assert await asyncio.to_thread(process.process.wait, 60) == -signal.SIGKILL
            await eventually(lambda: diary.exists() and diary.read_text() == "start\n")
            await autoscaler.stop(ONE)
            autoscaler.reports.clear()
            process.start()
            await eventually(lambda: diary.read_text() == "start\nasked\n")
            await autoscaler.shows(ONE, DRAINING)
            diary.with_name("diary.end").touch()
            await autoscaler.shows(ONE, STOPPED)


async def test_a_pid_that_was_given_to_another_process_is_left_alone(tmp_path: Path) -> None:
    """The journal names a process by its pid and its start: the test process has the pid, and started earlier."""
    async with scripted_autoscaler() as (autoscaler, address):
        with adapter_process(tmp_path, address) as process:
            process.start()
            await autoscaler.run(ONE, "sleeper")
            report = await autoscaler.shows(ONE, READY)
            await asyncio.to_thread(process.kill)
            journal = next((tmp_path / "adapter" / "replicas").glob("*.json"))
            text = journal.read_text()
            journal.write_text(text.replace(f'"pid":{report.pid},', f'"pid":{os.getpid()},'))
            process.start()
            await autoscaler.shows(ONE, FAILED)


async def test_with_end_replicas_sigterm_ends_all_and_the_adapter(tmp_path: Path) -> None:
    async with scripted_autoscaler() as (autoscaler, address):
        with adapter_process(tmp_path, address) as process:
            process.start(GPUSCALE_ADAPTER_END_REPLICAS="true")
            for number, template in enumerate(("sleeper", "stubborn", "family", "drainer")):
                await autoscaler.run(replica(number), template)
            for number in range(4):
                await autoscaler.shows(replica(number), READY)
            logs = [log_of(tmp_path, replica(number)) for number in (1, 3)]
            await eventually(lambda: all("up" in log.read_text() for log in logs))
            assert await asyncio.to_thread(process.terminate) == 0
            assert not processes_of(f"{ENDPOINT}/")
            assert (await autoscaler.shows(replica(0), STOPPED)).exit_code == -signal.SIGTERM
            assert logs[1].read_text() == "up\ndrained\n"
            # What it reported stands in the journal, and the next run reports it again until it is told to forget.
            autoscaler.reports.clear()
            process.start()
            await autoscaler.shows(replica(1), STOPPED)
            await autoscaler.forget(replica(1))
            await eventually(lambda: autoscaler.report(replica(1)) is None)


async def test_two_adapters_on_one_directory_are_refused(tmp_path: Path) -> None:
    async with scripted_autoscaler() as (autoscaler, address):
        with adapter_process(tmp_path, address) as first:
            first.start()
            await eventually(lambda: autoscaler.reports)
            with adapter_process(tmp_path, address) as second:
                second.start()
                assert second.process is not None
                assert await asyncio.to_thread(second.process.wait, 60) == 1
                assert "is in use by process" in second.log.read_text()
