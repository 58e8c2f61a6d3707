"""An autoscaler that says what a test tells it to, and keeps what adapters report; and the adapter as a process."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import grpc
import psutil

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engines.process.engine import ProcessSettings, ProcessTemplate
from gpuscale.autoscaler.adapters.main import open_adapter
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.wire import to_duration
from gpuscale.internal.autoscaler import v1 as autoscaler_internal
from tests.support.forked import Forked
from tests.support.waiting import eventually

State = api.Replica.State
Desired = autoscaler_internal.DesiredReplica
_Context = grpc.aio.ServicerContext[autoscaler_internal.ConnectRequest, autoscaler_internal.ConnectResponse]

SH, RUNS = ("/bin/sh", "-c"), "echo up; while :; do sleep 0.05; done"
TEMPLATES: Mapping[str, Mapping[str, object]] = {
    "sleeper": {"command": ["/bin/sleep", "1000"]},
    "crash": {"command": [*SH, "exit {code:int}"]},
    # Finishes its work for a moment once it is asked to end.
    "drainer": {"command": [*SH, f"trap 'sleep 0.4; echo drained; exit 0' TERM; {RUNS}"]},
    "stubborn": {"command": [*SH, f"trap '' TERM; {RUNS}"]},
    # Leaves one child in its group, and one that has a session of its own.
    "family": {"command": [*SH, f"sleep 1000 & setsid sleep 1001 & trap 'exit 3' TERM; {RUNS}"]},
    "environment": {"command": ["/usr/bin/env"], "env": {"COLOR": "green"}, "pass_env": ["HANDED_ON"]},
    # Notes its start and its end in a file, and each request to end.
    "diary": {
        "command": [
            *SH,
            "echo start >> $1; trap 'echo asked >> $1' TERM; until [ -e $1.end ]; do sleep 0.05; done",
            *("sh", "{file}"),
        ]
    },
    "missing": {"command": ["/no/such/program"]},
}


# A replica's name is its identity on the host: another run of these tests must not use the same.
ENDPOINT = f"endpoints/test-{uuid4().hex[:12]}"


def replica(number: int) -> str:
    return f"{ENDPOINT}/replicas/r{number}"


def log_of(folder: Path, name: str) -> Path:
    _, endpoint, _, own = name.split("/")
    return folder / "adapter" / "logs" / endpoint / f"{own}.log"


@dataclass
class ScriptedAutoscaler(autoscaler_internal.AdapterStreamServiceServicer):
    """Sends `desired` to whoever connects, whenever `tell` changes it."""

    desired: dict[str, Desired] = field(default_factory=dict[str, Desired])
    registered: list[autoscaler_internal.Register] = field(default_factory=list[autoscaler_internal.Register])
    reports: list[autoscaler_internal.Report] = field(default_factory=list[autoscaler_internal.Report])
    revision: int = 1
    dropped: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def Connect(
        self, request_iterator: AsyncIterator[autoscaler_internal.ConnectRequest], context: _Context
    ) -> AsyncIterator[autoscaler_internal.ConnectResponse]:
        self.registered.append((await anext(request_iterator)).register)
        listener = asyncio.create_task(self._listen(request_iterator))
        try:
            sent = -1
            dropped = self.dropped
            while True:
                async with self.changed:
                    while sent == self.revision and dropped == self.dropped:
                        await self.changed.wait()
                    sent = self.revision
                if dropped != self.dropped:
                    return
                yield autoscaler_internal.ConnectResponse(revision=sent, replicas=list(self.desired.values()))
                yield autoscaler_internal.ConnectResponse()  # as what this version of the adapter does not know
        finally:
            listener.cancel()

    async def _listen(self, requests: AsyncIterator[autoscaler_internal.ConnectRequest]) -> None:
        async for request in requests:
            self.reports.append(request.report)

    async def tell(self, *lines: Desired) -> None:
        """Change what is wanted of these replicas, and send it."""
        async with self.changed:
            self.desired.update({line.replica: line for line in lines})
            self.revision += 1
            self.changed.notify_all()

    async def drop(self) -> None:
        async with self.changed:
            self.dropped += 1
            self.changed.notify_all()

    async def run(self, name: str, template: str, **fields: object) -> None:
        await self.tell(Desired(replica=name, goal=Desired.GOAL_RUN, template=template, **fields))

    async def stop(self, name: str, drain_timeout: float | None = None) -> None:
        line = Desired(replica=name, goal=Desired.GOAL_STOP)
        if drain_timeout is not None:
            line.drain_timeout.CopyFrom(to_duration(drain_timeout))
        await self.tell(line)

    async def forget(self, name: str) -> None:
        await self.tell(Desired(replica=name, goal=Desired.GOAL_FORGET))

    def report(self, name: str) -> autoscaler_internal.ReplicaReport | None:
        """What was reported last of a replica."""
        if not self.reports:
            return None
        return next((item for item in self.reports[-1].replicas if item.replica == name), None)

    async def shows(
        self, name: str, state: State.ValueType, timeout: float = 60.0
    ) -> autoscaler_internal.ReplicaReport:
        """Wait until a replica is reported in this state."""

        def found() -> autoscaler_internal.ReplicaReport:
            report = self.report(name)
            assert report is not None
            assert report.state == state, report
            return report

        return await eventually(found, timeout=timeout)

    def states(self, name: str) -> list[str]:
        """Every state in which a replica was reported, in order."""
        seen: list[str] = []
        for report in self.reports:
            for item in report.replicas:
                state = api.Replica.State.Name(item.state).removeprefix("STATE_")
                if item.replica == name and seen[-1:] != [state]:
                    seen.append(state)
        return seen


@asynccontextmanager
async def scripted_autoscaler() -> AsyncIterator[tuple[ScriptedAutoscaler, str]]:
    """A served `ScriptedAutoscaler`, and its address."""
    server = grpc.aio.server()
    autoscaler = ScriptedAutoscaler()
    autoscaler_internal.add_AdapterStreamServiceServicer_to_server(autoscaler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield autoscaler, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def settings(folder: Path, **fields: object) -> ProcessSettings:
    """An adapter of this node with the templates above."""
    templates = {name: ProcessTemplate.model_validate(table) for name, table in TEMPLATES.items()}
    own = {"node": "here", "data_dir": folder / "adapter", "templates": templates, "end_replicas": True}
    return ProcessSettings.model_validate(own | fields)


@asynccontextmanager
async def adapter(folder: Path, address: str, **fields: object) -> AsyncIterator[None]:
    async with (
        open_channel(address) as channel,
        open_adapter(settings(folder, **fields), autoscaler=channel, clock=SystemClock()),
    ):
        yield


class AdapterProcess:
    """`gpuscale-adapter` as a process of its own, that can be killed and started again on the same directory."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.log = folder / "adapter.stderr"
        lines = ["[adapter]", f'autoscaler_address = "{address}"', 'node = "here"']
        lines.append(f"data_dir = {json.dumps(str(folder / 'adapter'))}")
        for name, table in TEMPLATES.items():
            lines.append(f"[templates.{name}]")
            lines += [f"{key} = {_toml(value)}" for key, value in table.items()]
        self.config = folder / "adapter.toml"
        self.config.write_text("\n".join(lines) + "\n")
        self.process: Forked | None = None

    def start(self, **environment: str) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("GPUSCALE")}
        clean |= {"HANDED_ON": "yes"} | environment
        arguments = ["--config", str(self.config)]
        self.process = Forked("gpuscale.autoscaler.adapters.main", arguments, clean, self.log)

    def kill(self) -> None:
        """End it as a power cut would: kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def adapter_process(folder: Path, address: str) -> Iterator[AdapterProcess]:
    """The adapter's process, not yet started; afterwards neither it nor any replica is left."""
    one = AdapterProcess(folder, address)
    try:
        yield one
    finally:
        if one.process is not None and one.process.poll() is None:
            one.kill()
        kill_processes(f"{ENDPOINT}/")


def kill_processes(name: str) -> None:
    """Kill what `processes_of` finds; one that ends by itself meanwhile is as good."""
    for process in processes_of(name):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def processes_of(name: str) -> Sequence[psutil.Process]:
    """Living processes whose environment names a replica that begins like this."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            named = process.environ().get("GPUSCALE_REPLICA", "").startswith(name)
            if named and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)
