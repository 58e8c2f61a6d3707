"""Replicas as batch jobs of Slurm: submitted, listed and signalled with its commands, and identified by their names."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import ClassVar

from pydantic import Field

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engine import (
    EngineUnavailableError,
    Finish,
    LaunchRefusedError,
    Sighting,
    Start,
    Step,
    StepOutcomes,
    StepwiseEngine,
    WorkerLife,
    split_duplicates,
)
from gpuscale.autoscaler.adapters.settings import EngineSettings, Host, OpenEngine
from gpuscale.autoscaler.adapters.templates import template_named
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.secrets import environment
from gpuscale_slurm.jobs import (
    JobTemplate,
    SlurmJob,
    Word,
    is_away,
    is_refusal,
    parse_jobs,
    question,
    replica_of,
    sighting,
    submission,
)

COMMAND_TIMEOUT = 15.0
HANDED_ON = ("HOME", "LANG", "LOGNAME", "PATH", "SLURM_CONF", "USER")
"""Variables of the adapter that the commands see; others, such as SQUEUE_STATES, would change their output."""
LOOKS = 5
LOOK_GAP = 1.0
"""Seconds between two looks at a job that cannot take a signal yet; after `LOOKS` it is signalled in any case."""
_GONE = ("Invalid job id specified", "Job/step already completing or completed")

_log = get_logger(__name__)


class SlurmSettings(EngineSettings):
    """Settings of the Slurm adapter."""

    section: ClassVar[str] = "slurm_adapter"
    kind: ClassVar[str] = "slurm"
    description: ClassVar[str] = "Submits and cancels replicas as batch jobs of Slurm."
    templates_field: ClassVar[str] = "slurm_templates"

    commands_dir: Path | None = Field(
        None, description="directory of sbatch, squeue and scancel; PATH if none"
    )
    slurm_conf: Path | None = Field(None, description="slurm.conf of the cluster; where Slurm looks if none")
    poll_seconds: float = Field(2.0, ge=0.2, le=5, description="seconds between two looks at the queue")
    python: str = Field(
        "", description="interpreter on the nodes that {python} stands for; the adapter's own if none"
    )
    partition: Word = Field(
        "", description="partition of templates that name none; Slurm's default when empty"
    )
    account: Word = Field(
        "", description="account of templates that name none; the user's default when empty"
    )
    qos: Word = Field(
        "", description="quality of service of templates that name none; the default when empty"
    )
    slurm_templates: dict[str, JobTemplate] = Field(
        default_factory=dict[str, JobTemplate], description="templates of jobs by name"
    )

    @asynccontextmanager
    async def open_engine(self, _host: Host, /) -> AsyncGenerator[OpenEngine]:
        """The jobs of this process's user, which go on when the adapter ends."""
        variables = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
        if self.slurm_conf:
            variables["SLURM_CONF"] = str(self.slurm_conf)
        engine = SlurmEngine(self, Commands(self.commands_dir, variables), environment(), user=os.geteuid())
        yield OpenEngine(engine, api.AdapterCapabilities(gives_gpus=True, picks_victims=True, drains=True))

    def templates(self) -> dict[str, JobTemplate]:
        """The templates by name, completed with the adapter's defaults."""
        defaults = {"partition": self.partition, "account": self.account, "qos": self.qos}
        return {
            name: table.model_copy(
                update={key: defaults[key] for key in defaults if getattr(table, key) is None}
            )
            for name, table in self.slurm_templates.items()
        }


@dataclass(frozen=True, slots=True)
class SlurmAnswer:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def why(self) -> str:
        """The last line of its error output."""
        return self.err.strip().rpartition("\n")[2] or f"exit status {self.status}"


class Commands:
    """Runs sbatch, squeue and scancel, which see the variables of `environment`; `directory` is None for PATH."""

    def __init__(self, directory: Path | None, environment: Mapping[str, str]) -> None:
        self._path = str(directory) if directory else environment.get("PATH")
        self._environment = environment

    async def run(
        self, name: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> SlurmAnswer:
        """Run a command to its end; `environment` is added to its variables.

        Raises:
            EngineUnavailableError: it cannot be run, or does not end in time.
        """
        program = shutil.which(name, path=self._path)
        if program is None:
            raise EngineUnavailableError(f"{name} is not installed here")
        try:
            # In a thread and not by the event loop, whose fork makes gRPC's threads take part each time.
            done = await asyncio.to_thread(
                subprocess.run,
                (program, *arguments),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={**self._environment, **(environment or {})},
                timeout=COMMAND_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise EngineUnavailableError(f"{name} did not end within {COMMAND_TIMEOUT:g} s") from error
        except OSError as error:
            raise EngineUnavailableError(f"cannot run {name}: {error.strerror}") from error
        out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        return SlurmAnswer(done.returncode, out, err)


class SlurmEngine(StepwiseEngine):
    """The jobs of one adapter, submitted as `user`; a job gets the variables of `environment` that its template names."""

    def __init__(
        self, settings: SlurmSettings, commands: Commands, environment: Mapping[str, str], *, user: int
    ) -> None:
        self._commands = commands
        self._adapter = settings.adapter
        self._templates = settings.templates()
        self._user = user
        self._python = settings.python or sys.executable
        self._environment = environment
        self._poll = settings.poll_seconds
        self._jobs: dict[str, SlurmJob] = {}
        self._waits: dict[str, str] = {}
        self._asked: set[str] = set()
        self._removed: set[str] = set()

    async def observe(self) -> Mapping[str, Sighting]:
        """As `Engine.observe`: one squeue. Of the jobs of one replica all but the first are cancelled."""
        secret = token_hex(8)
        answer = await self._commands.run("squeue", *question(self._user, secret))
        if answer.status:
            raise EngineUnavailableError(answer.why)
        try:
            jobs = parse_jobs(answer.out, secret)
        except ValueError as error:
            raise EngineUnavailableError(str(error)) from error
        # Jobs of one name run one after the other, in the order of their numbers.
        named = [(replica_of(self._adapter, job.name), job) for job in jobs]
        counts, others = split_duplicates(named, lambda job: job.number)
        for job in others:
            if not job.over:
                _log.warning("cancelling a job that was submitted twice", job=job.number, name=job.name)
                await self._cancel(job)
        self._removed &= counts.keys()
        self._jobs = {name: job for name, job in counts.items() if not job.over or name not in self._removed}
        self._asked &= self._jobs.keys()
        for name in self._waits.keys() & self._jobs.keys():
            del self._waits[name]
        waiting = {name: Sighting(WorkerLife.WAITING, reason=why) for name, why in self._waits.items()}
        return waiting | {name: sighting(job) for name, job in self._jobs.items()}

    async def apply(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """As `Engine.apply`. Jobs are asked to finish together; one that has only just begun gets a moment first."""
        outcomes = StepOutcomes()
        left = {step.replica for step in steps if isinstance(step, Finish)} - self._asked
        for look in range(LOOKS + 1):
            for replica in sorted(left):
                try:
                    if await self._ask(replica, patient=look < LOOKS):
                        self._asked.add(replica)
                except EngineUnavailableError as error:
                    outcomes.failed[replica] = str(error)
            left = left - self._asked - outcomes.failed.keys()
            if not left:
                break
            await asyncio.sleep(LOOK_GAP)
            await self.observe()
        outcomes.failed.update(dict.fromkeys(left, "its job does not end although it was cancelled"))

        for step in steps:
            await self.take(step, outcomes)
        return outcomes.result()

    async def watch(self) -> None:
        """As `Engine.watch`: Slurm sends no events."""
        await asyncio.sleep(self._poll)

    async def start(self, step: Start) -> None:
        """As `StepwiseEngine.start`: submit a job."""
        replica = step.replica
        if replica in self._jobs:
            return
        template = template_named(self._templates, step.template)
        what = submission(step.template, template, step.order, self._adapter, self._python, self._environment)
        answer = await self._commands.run("sbatch", *what.arguments, environment=what.environment)
        if not answer.status:
            self._waits.pop(replica, None)
            _log.info("submitted a job", job=answer.out.strip(), replica=replica)
            return
        if is_away(answer.err):
            raise EngineUnavailableError(answer.why)
        if is_refusal(answer.err):
            self._waits.pop(replica, None)
            raise LaunchRefusedError(answer.why)
        if self._waits.get(replica) != answer.why:
            _log.warning("Slurm takes no job for now", replica=replica, why=answer.why)
        self._waits[replica] = answer.why

    async def finish(self, step: Finish) -> None:
        """As `StepwiseEngine.finish`; `apply` has asked it already."""

    async def kill(self, replica: str) -> None:
        """As `StepwiseEngine.kill`."""
        if job := self._jobs.get(replica):
            await self._cancel(job)

    async def remove(self, replica: str) -> None:
        """As `StepwiseEngine.remove`. The job is hidden; Slurm forgets it some minutes after its end."""
        self._waits.pop(replica, None)
        self._removed.add(replica)

    async def _ask(self, replica: str, *, patient: bool) -> bool:
        """Ask a job to finish; returns whether that is done."""
        job = self._jobs.get(replica)
        if job is None or job.over or job.ending:
            return True
        if job.queued or job.preparing:
            await self._cancel(job, *(("--state=PENDING",) if job.queued else ()))
            return False
        # Slurm drops a signal for a batch step that its node has not begun yet.
        if job.young and patient:
            return False
        await self._cancel(job, "--signal=TERM", "--batch")
        return True

    async def _cancel(self, job: SlurmJob, *how: str) -> None:
        """Call scancel by number and name: the number alone may be another job's by now."""
        answer = await self._commands.run("scancel", *how, f"--name={job.name}", str(job.number))
        if answer.status and not any(text in answer.err for text in _GONE):
            raise EngineUnavailableError(answer.why)
