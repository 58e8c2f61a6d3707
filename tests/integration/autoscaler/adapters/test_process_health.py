"""The process adapter asks replicas whether they are well, and the node's agent whether they may start at all."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.autoscaler.adapters import admission
from gpuscale.autoscaler.adapters.admission import Admission
from gpuscale.autoscaler.adapters.engine import ReplicaOrder
from gpuscale.autoscaler.adapters.engines.process.engine import ProcessSettings
from gpuscale.autoscaler.adapters.engines.process.processes import WorkerUser, identify
from gpuscale.autoscaler.adapters.engines.process.replica import (
    KEPT_PROCESS,
    KeptProcess,
    Probe,
    ProbeKind,
    Timing,
    ask,
)
from gpuscale.autoscaler.adapters.journal import Journal, JournalRecord, Phase
from gpuscale.autoscaler.adapters.main import open_adapter
from gpuscale.common.errors import FailedPreconditionError, NotFoundError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import Registration, Server, ServerOptions
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.security.auth import Authenticator, Role
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.scripted_autoscaler import processes_of, replica, scripted_autoscaler
from tests.support.waiting import eventually

READY, STARTING = api.Replica.STATE_READY, api.Replica.STATE_STARTING
FAILED, STOPPED = api.Replica.STATE_FAILED, api.Replica.STATE_STOPPED
ONE = replica(101)
OFTEN = {"period": 0.1, "timeout": 5.0, "failures": 2}
PROGRAM = ["/bin/sleep", "1000"]


def looks_for(file: Path) -> dict[str, Any]:
    """A template whose replicas are well while a file is there."""
    probe = {"exec": ["/usr/bin/test", "-e", str(file)], "start_timeout": 600, **OFTEN}
    return {"command": PROGRAM, "probe": probe}


@asynccontextmanager
async def adapter(
    folder: Path, address: str, templates: dict[str, Any], agent: str = "", **fields: Any
) -> AsyncIterator[None]:
    settings = ProcessSettings.model_validate(
        {
            "node": "here",
            "data_dir": folder / "adapter",
            "templates": templates,
            "end_replicas": True,
            **fields,
        }
    )
    async with open_channel(address) as channel, open_channel(agent or "127.0.0.1:1") as agent_channel:
        to_agent = agent_channel if agent else None
        async with open_adapter(settings, autoscaler=channel, clock=SystemClock(), agent=to_agent):
            yield


async def test_a_replica_is_ready_once_its_probe_succeeds_and_fails_with_it(tmp_path: Path) -> None:
    well = tmp_path / "well"
    async with (
        scripted_autoscaler() as (autoscaler, address),
        adapter(tmp_path, address, {"w": looks_for(well)}),
    ):
        await autoscaler.run(ONE, "w")
        await eventually(lambda: (found := autoscaler.report(ONE)) and "its probe fails" in found.reason)
        assert (await autoscaler.shows(ONE, STARTING)).reason == "its probe fails: the program ended with 1"
        assert "READY" not in autoscaler.states(ONE)
        well.touch()
        assert (await autoscaler.shows(ONE, READY)).reason == ""
        well.unlink()
        report = await autoscaler.shows(ONE, FAILED)
        assert report.reason == "its probe failed 2 times in a row: the program ended with 1"
        assert not processes_of(ONE)
        assert autoscaler.states(ONE) == ["STARTING", "READY", "FAILED"]


async def test_one_that_hangs_is_killed_when_it_does_not_end_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuscale.autoscaler.adapters.engines.process.replica.GIVEN_UP_GRACE", 0.2)
    hangs = {"command": ["/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"]}
    hangs |= {"probe": {"tcp": f"127.0.0.1:{free_port()}", "start_timeout": 0, **OFTEN}}
    async with scripted_autoscaler() as (autoscaler, address), adapter(tmp_path, address, {"w": hangs}):
        await autoscaler.run(ONE, "w")
        report = await autoscaler.shows(ONE, FAILED)
        assert "its probe failed 2 times in a row" in report.reason
        assert report.exit_code == -9
        assert not processes_of(ONE)


async def test_a_stop_does_not_wait_for_a_probe_that_takes_long(tmp_path: Path) -> None:
    slow = {
        "command": PROGRAM,
        "probe": {"exec": ["/bin/sleep", "1000"], "timeout": 60, "start_timeout": 600},
    }
    async with scripted_autoscaler() as (autoscaler, address), adapter(tmp_path, address, {"w": slow}):
        await autoscaler.run(ONE, "w")
        await eventually(lambda: len(processes_of(ONE)) == 2)
        await autoscaler.stop(ONE)
        await autoscaler.shows(ONE, STOPPED)
        assert not processes_of(ONE)


async def test_what_was_ready_before_the_adapter_went_is_ready_when_it_is_adopted(tmp_path: Path) -> None:
    """And what was not is not: neither is taken for the other, and both are asked on."""
    well = tmp_path / "well"
    probe = Probe(ProbeKind.EXEC, ("/usr/bin/test", "-e", str(well)), Timing(period=0.1, start_timeout=600))
    journal = Journal(tmp_path / "adapter" / "replicas")
    journal.load()
    clock = SystemClock()
    processes: list[asyncio.subprocess.Process] = []
    for name, ready in ((ONE, False), (replica(102), True)):
        environment = {"GPUSCALE_REPLICA": name, "PATH": os.environ["PATH"]}
        process = await asyncio.create_subprocess_exec(*PROGRAM, env=environment, start_new_session=True)
        processes.append(process)
        leader = identify(process.pid)
        assert leader
        kept = KEPT_PROCESS.dump_python(KeptProcess(leader, probe, ready), mode="json")
        journal.write([JournalRecord(name, Phase.RUNNING, clock.boot_id, kept=kept)])
    async with scripted_autoscaler() as (autoscaler, address), adapter(tmp_path, address, {}):
        await autoscaler.shows(replica(102), READY)
        await autoscaler.shows(ONE, STARTING)
        well.touch()
        await autoscaler.shows(ONE, READY)
        assert autoscaler.states(replica(102)) == ["READY"]
    await asyncio.gather(*(process.wait() for process in processes))


@asynccontextmanager
async def answers(status: bytes) -> AsyncIterator[str]:
    """A server that answers each request with this; leaving waits until it has ended with every caller."""
    open_calls = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_calls
        open_calls += 1
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(status)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it only wanted to connect
        finally:
            writer.close()
            open_calls -= 1

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await eventually(lambda: not open_calls)


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", ""),
        (b"HTTP/1.0 302 Found\r\n\r\n", ""),
        (b"HTTP/1.1 503 Loading\r\n\r\n", "HTTP status 503"),
        (b"SSH-2.0-OpenSSH\r\n", "the answer is not HTTP"),
        (b"", "bytes read"),
        (b"x" * 10_000, "Separator is not found"),
    ],
)
async def test_http_asks_for_a_status(status: bytes, problem: str) -> None:
    async with answers(status) as address:
        probe = Probe(ProbeKind.HTTP, (f"http://{address}/healthz",), Timing(timeout=10.0))
        found = await ask(probe, {}, WorkerUser().command)
        assert problem in found
        assert bool(problem) is bool(found)


@pytest.mark.looptime
async def test_a_probe_that_not_even_a_kill_ends_is_a_probe_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a program that asks a GPU's driver may hang in the kernel: the replica must not count as well for ever."""
    hangs = Mock(spec=asyncio.subprocess.Process, returncode=None, wait=asyncio.Event().wait)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", AsyncMock(return_value=hangs))
    probe = Probe(ProbeKind.EXEC, ("/usr/bin/nvidia-smi",), Timing(timeout=2.0))
    async with asyncio.timeout(60):
        assert await ask(probe, {}, WorkerUser().command) == "no answer within 2 s"
    hangs.kill.assert_called_once_with()


async def test_nobody_at_the_address_and_no_answer_in_time_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a busy machine the end of what was killed is seen late; left alone, it is a warning in some other test.
    monkeypatch.setattr("gpuscale.autoscaler.adapters.engines.process.replica._END_SECONDS", 60.0)
    async with answers(b"") as address:
        there = Probe(ProbeKind.TCP, (address,), Timing(timeout=10.0))
        assert await ask(there, {}, WorkerUser().command) == ""
    closed = Probe(ProbeKind.TCP, (f"127.0.0.1:{free_port()}",), Timing(timeout=10.0))
    assert "Connect call failed" in await ask(closed, {}, WorkerUser().command)
    slow = Probe(ProbeKind.EXEC, ("/bin/sleep", "1000"), Timing(timeout=0.1))
    assert await ask(slow, {}, WorkerUser().command) == "no answer within 0.1 s"
    missing = Probe(ProbeKind.EXEC, ("/no/such/program",), Timing(timeout=10.0))
    assert await ask(missing, {}, WorkerUser().command) == "No such file or directory"


class FakeAgent(monitor_api.WorkServiceServicer):
    """Admits as an agent does, on the GPU `GPU-a`."""

    def __init__(self) -> None:
        self.highest = 0
        self.asked: list[tuple[str, str, bool]] = []
        self.namespaces: list[int] = []
        self.hangs = False

    async def AdmitWork(
        self, request: monitor_api.AdmitWorkRequest, context: Any
    ) -> monitor_api.AdmitWorkResponse:
        self.asked.append((request.reservation, request.lease_token, request.HasField("pid")))
        self.namespaces.append(request.pid_namespace)
        if self.hangs:
            await asyncio.Event().wait()
        if list(request.gpu_uuids) != ["GPU-a"]:
            raise NotFoundError("this host has no such GPU")
        if request.fence < self.highest:
            raise FailedPreconditionError(
                f"work with fence {self.highest} was admitted", reason="FENCE_TOO_LOW"
            )
        self.highest = request.fence
        return monitor_api.AdmitWorkResponse()


@asynccontextmanager
async def serving(agent: FakeAgent, socket: Path | None = None) -> AsyncIterator[str]:
    server = Server(ServerOptions(socket=socket), Authenticator(socket_role=Role.AGENT))

    def add(to: grpc.aio.Server) -> None:
        monitor_api.add_WorkServiceServicer_to_server(agent, to)

    server.add(Registration("gpuscale.api.monitor.v1.WorkService", add))
    address = server.bind()
    async with server:
        yield address


LEASE: dict[str, Any] = {"fence": 7, "reservation": "reservations/r7", "lease_token": "of r7"}
TEMPLATES: dict[str, Any] = {"w": {"command": PROGRAM}}


async def test_work_on_gpus_is_admitted_before_and_shown_after_it_starts(tmp_path: Path) -> None:
    agent = FakeAgent()
    async with (
        serving(agent) as agent_address,
        scripted_autoscaler() as (autoscaler, address),
        adapter(tmp_path, address, TEMPLATES, agent_address),
    ):
        await autoscaler.run(ONE, "w", gpu_uuids=["GPU-a"], **LEASE)
        await autoscaler.shows(ONE, READY)
        await autoscaler.run(replica(102), "w")
        await autoscaler.shows(replica(102), READY)
    assert agent.asked == [("reservations/r7", "of r7", started) for started in (False, True)], (
        "without GPUs nobody is asked"
    )
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert kept
    assert not any(b"of r7" in content for content in kept), (
        "no lease token in journals, logs and environments"
    )


async def test_what_the_agent_refuses_never_starts(tmp_path: Path) -> None:
    """Also where admission is not required: a refusal is an answer."""
    agent = FakeAgent()
    agent.highest = 8
    async with (
        serving(agent) as agent_address,
        scripted_autoscaler() as (autoscaler, address),
        adapter(tmp_path, address, TEMPLATES, agent_address),
    ):
        await autoscaler.run(ONE, "w", gpu_uuids=["GPU-a"], **LEASE)
        report = await autoscaler.shows(ONE, FAILED)
        assert report.reason == "the node's agent refuses: work with fence 8 was admitted"
        assert report.pid == 0
        assert not (tmp_path / "adapter" / "logs").exists(), "no process was ever there"


async def test_the_socket_of_the_agent_of_this_host_is_asked_where_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever TLS and token the autoscaler wants; a process is named with the PID namespace that its pid is of."""
    socket, agent = tmp_path / "agent.sock", FakeAgent()
    monkeypatch.setattr("gpuscale.autoscaler.adapters.settings.AGENT_SOCKET", socket)
    files = {"ca_file": Authority(tmp_path).file, "token_file": tmp_path / "no token", "templates": TEMPLATES}
    files |= {"end_replicas": True}
    found = ProcessSettings.model_validate({"data_dir": tmp_path / "adapter", **files})
    assert found.require_admission
    assert found.open_agent_channel() is None
    async with serving(agent, socket), scripted_autoscaler() as (autoscaler, address):
        to_agent = found.open_agent_channel()
        assert to_agent is not None
        async with (
            to_agent,
            open_channel(address) as channel,
            open_adapter(found, autoscaler=channel, clock=SystemClock(), agent=to_agent),
        ):
            await autoscaler.run(ONE, "w", gpu_uuids=["GPU-a"], **LEASE)
            await autoscaler.shows(ONE, READY)
    assert agent.namespaces == [0, Path("/proc/self/ns/pid").stat().st_ino]


@pytest.mark.parametrize("required", [False, True])
async def test_an_agent_that_does_not_answer_is_minded_where_it_is_required(
    required: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = FakeAgent()
    order = ReplicaOrder(ONE, "endpoints/e", {}, gpu_uuids=("GPU-b",), **LEASE)
    async with serving(agent) as address, open_channel(address) as channel:
        asked = Admission(channel, required=required)
        assert await asked.refusal(order) == "the node's agent refuses: this host has no such GPU"
        agent.hangs = True
        monkeypatch.setattr(admission, "TIMEOUT", 0.2)
        assert ("the node's agent must admit it, but did not" in await asked.refusal(order)) is required
    assert not await Admission(None, required=required).refusal(order), "where nobody is to be asked"
