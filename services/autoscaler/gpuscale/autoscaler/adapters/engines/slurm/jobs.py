"""Batch jobs as `squeue` shows them, and what each says of a replica. Pure.

States and reasons are those of squeue(1); a job's name is its identity here, since Slurm gives out a job's number again
after its controller lost what it had not saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from gpuscale.autoscaler.adapters.engine import ReplicaOrder, Sighting, WorkerLife
from gpuscale.autoscaler.adapters.templates import CommandTemplate, LaunchRefusedError, launch
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
"""Reasons of a failed job that say no more than its exit code."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A batch job.

    Attributes:
        number: what Slurm calls it.
        name: its name.
        state: as squeue shows it.
        exit_code: of its program; negative for a signal; None while nobody knows.
        young: whether it has run for so short a time that a signal may miss it.
        reason: why it is in that state, in Slurm's word.
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
        """Whether it waits for its turn."""
        return self.state in _QUEUED

    @property
    def preparing(self) -> bool:
        """Whether it has its nodes, which are not ready yet."""
        return self.state == "CONFIGURING"


def question(user: int, secret: str) -> tuple[str, ...]:
    """The arguments for squeue that list every job of a user, those that ended not long ago too.

    Names of jobs may hold anything, ends of lines as well, and squeue writes them as they are. So `secret`, which nobody
    knew when he named his job, stands behind every field.
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
    return [_parse(fields[at : at + len(FIELDS)]) for at in range(0, len(fields), len(FIELDS))]


def _separator(secret: str) -> str:
    """What stands behind a field; what follows its colon would be a width if it began with a digit."""
    return f"|{secret}|"


def job_name(adapter: str, replica: str) -> str:
    """The name of the job of `endpoints/{endpoint}/replicas/{replica}`; no id holds a colon."""
    _, endpoint, _, own = replica.split("/")
    return f"{_MARK}:{adapter}:{endpoint}:{own}"


def replica_of(adapter: str, name: str) -> str | None:
    """The replica whose job this is; None for a job that is not this adapter's."""
    match name.split(":"):
        case [mark, whose, endpoint, own] if mark == _MARK and whose == adapter:
            return replica_name(endpoint, own) if is_id(endpoint) and is_id(own) else None
        case _:
            return None


def first(jobs: Iterable[SlurmJob]) -> SlurmJob:
    """Of jobs of one name the one that counts: they run one after the other, in the order of their numbers."""
    return min(jobs, key=lambda job: job.number)


def sighting(job: SlurmJob) -> Sighting:
    """What a job says of its replica."""
    if job.over:
        return Sighting(WorkerLife.ENDED, job.exit_code, _why_ended(job))
    if job.state in _RUNNING:
        return Sighting(WorkerLife.READY)
    why = f"its job {job.number} is {job.state.lower()}"
    return Sighting(WorkerLife.STARTING, reason=why if job.reason in {"", "None"} else f"{why}: {job.reason}")


def _parse(fields: Sequence[str]) -> SlurmJob:
    number, state, status, used, reason, name = fields
    number = number.removeprefix("\n")  # of the line before
    if not number.isdecimal():
        raise ValueError(f"squeue says {number[:80]!r}")
    code = _exit_code(status) if state in _ENDED else None
    if code is not None and not _is_of_the_program(state, code, reason):
        code = None
    return SlurmJob(int(number), name, state, code, used in _YOUNG, reason)


def _is_of_the_program(state: str, code: int, reason: str) -> bool:
    """Whether an exit code says how the program ended, and not what Slurm wrote there for want of one."""
    if state == "FAILED":
        return reason in _OF_THE_PROGRAM
    return state != "OUT_OF_MEMORY" and (code != 0 or state == "COMPLETED")


def _exit_code(status: str) -> int | None:
    """From `256` (as wait(2) has it) or `1:0` (code and signal), whichever this Slurm writes."""
    if found := re.fullmatch(r"(\d+):(\d+)", status):
        code, signal = int(found[1]), int(found[2])
    elif status.isdecimal():
        code, signal = int(status) >> 8 & 0xFF, int(status) & 0x7F
    else:
        return None
    return -signal if signal else code


def _why_ended(job: SlurmJob) -> str:
    if job.state != "FAILED":
        return _ENDED[job.state]
    if job.exit_code is None:
        return f"its job failed: {job.reason}"
    return f"exit code {job.exit_code}" if job.exit_code > 0 else f"ended by signal {-job.exit_code}"


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
    """How to submit the job of a replica by the template of that name; what is empty is left to Slurm.

    `singleton` lets only one job of a name run at a time: should an answer of Slurm be lost and the job be submitted
    again, the second one waits for the end of the first, and can be cancelled. A job that ended is not queued again by
    Slurm, since what takes its place is the autoscaler's to say.

    Raises:
        LaunchRefusedError: the order does not fit the template.
    """
    what = launch(name, template, order, python, environment)
    options = {
        "job-name": job_name(adapter, order.replica),
        "comment": order.replica,
        "dependency": "singleton",
        "export": "ALL",
        "nodes": str(template.nodes),
        "gres": _gpus(name, template, order.gpu_count),
        "partition": template.partition or "",
        "account": template.account or "",
        "qos": template.qos or "",
        "constraint": template.constraint,
        "cpus-per-task": str(template.cpus or ""),
        "mem": template.memory,
        "time": template.time_limit,
        "chdir": str(what.working_dir or ""),
        "output": template.output,
        "signal": f"B:TERM@{template.notice_seconds}" if template.notice_seconds else "",
    }
    # sbatch hands on its own environment. Slurm says which GPUs a job has; one that asks for none must see none.
    variables = {
        name: value
        for name, value in what.env.items()
        if name != "CUDA_VISIBLE_DEVICES" or not order.gpu_count
    }
    given = (f"--{name}={value}" for name, value in options.items() if value)
    return Submission(("--parsable", "--no-requeue", *given, str(SCRIPT), *what.argv), variables)


def is_away(said: str) -> bool:
    """Whether a command of Slurm failed since the controller does not answer."""
    return any(text in said for text in _AWAY)


def is_refusal(said: str) -> bool:
    """Whether sbatch was told that a job like this can never run, by the texts of slurm_strerror."""
    return any(text in said for text in _NEVER)


def _gpus(name: str, template: JobTemplate, count: int) -> str:
    """GPUs on each node, as --gres takes them."""
    each, left = divmod(count, template.nodes)
    if left:
        raise LaunchRefusedError(
            f"{count} GPUs cannot be shared by the {template.nodes} nodes of template {name}"
        )
    kind = f"gpu:{template.gpu_type}" if template.gpu_type else "gpu"
    return f"{kind}:{each}" if each else ""
