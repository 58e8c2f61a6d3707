"""Batch jobs as `squeue` shows them, what each says of a replica, and how they are submitted. Pure.

States and reasons are those of squeue(1). A job is identified by its name: Slurm reuses a number if its controller loses what
it had not saved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from gpuscale.autoscaler.adapters.engine import LaunchRefusedError, ReplicaOrder, Sighting, WorkerLife
from gpuscale.autoscaler.adapters.templates import CommandTemplate, launch
from gpuscale.common.names import is_id, replica_name

FIELDS = ("JobID", "State", "exit_code", "TimeUsed", "Reason", "Name")
"""Asked of squeue."""

_MARK = "gpuscale"
_YOUNG = frozenset({"0:00", "0:01", "0:02", "INVALID"})
_RUNNING = frozenset({"RUNNING", "RESIZING", "SIGNALING"})
_QUEUED = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_ENDED = {
    "BOOT_FAIL": "its node could not be started",
    "CANCELLED": "its job was cancelled",
    "COMPLETED": "it ended by itself",
    "DEADLINE": "its job reached its deadline",
    "FAILED": "its job failed",
    "LAUNCH_FAILED": "its job could not be launched",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted by another job",
    "REVOKED": "another cluster took its job over",
    "TIMEOUT": "the time limit of its job is over",
}
_OF_THE_PROGRAM = frozenset({"None", "NonZeroExitCode", "JobLaunchFailure", "RaisedSignal"})
"""Reasons of a failed job that add nothing to its exit code."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A batch job.

    Attributes:
        number: what Slurm calls it.
        name: its name.
        state: as squeue shows it.
        exit_code: of its program; negative for a signal; None if unknown.
        young: whether it began so recently that a signal may miss it.
        reason: Slurm's reason for the state.
    """

    number: int
    name: str
    state: str
    exit_code: int | None = None
    young: bool = False
    reason: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.state in _ENDED

    @property
    def ending(self) -> bool:
        """Whether its program has ended, while its node is still being cleaned up."""
        return self.state == "COMPLETING"

    @property
    def queued(self) -> bool:
        """Whether it waits in the queue."""
        return self.state in _QUEUED

    @property
    def preparing(self) -> bool:
        """Whether its nodes are allocated, and not ready yet."""
        return self.state == "CONFIGURING"


def question(user: int, secret: str) -> tuple[str, ...]:
    """The arguments of squeue that list every job of a user, including those that ended recently.

    A job's name may hold anything, line ends too, and squeue does not escape it. So each field ends with `secret`, which
    nobody could know when naming a job.
    """
    columns = ",".join(f"{field}:{_separator(secret)}" for field in FIELDS)
    return ("--noheader", "--states=all", f"--user={user}", f"--Format={columns}")


def parse_jobs(said: str, secret: str) -> list[SlurmJob]:
    """The jobs in the answer to `question`.

    Raises:
        ValueError: it is not what was asked for.
    """
    *fields, end = said.split(_separator(secret))
    if end != ("\n" if fields else "") or len(fields) % len(FIELDS):
        raise ValueError(f"squeue says {said[-80:]!r}")
    jobs: list[SlurmJob] = []
    for at in range(0, len(fields), len(FIELDS)):
        number, state, status, used, reason, name = fields[at : at + len(FIELDS)]
        number = number.removeprefix("\n")  # of the line before
        if not number.isdecimal():
            raise ValueError(f"squeue says {number[:80]!r}")
        code = _exit_code(state, status, reason)
        jobs.append(SlurmJob(int(number), name, state, code, used in _YOUNG, reason))
    return jobs


def _separator(secret: str) -> str:
    """What ends a field. It does not begin with a digit: after the colon that would be a width."""
    return f"|{secret}|"


def job_name(adapter: str, replica: str) -> str:
    """The name of the job of `endpoints/{endpoint}/replicas/{replica}`; no id holds a colon."""
    _, endpoint, _, own = replica.split("/")
    return f"{_MARK}:{adapter}:{endpoint}:{own}"


def replica_of(adapter: str, name: str) -> str | None:
    """The replica of a job by its name; None for a job that is not this adapter's."""
    match name.split(":"):
        case [mark, whose, endpoint, own] if mark == _MARK and whose == adapter:
            return replica_name(endpoint, own) if is_id(endpoint) and is_id(own) else None
        case _:
            return None


def sighting(job: SlurmJob) -> Sighting:
    """What a job says of its replica."""
    if job.over:
        if job.state != "FAILED":
            why = _ENDED[job.state]
        elif job.exit_code is None:
            why = f"its job failed: {job.reason}"
        else:
            why = f"exit code {job.exit_code}" if job.exit_code > 0 else f"ended by signal {-job.exit_code}"
        return Sighting(WorkerLife.ENDED, job.exit_code, why)
    if job.state in _RUNNING:
        return Sighting(WorkerLife.READY)
    why = f"its job {job.number} is {job.state.lower()}"
    return Sighting(WorkerLife.STARTING, reason=why if job.reason in {"", "None"} else f"{why}: {job.reason}")


def _exit_code(state: str, status: str, reason: str) -> int | None:
    """Of an ended job's program; None if Slurm wrote `status` for want of one.

    `status` is `256` (as in wait(2)) or `1:0` (code and signal), depending on the version of Slurm.
    """
    if found := re.fullmatch(r"(\d+):(\d+)", status):
        code, signal = int(found[1]), int(found[2])
    elif status.isdecimal():
        code, signal = int(status) >> 8 & 0xFF, int(status) & 0x7F
    else:
        return None
    code = -signal if signal else code
    if state == "FAILED":
        return code if reason in _OF_THE_PROGRAM else None
    meant = state == "COMPLETED" or (code != 0 and state != "OUT_OF_MEMORY")
    return code if meant and state in _ENDED else None


SCRIPT = Path(__file__).with_name("replica.sh")

_AWAY = ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes", "standby mode")
_NEVER = (
    "Access denied",
    "CPU count specification invalid",
    "Invalid",
    "More processors requested than permitted",
    "Node count specification invalid",
    "Requested node configuration is not available",
    "Requested nodes not in this partition",
    "Requested time limit is invalid",
    "Unrecognized",
    "User's group not permitted",
    "invalid",
    "permission denied",
)


Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.,-]*$", max_length=255)]
Memory = Annotated[str, StringConstraints(pattern=r"^([0-9]{1,12}[KMGT]?)?$")]
TimeLimit = Annotated[
    str, StringConstraints(pattern=r"^([0-9]+(-[0-9]+)?(:[0-9]{1,2}){0,2})?$", max_length=32)
]


class JobTemplate(CommandTemplate):
    """One table [slurm_templates.NAME]: how replicas of endpoints that name it become jobs.

    The command is one on the nodes; its environment is clean but for Slurm's own.
    """

    partition: Word | None = None
    """Where it runs; by default that of the adapter."""
    account: Word | None = None
    """On whose bill; by default that of the adapter."""
    qos: Word | None = None
    """Quality of service; by default that of the adapter."""
    constraint: str = Field("", max_length=1024)
    """What its nodes must have."""
    gpu_type: Word = ""
    """Kind of GPUs, such as a100; any kind when empty."""
    cpus: int = Field(0, ge=0, le=10_000)
    """Of a replica on each of its nodes; 0 for Slurm's default."""
    memory: Memory = ""
    """On each of its nodes, such as 64G; Slurm's default when empty."""
    time_limit: TimeLimit = ""
    """In a form that sbatch takes, such as 8:00:00; the partition's when empty."""
    nodes: int = Field(1, ge=1, le=10_000)
    """How many a replica spans; its command runs on the first, and its GPUs are shared out evenly."""
    output: str = Field("", max_length=4096)
    """File for what it prints, with the patterns of sbatch; slurm-%j.out in its working directory when empty."""
    notice_seconds: int = Field(0, ge=0, le=65_535)
    """Seconds before its time limit at which it is sent SIGTERM; 0 for never."""

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        if not (self.constraint + self.output).isprintable():
            raise ValueError("constraint and output must be printable")
        return self


@dataclass(frozen=True, slots=True)
class Submission:
    """What sbatch is called with."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def submission(
    name: str,
    template: JobTemplate,
    order: ReplicaOrder,
    adapter: str,
    python: str,
    environment: Mapping[str, str],
) -> Submission:
    """How to submit the job of a replica by the template of that name; Slurm decides what is empty.

    `singleton` lets one job of a name run at a time: if Slurm's answer is lost and the job is submitted again, the second
    job waits for the first, and can be cancelled. Slurm does not requeue a job that ended: the autoscaler replaces it.

    Raises:
        LaunchRefusedError: the order does not fit the template.
    """
    what = launch(name, template, order, python, environment)
    gpus, left = divmod(order.gpu_count, template.nodes)
    if left:
        raise LaunchRefusedError(
            f"{order.gpu_count} GPUs cannot be shared by the {template.nodes} nodes of template {name}"
        )
    gpu_kind = f"gpu:{template.gpu_type}" if template.gpu_type else "gpu"
    options = {
        "job-name": job_name(adapter, order.replica),
        "comment": order.replica,
        "dependency": "singleton",
        "export": "ALL",
        "nodes": template.nodes,
        "gres": f"{gpu_kind}:{gpus}" if gpus else "",
        "partition": template.partition,
        "account": template.account,
        "qos": template.qos,
        "constraint": template.constraint,
        "cpus-per-task": template.cpus,
        "mem": template.memory,
        "time": template.time_limit,
        "chdir": what.working_dir,
        "output": template.output,
        "signal": f"B:TERM@{template.notice_seconds}" if template.notice_seconds else "",
    }
    # sbatch passes its environment to the job. Slurm sets the GPUs of a job; a job without GPUs must see none.
    variables = dict(what.env)
    if order.gpu_count:
        variables.pop("CUDA_VISIBLE_DEVICES", None)
    given = (f"--{name}={value}" for name, value in options.items() if value)
    return Submission(("--parsable", "--no-requeue", *given, str(SCRIPT), *what.argv), variables)


def is_away(said: str) -> bool:
    """Whether a command of Slurm failed because the controller does not answer."""
    return any(text in said for text in _AWAY)


def is_refusal(said: str) -> bool:
    """Whether sbatch says that such a job can never run, in the texts of slurm_strerror."""
    return any(text in said for text in _NEVER)
